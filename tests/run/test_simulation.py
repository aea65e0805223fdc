"""The simulation against a real run: eight ranks that read from an object store, whose requests are counted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from fmsdata.corpus.index import write_index
from fmsdata.corpus.shard_writer import write_shard
from fmsdata.errors import ConfigError
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.simulation.simulate import Assumptions, simulate
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.tokenize import reader_of
from tests.servers.object_store import ObjectStore

RANKS, LINE, BATCH = 8, 512, 4


def write_corpus(folder: Path, layout: Any = "list") -> int:
    """Two sources with documents of lognormal lengths. Returns their tokens."""
    random, total = np.random.default_rng(0), 0
    for source, shards in (("web", 6), ("wiki", 2)):
        for shard in range(shards):
            lengths = np.maximum(1, random.lognormal(np.log(600) - 0.5, 1, 1500).astype(int)).tolist()
            documents = [random.integers(1, 60000, length).astype(np.uint16) for length in lengths]
            write_shard(folder / source / f"part-{shard}.arrow", documents, dtype=np.uint16, layout=layout)
            total += sum(lengths)
    write_index(folder)
    return total


def config_of(path: str, **more: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "path": path,
        "sources": {"web": {"weight": 3}, "wiki": {"weight": 1}},
        "pack": {"mode": "split", "seq_len": LINE},
        "shuffle": {"window": 8},
        "lanes": 32,
        "loader": {"batch_size": BATCH, "num_workers": 0, "prefetch": 1},
        **more,
    }


def simulated(config: dict[str, Any], tokens: int, **more: Any) -> dict[str, Any]:
    data = build_data(read_config(config))
    mixture = mixture_of(data)
    readers = {name: reader for name, stage in mixture.sources.items() if (reader := reader_of(stage)) is not None}
    given: dict[str, Any] = {"nodes": 1, "gpus": RANKS, "ranks": RANKS, "points": 4, **more}
    prices = {"tokens_per_second": 1000.0, "price_per_million_requests": 0.4, "price_per_gb": 0.0}
    return simulate(data, mixture, readers, 1, Assumptions(tokens=tokens, **{**prices, **given}))


def mixture_of(data: Rescalable) -> Mixture:
    stage = data.lines
    while not isinstance(stage, Mixture):
        stage = stage.children()["below"]
    return stage


@pytest.mark.parametrize("layout", ["list", "batch"])
def test_requests_and_bytes_are_those_of_a_real_run(layout: str, tmp_path: Path) -> None:
    total = write_corpus(tmp_path / "corpus", layout)
    with ObjectStore(tmp_path / "store") as store:
        url = store.bucket("corpus")
        store.upload(tmp_path / "corpus", url)
        config = config_of(url, storage_options=store.options)
        steps = total * 9 // 10 // ((LINE + 1) * BATCH * RANKS)
        tokens = steps * (LINE + 1) * BATCH * RANKS
        requests = fetched = 0
        for rank in range(RANKS):
            loader = fmsdata.build_loader(config, rank=rank, world_size=RANKS)
            batches = iter(loader)
            for _ in range(steps):
                next(batches)
            stats = loader.stats().storage
            requests, fetched = requests + stats.requests, fetched + stats.bytes
            loader.close()
        report = simulated(config, tokens)
    print(f"real {requests}, {fetched}; simulated {report['requests']:.0f}, {report['bytes']:.0f}")
    assert report["requests"] == pytest.approx(requests, rel=0.1)
    assert report["bytes"] == pytest.approx(fetched, rel=0.1)


def test_more_ranks_than_lanes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with pytest.raises(
        ConfigError, match=r"8,192 ranks need at least as many lanes, and this run has 32: add lanes=8192 "
    ):
        simulated(config_of(str(tmp_path)), 10**12, nodes=1024)


def test_bytes_of_a_token_are_those_of_the_shards(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    report = simulated(config_of(str(tmp_path)), 10**6)
    assert {name: source["bytes_per_token"] for name, source in report["sources"].items()} == pytest.approx(
        {"web": 2, "wiki": 2}, rel=0.02
    )


def test_a_lane_is_where_the_tokens_that_it_read_end_not_those_that_were_fetched(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    web = simulated(config_of(str(tmp_path)), 1000)["sources"]["web"]
    assert web["epochs_read"] < 0.001
    assert max(web["epochs"]["mean"]) < 0.05


def test_lanes_drift_as_far_when_their_blocks_are_walked_in_stretches(tmp_path: Path) -> None:
    total = write_corpus(tmp_path)
    whole, stretched = (
        simulated(config_of(str(tmp_path)), 40 * total, most_blocks=most)["sources"]["web"]["drift"]
        for most in (100_000, 400)
    )
    assert stretched == pytest.approx(whole, rel=0.5)
    assert stretched > 1


def test_a_source_that_ends_is_read_as_often_as_it_may_and_then_is_no_part_of_the_mix(tmp_path: Path) -> None:
    total = write_corpus(tmp_path)
    config = config_of(str(tmp_path))
    config["sources"]["wiki"]["max_epochs"] = 2
    report = simulated(config, 8 * total)
    assert report["sources"]["wiki"]["epochs_read"] == 2
    assert report["mix"]["planned"]["wiki"][-1] == 0
    assert report["mix"]["realised"]["wiki"][-1] == 0
    assert report["mix"]["largest_difference"] < 0.1


def test_the_mix_of_each_phase_is_realised(tmp_path: Path) -> None:
    total = write_corpus(tmp_path)
    phases = [{"until_tokens": 20 * total, "weights": {"web": 0.9, "wiki": 0.1}}, {"weights": {"web": 1, "wiki": 4}}]
    mix = simulated(config_of(str(tmp_path), phases=phases), 40 * total)["mix"]
    assert mix["planned"]["wiki"] == pytest.approx([0.1, 0.1, 0.8, 0.8])
    assert mix["realised"]["wiki"] == pytest.approx([0.1, 0.1, 0.8, 0.8], abs=0.03)


def test_command_reports_and_plots(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    config = config_of(str(tmp_path / "corpus"), epochs=1)
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    size = ["--nodes", "1024", "--gpus", "8", "--tokens", "1B", "lanes=8192"]
    program = [sys.executable, "-c", "from fmsdata.cli.app import main; main()"]
    command = [*program, "simulate", str(tmp_path / "run.yaml"), *size]
    done = subprocess.run([*command, "--plots", str(tmp_path / "plots"), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["world_size"] == 8192
    assert sum(report["requests_per_second"]) > 0
    assert report["mix"]["realised"]["web"][0] == pytest.approx(0.75, abs=0.1)
    assert report["sources"]["web"]["epochs"]["mean"][-1] > 100  # a small corpus, read often
    assert {Path(path).name for path in report["plots"]} == {
        *("requests.svg", "bytes.svg", "epochs.svg", "drift.svg", "mix.svg")
    }
    text = subprocess.run(command, capture_output=True, text=True)
    assert text.returncode == 0, text.stderr
    assert "8,192 ranks (1,024 nodes of 8), 8,192 lanes, 1B tokens in 12.2 seconds" in text.stdout
    assert "was read as an endless stream" in text.stdout
    assert "cost" in text.stdout
