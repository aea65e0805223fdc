"""States and checkpoints of version 0.1 still load, and the run that resumes from them reads the same batches.

The files in `tests/data/v0_1` were written once by `make.py` there, which also recorded a digest of every batch.
"""

import json
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fmsdata
from tests.data.v0_1.make import EDITS, HERE, STEPS, build, digests

EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
BATCHES = 20


def saved(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def resumed(states: Any, rank: int, world_size: int, **overrides: object) -> list[str]:
    loader = build(rank, world_size, **overrides)
    loader.load_state_dict(states)
    return digests(loader, BATCHES)


def test_the_records_are_complete() -> None:
    assert EXPECTED.keys() == {"states", "edited", "checkpoints", "train"}
    batches = [*EXPECTED["states"].values(), EXPECTED["edited"], [EXPECTED["checkpoints"]["batches"]]]
    batches.append([rank["batches"] for rank in EXPECTED["train"]])
    assert [len(ranks) for ranks in batches] == [1, 2, 3, 2, 1, 2]
    assert {len(rank) for ranks in batches for rank in ranks} == {BATCHES}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_states_resume_at_any_world_size(world_size: int) -> None:
    got = [resumed(saved("states.json"), rank, world_size) for rank in range(world_size)]
    assert got == EXPECTED["states"][str(world_size)]


def test_a_state_from_after_an_edit_resumes_with_the_edited_configuration() -> None:
    assert [resumed(saved("edited.json"), rank, 2, **EDITS) for rank in range(2)] == EXPECTED["edited"]


def test_the_same_edit_applied_today_gives_the_same_continuation() -> None:
    assert [resumed(saved("states.json"), rank, 2, **EDITS) for rank in range(2)] == EXPECTED["edited"]


def test_the_same_edit_applied_today_gives_the_same_state() -> None:
    loaders = [build(rank, 2, **EDITS) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(saved("states.json"))
    assert [loader.state_dict() for loader in loaders] == saved("edited.json")


def test_the_same_run_saves_the_same_states() -> None:
    loaders = [build(rank, 2) for rank in range(2)]
    for loader in loaders:
        digests(loader, STEPS)
    assert [loader.state_dict() for loader in loaders] == saved("states.json")


def test_the_same_run_writes_the_same_checkpoints(tmp_path: Path) -> None:
    """The same names, contents and mark of a complete checkpoint. A lane may return to an earlier anchor."""
    loaders = [build(rank, 3, checkpoint={"path": str(tmp_path), "every": 5}) for rank in range(3)]
    for batches in zip(*(islice(loader, 11) for loader in loaders), strict=True):
        assert len(batches) == 3
    for loader in loaders:
        loader.close()
    assert contents(tmp_path) == contents(HERE / "checkpoints")


def contents(folder: Path) -> dict[str, Any]:
    """What is in the files of checkpoints, without the sizes in their names, and without checksums and anchors."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.suffix == ".json":
            header, state = map(json.loads, path.read_text().splitlines())
            lanes = {lane: json.loads(text) for lane, text in state.pop("lanes").items()}
            taken = {
                lane: (saved["step"], saved["lines"], saved["lines"] >= saved["skip"]) for lane, saved in lanes.items()
            }
            name = path.relative_to(folder).as_posix().rsplit(".", 2)[0]
            found[name] = header["format"], state, taken
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_text()
    return found


def test_checkpoints_of_three_ranks_resume_on_one(tmp_path: Path) -> None:
    shutil.copytree(HERE / "checkpoints", tmp_path / "checkpoints")
    loader = build(0, 1, checkpoint={"path": str(tmp_path / "checkpoints"), "every": None})
    assert loader.state_dict()["step"] == EXPECTED["checkpoints"]["step"]
    assert digests(loader, BATCHES) == EXPECTED["checkpoints"]["batches"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_train_state_is_restored_whole(rank: int) -> None:
    expected = EXPECTED["train"][rank]
    loader = build(rank, 2)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    states = fmsdata.train_state.load(HERE / "train", loader)
    restored = fmsdata.train_state.restore(states, loader, scheduler=scheduler)
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002
    assert list(restored) == expected["restored"] == [STEPS, 12345, {"run_id": "a1b2"}]
    assert drawn == expected["drawn"]
    assert digests(loader, BATCHES) == expected["batches"]
