"""torch.distributed.checkpoint: saved by some ranks, loaded by others, through torchrun."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint
import yaml

import fmsdata
from tests.helpers import CONFIG, maker

dcp: Any = torch.distributed.checkpoint  # its functions are not declared as public

PROGRAM = Path(__file__).parents[1] / "programs" / "dcp.py"


def torchrun(world_size: int, *args: str | Path) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return subprocess.run([*launch, PROGRAM, *args], capture_output=True, text=True, timeout=120)


@pytest.fixture
def config(corpus: Path) -> Path:
    path = corpus / "run.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "lanes": 12, "loader": {"batch_size": 2}}))
    return path


def samples(rows: Path, world_size: int, start: int) -> Iterator[list[int]]:
    """What all ranks got, in canonical order: sample g is handed out by rank g mod W."""
    ranks = []
    for rank in range(world_size):
        batches = json.loads(Path(f"{rows}-{rank}.json").read_text())
        ranks.append([row for batch in batches for row in batch][::-1])
    for g in range(start, start + sum(map(len, ranks))):
        yield ranks[g % world_size].pop()


def test_the_loader_is_saved_and_loaded_on_any_number_of_ranks(config: Path, corpus: Path) -> None:
    """2 ranks save, 3 load and save in the background, 1 loads; the stream stays the same."""
    for world_size, args in (
        (2, f"--save {corpus}/a"),
        (3, f"--load {corpus}/a --save {corpus}/b --asynchronous"),
    ):
        done = torchrun(world_size, "--config", config, "--rows", corpus / f"rows-{world_size}", *args.split())
        assert done.returncode == 0, done.stderr
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    load({"loader": loader}, corpus / "b")
    assert loader.state_dict()["history"] == [[0, 2, 2], [5, 3, 2], [10, 1, 2]]
    seen = [*samples(corpus / "rows-2", 2, 0), *samples(corpus / "rows-3", 3, 20)]
    seen += [row for batch in islice(loader, 5) for row in batch["input_ids"].tolist()]
    alone = fmsdata.build_loader(config, rank=0, world_size=1)
    assert seen == [row for batch in islice(alone, len(seen) // 2) for row in batch["input_ids"].tolist()]


def load(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():  # torch warns of its own use without process groups
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=path, no_dist=True)


def save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=path, no_dist=True)


def test_a_checkpoint_of_other_lanes_is_refused_though_all_keys_are_there(corpus: Path) -> None:
    """torch loads the requested keys and ignores the others: the lane count must be compared."""
    save({"loader": maker(corpus, lanes=24)(0, 1)}, corpus / "saved")
    with pytest.raises(fmsdata.StateError, match="saved with lanes 24 and this run has lanes 12"):
        load({"loader": maker(corpus, lanes=12)(0, 1)}, corpus / "saved")


def test_a_checkpoint_that_lacks_lanes_is_refused(corpus: Path) -> None:
    save({"loader": maker(corpus)(0, 2)}, corpus / "saved")  # rank 1 was forgotten
    with pytest.raises(dcp.api.CheckpointException, match=r"loader\.lanes\.1\b"):
        load({"loader": maker(corpus)(0, 1)}, corpus / "saved")


def test_keys_of_different_ranks_are_different_and_the_others_are_equal(corpus: Path) -> None:
    make = maker(corpus, lanes=24)
    loaders = [make(rank, 5) for rank in range(5)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    lanes = [lane for state in states for lane in state["lanes"]]
    assert sorted(lanes, key=int) == [str(lane) for lane in range(24)]
    common = [{name: value for name, value in state.items() if name != "lanes"} for state in states]
    assert all(one == common[0] for one in common)
    values = [value for state in states for value in [*state["lanes"].values(), state["pipeline"]]]
    assert all(isinstance(value, str) for value in values), "one value a lane"


def test_changed_weights_are_seen_and_applied(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"loader": maker(corpus)(0, 1)}, corpus / "saved")
    other = maker(corpus, sources={"web": {"weight": 1}, "wiki": {"weight": 1}})(0, 1)
    load({"loader": other}, corpus / "saved")
    assert "share of 'web' 70.0000% -> 50.0000%" in caplog.text
