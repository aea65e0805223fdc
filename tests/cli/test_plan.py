"""`fmsdata plan`: what it foretells is what a run does."""

import json
import subprocess
import sys
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fmsdata.cli.outlook import outlook
from fmsdata.cli.plan import count_of_tokens
from fmsdata.cli.run import Run
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.errors import ConfigError, FmsdataWarning
from fmsdata.run.shares import expected_tokens
from fmsdata.storage import spool
from tests.helpers import CONFIG, documents, write_source
from tests.servers.object_store import ObjectStore

FMSDATA = Path(sys.executable).parent / "fmsdata"
PHASES: list[Any] = [{"until_tokens": 8000, "weights": {"web": 1, "wiki": 0}}, {"until_tokens": 20_000}]


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FMSDATA, "plan", *args], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(1)
    write_source(root / "web", documents(rng, 900, shortest=5))
    write_source(root / "wiki", documents(rng, 200, shortest=5), layout="batch")
    (root / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "path": str(root)}))
    return root


def test_a_plan_tells_the_pipeline_the_mix_and_the_ranks(root: Path) -> None:
    done = run(root / "run.yaml", "--world-size", "6", "--tokens", "100k")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Rescalable lanes=24 seed=3"
    assert [line.strip("│├└─ ").split()[0] for line in lines[1:5]] == ["Shuffle", "Pack", "Delimit", "Mixture"]
    (web,) = (line.split() for line in lines if line.split()[:1] == ["web"])
    assert web[1] == "900"
    assert "70.00%" in web
    assert "same stream  on 1, 2, 3, 4, 6, 8, 12, 24 ranks" in done.stdout
    assert "each 6 lines on 6 ranks" in done.stdout
    assert "72 samples apart" in done.stdout
    assert "warning: read many times in 100k tokens: 'wiki' (7.1 times)" in done.stdout


def test_json_holds_all_that_is_told(root: Path) -> None:
    done = run(root / "run.yaml", "--json", "loader.batch_size=4", "lanes=35")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["lanes"] == 35
    assert report["same_stream_at_world_sizes"] == [1, 5, 7, 35]
    assert report["tokens_per_step"] == 64
    assert report["sources"]["wiki"]["documents"] == 200
    assert report["sources"]["wiki"]["share"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--tokens", "many"], 1, "--tokens is 'many'; write a number such as 300e9"),
        (["--tokens", "0"], 1, "--tokens is '0'"),
        (["--world-size", "25"], 1, "world size 25 is more than the 24 lanes"),
        (["--world-size", "0"], 1, "world size 0"),
        (["loader.bach_size=3"], 1, "did you mean 'batch_size'"),
        (["path=/nowhere"], 1, "/nowhere: no such folder"),
        (["lanes"], 1, "write KEY=VALUE"),
        (["--nonsense"], 2, "No such option"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_in_one_line(root: Path, args: list[str], code: int, words: str) -> None:
    done = run(root / "run.yaml", *args)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"phases": PHASES},
        {"phases": [*PHASES, {"weights": {"wiki": 1, "web": 3}}]},
        {"sources.wiki.max_epochs": 2},
        {"sources.wiki.max_epochs": 1.5, "phases": PHASES},
    ],
    ids=str,
)
def test_a_run_reads_what_was_planned(root: Path, overrides: dict[str, Any]) -> None:
    config = read_config(root / "run.yaml", {"lanes": 6, **overrides})
    data = build_data(config)
    got = Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FmsdataWarning)
        for batch in islice(make_loader(config, data, rank=0, world_size=1), 2400):
            for row in batch["provenance"]:
                for span in row:
                    got[span.source] += span.stop - span.start
    mixture: Any = data.lines.children()["below"].children()["below"].children()["below"]
    planned = expected_tokens(mixture, got.total())
    for name, tokens in planned.items():
        assert got[name] == pytest.approx(tokens, abs=6 * (16 * 8 + 60)), name
    assert sum(planned.values()) == pytest.approx(got.total())


def test_what_users_should_look_out_for_is_told(root: Path) -> None:
    def told(tokens: int, world_size: int = 1, **overrides: Any) -> str:
        config = read_config(root / "run.yaml", {name.replace("__", "."): one for name, one in overrides.items()})
        return "\n".join(outlook(Run.of_config(config), tokens, world_size)["warnings"])

    assert told(10_000, lanes=4) == ""
    assert "'wiki' (38.2 times)" in told(540_000, lanes=4)
    assert "fewer blocks than the 300 lanes: 'wiki' (200 blocks)" in told(10_000, lanes=300)
    assert "hold 104k tokens, more than an epoch of 'web' (73.1k of them, 20.4k an epoch)" in told(
        10_000, lanes=24, shuffle__window=256
    )
    assert "5 ranks don't divide 24 lanes" in told(10_000, world_size=5)
    assert "23 is prime" in told(10_000, lanes=23)
    assert "not read at all: 'wiki' (weight 0)" in told(10_000, sources__wiki__weight=0)
    late = [{"until_tokens": 10**9, "weights": {"web": 1, "wiki": 0}}, {"weights": {"web": 0, "wiki": 1}}]
    assert "not read" not in told(10_000, phases=late)
    assert "used up: 'wiki' (1.0 times)" in told(100_000, sources__wiki__max_epochs=1)


def test_a_plan_says_how_far_lanes_drift_and_how_many_would_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lengths = 1 + rng.lognormal(2, 1, 20_000).astype(int)
    write_source(tmp_path / "web", [np.full(length, 10) for length in lengths])
    write_source(tmp_path / "tiny", documents(rng, 30, shortest=5))
    config = {**CONFIG, "path": str(tmp_path), "lanes": 1024}
    config["sources"] = {"web": {"weight": "natural"}, "tiny": {"weight": "natural"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = run(tmp_path / "run.yaml", "--world-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sources"]["web"]["drift"] == pytest.approx(0.13, abs=0.01)
    assert report["sources"]["web"]["proposed_lanes"] == 96  # a multiple of the world size
    assert report["sources"]["tiny"]["proposed_lanes"] is None
    assert report["drift"] == {"largest": report["sources"]["tiny"]["drift"], "bound": 0.05, "proposed_lanes": 96}
    (warning,) = (warning for warning in report["warnings"] if "finish an epoch" in warning)
    assert "'web' (13%, below 5% with 96 lanes); use fewer lanes" in warning
    done = run(tmp_path / "run.yaml", "--world-size", "8", "lanes=96", "sources.tiny=null")
    assert "drift        when an epoch's worth of 'web' was read, 4." in done.stdout
    assert "finish an epoch" not in done.stdout


def test_a_plan_shows_the_window_that_was_chosen_and_its_memory(root: Path) -> None:
    config = read_config(root / "run.yaml", {"shuffle": None, "lanes": 4, "shuffle.distance": 9})
    report = outlook(Run.of_config(config), None, 2)
    assert report["lines"]["window"] == 27
    assert report["lines"]["window_is_automatic"]
    assert report["lines"]["samples_of_a_rank_between_neighbouring_lines"] == pytest.approx(28 / 3 * 2)
    assert 0 < report["windows_per_worker_bytes"] < report["memory_per_worker_bytes"]


def test_windows_that_need_much_memory_are_warned_about(root: Path, object_store: ObjectStore) -> None:
    config = read_config(root / "run.yaml", {"shuffle.window": 10_000_000, "lanes": 4})
    (warning,) = (one for one in outlook(Run.of_config(config), None, 1)["warnings"] if "GB per worker" in one)
    assert "the shuffle windows of 10,000,000 lines take about" in warning
    url = object_store.bucket("windows")
    store: dict[str, Any] = {"path": url, "storage_options": object_store.options}
    object_store.upload(root, url)
    small = {"storage.prefetch_bytes": "100kB"}
    cases: list[tuple[int, dict[str, Any], str | None]] = [
        (8, {"storage.spool": None}, None),
        (2000, {"storage.spool": None}, "(100kB): "),
        (2000, {}, None),
        (2000, {"storage.spool.limit": "50kB"}, "(100kB) and storage.spool (50kB): "),
    ]
    for window, more, words in cases:
        config = read_config(root / "run.yaml", {**store, **small, **more, "shuffle.window": window})
        report = outlook(Run.of_config(config), None, 1)
        found = [one for one in report["warnings"] if "does not fit into storage.prefetch_bytes" in one]
        assert len(found) == (words is not None)
        assert all(f"does not fit into storage.prefetch_bytes {words}blocks are fetched again" in one for one in found)
        beyond = max(0.0, 1.5 * report["remote_shards_in_windows_bytes"] - 62_500)  # five eighths of it hold blocks
        limit = 1e9 if not more else 50_000 if "storage.spool.limit" in more else 0
        assert report["remote_shards_spooled_per_worker_bytes"] == pytest.approx(min(limit, beyond), abs=1)


def test_a_disk_that_has_no_room_for_the_spool_is_warned_about(
    root: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = object_store.bucket("spools")
    object_store.upload(root, url)
    changes = {
        "path": url,
        "storage_options": object_store.options,
        "storage.prefetch_bytes": "100kB",
        "storage.spool.path": str(tmp_path / "new" / "spool"),
        "shuffle.window": 2000,
        "lanes": 4,
    }

    def warned() -> list[str]:
        run = Run.of_config(read_config(root / "run.yaml", changes))
        return [one for one in outlook(run, None, 1)["warnings"] if "storage.spool needs" in one]

    assert not warned()
    monkeypatch.setattr(spool, "KEPT_FREE", 1.0)
    assert [f"on this machine {tmp_path} has room for 0MB" in one for one in warned()] == [True]
    monkeypatch.setattr(spool, "is_in_memory", lambda _: True)
    assert [f"on this machine {tmp_path} is in memory (tmpfs)" in one for one in warned()] == [True]
    assert not (tmp_path / "new").exists()


def test_the_steps_are_those_that_a_run_takes(root: Path) -> None:
    """With BOS and EOS, and a token at each end of a line."""
    config = read_config(root / "run.yaml", {"documents.bos": 1, "pack.bol": 2, "pack.eol": 3, "lanes": 6})
    data = build_data(config)
    stored = steps = 0
    for batch in make_loader(config, data, rank=0, world_size=1):
        steps += 1
        stored += sum(span.stop - span.start for row in batch["provenance"] for span in row)
        if stored > 20_000:
            break
    assert outlook(Run.of_config(config, data), stored, 1)["steps"] == pytest.approx(steps, rel=0.03)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_number_is_cut_off_in_a_terminal(root: Path, columns: int) -> None:
    command = f"stty cols {columns}; {FMSDATA} plan {root / 'run.yaml'} --tokens 300B"
    done = subprocess.run(["script", "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    for words in ("900", "70.00%", "210B", "epochs", "blocks"):
        assert words in done.stdout
    assert "…" not in done.stdout


def test_a_source_of_empty_documents_can_be_planned(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[]] * 5)
    write_source(tmp_path / "wiki", [[10, 11]] * 50)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"path": str(tmp_path), "pack": {"seq_len": 4}, "lanes": 2}))
    done = run(tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "count"),
    [("1e12", 10**12), ("300B", 300 * 10**9), ("1.5T", 15 * 10**11), ("20_000", 20_000), ("5,000", 5000), ("7k", 7000)],
)
def test_tokens_are_counted_as_people_write_them(text: str, count: int) -> None:
    assert count_of_tokens(text) == count


@pytest.mark.parametrize("text", ["", "T", "-3", "nan", "inf", "1e30", "3X"])
def test_other_texts_are_no_count(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens is"):
        count_of_tokens(text)
