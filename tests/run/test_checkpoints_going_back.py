"""Going back to a step of the folder: later steps are set aside, never removed, never resumed from."""

import json
import multiprocessing
import os
import shutil
import signal
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fmsdata
from fmsdata import CheckpointError, Checkpoints, FmsdataWarning, StatefulDataLoader
from fmsdata.run.trace import Trace
from fmsdata.storage.location import Location
from tests.helpers import CONFIG, maker
from tests.run.test_checkpoints import loaders, run, steps_in
from tests.servers.object_store import ObjectStore

Rows = list[list[list[int]]]


@pytest.fixture
def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=12)(0, 1).data


@pytest.fixture
def saved(data: fmsdata.Rescalable, tmp_path: Path) -> Path:
    """Complete checkpoints of 2 ranks after the steps 5, 10 and 15."""
    folder = tmp_path / "checkpoints"
    run(loaders(data, folder, 2), 16)
    return folder


@pytest.fixture
def stream(data: fmsdata.Rescalable, tmp_path: Path) -> Rows:
    return run(loaders(data, tmp_path / "none", 2, every=None), 40)


def newest(data: Any, folder: Any, **options: Any) -> int:
    """The step from which the next run would resume."""
    states = Checkpoints(str(folder), **options).load(range(data.lanes))
    assert states is not None
    step: int = states[0]["step"]
    return step


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_goes_back_and_its_later_steps_are_not_resumed_from(
    data: fmsdata.Rescalable, saved: Path, stream: Rows, world_size: int
) -> None:
    before = contents(saved)
    some = loaders(data, saved, world_size, step=5, keep=None, every=2)
    assert [loader.state_dict()["step"] for loader in some] == [5] * world_size
    assert contents(saved) == before, "looking changes nothing"
    assert newest(data, saved) == 15, "nor does going back, until something is saved"
    seen = run(some, 2)
    assert newest(data, saved) == 6
    assert {name: text for name, text in contents(saved).items() if name in before} == before, "nothing is removed"
    if world_size == 2:
        assert seen == stream[5:7]
        assert run(loaders(data, saved, 2), 1) == stream[6:7]
    if world_size == 1:
        assert [row for step in seen for row in step] == [row for step in stream[5:7] for row in step][:4]


def test_loading_a_named_step_of_a_loader_goes_back(data: fmsdata.Rescalable, saved: Path, stream: Rows) -> None:
    some = loaders(data, saved, 2)
    for loader in some:
        loader.load(step=10)
    assert run(some, 7) == stream[10:17]
    assert newest(data, saved) == 15
    for loader in loaders(data, saved, 2, step=5):
        loader.save()
        loader.close()
    assert newest(data, saved) == 5
    some = loaders(data, saved, 2)
    for loader in some:
        loader.load(step=10)
        next(loader)
        loader.load(step=10)
    assert newest(data, saved) == 5, "nothing saved yet"
    for loader in some:
        loader.save()
    for loader in some:
        loader.close()
    assert newest(data, saved) == 10, "saved at once, nothing trained"
    for loader in some:
        loader.load()
    assert run(some, 2) == stream[10:12]
    with pytest.raises(CheckpointError, match=r"step-7 can't be used.*complete are step-15, step-10"):
        some[0].load(step=7)
    next(some[0])
    some[0].save()
    some[0].close()
    assert not list(saved.rglob("step-10/abandoned")), "a load that failed sets nothing aside"
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        loaders(data, saved / "empty", 1)[0].load()
    with pytest.raises(fmsdata.ConfigError, match="no checkpoint folder"):
        StatefulDataLoader(data, batch_size=1, rank=0, world_size=1).load(step=5)


def test_a_step_that_is_reached_again_counts_again(data: fmsdata.Rescalable, saved: Path, stream: Rows) -> None:
    """With the same shape of the run, where the files are the same, and with another one."""
    assert run(loaders(data, saved, 2, step=5, keep=None), 6) == stream[5:11]
    assert newest(data, saved) == 10
    assert run(loaders(data, saved, 2, keep=None), 6) == stream[10:16]
    assert newest(data, saved) == 15
    assert not list(saved.rglob("abandoned"))
    (loader,) = loaders(data, saved, 1, keep=None)
    loader.load(step=5)
    run([loader], 11)
    assert newest(data, saved) == 15
    assert len(list((saved / "step-15").glob("rank-*"))) == 1
    assert not list(saved.rglob("abandoned"))


def test_a_run_that_is_restarted_goes_back_only_once(data: fmsdata.Rescalable, saved: Path, stream: Rows) -> None:
    """The scheduler starts it again with the same configuration."""
    assert run(loaders(data, saved, 2, step=5), 4) == stream[5:9], "nothing saved yet"
    assert run(loaders(data, saved, 2, step=5), 6) == stream[5:11], "so it goes back once more, and saves"
    assert run(loaders(data, saved, 2, step=5), 6) == stream[10:16]
    assert run(loaders(data, saved, 2, step=5, keep=1), 11) == stream[15:26]
    assert "step-5" not in {path.name for path in saved.iterdir()}
    assert run(loaders(data, saved, 2, step=5), 1) == stream[25:26], "the step it went back to is long gone"
    with pytest.raises(CheckpointError, match=r"step-10 can't be used"):
        loaders(data, saved, 2, step=10)


def test_it_can_go_back_again_and_forward_again(data: fmsdata.Rescalable, saved: Path, stream: Rows) -> None:
    run(loaders(data, saved, 2, step=10, every=1, keep=None), 2)
    assert newest(data, saved) == 11
    run(loaders(data, saved, 2, step=5, every=1, keep=None), 3)
    assert newest(data, saved) == 7
    assert run(loaders(data, saved, 2, step=15, every=1, keep=None), 2) == stream[15:17], (
        "it was set aside, and is there"
    )
    assert newest(data, saved) == 16
    assert [name for name in steps_in_order(saved) if (saved / name / "abandoned").exists()] == ["step-10", "step-11"]
    assert [path.name for path in saved.glob("back-to-*")] == ["back-to-15"]


def steps_in_order(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.glob("step-*")), key=lambda name: int(name[5:]))


def test_a_rank_that_is_ahead_of_rank_0_removes_nothing(data: fmsdata.Rescalable, saved: Path) -> None:
    """Rank 1 saves the same step first, where all files of the earlier run are still there."""
    zero, one = loaders(data, saved, 2, step=5, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in (one, zero):
            for _ in islice(loader, 5):
                pass
        one.save()
        assert steps_in(saved) == ["step-5", "step-10", "step-15"]
        zero.save()
    assert newest(data, saved) == 10
    assert (saved / "step-15" / "abandoned").exists()
    for loader in (zero, one):
        loader.close()


def test_a_run_that_is_behind_another_removes_nothing(data: fmsdata.Rescalable, saved: Path) -> None:
    old = [json.loads(path.read_text().splitlines()[1]) for path in sorted((saved / "step-5").glob("rank-*"))]
    (loader,) = loaders(data, saved, 1, keep=1, every=None)
    loader.load_state_dict(old)
    for _ in islice(loader, 5):
        pass
    with pytest.warns(FmsdataWarning, match=r"step-15 is newer than step 10.*loader.load\(step=...\)"):
        loader.save()
    loader.close()
    assert steps_in(saved) == ["step-5", "step-10", "step-15"]


def test_abandoned_steps_alone_are_no_fresh_start(data: fmsdata.Rescalable, saved: Path) -> None:
    run(loaders(data, saved, 1, step=10, every=1, keep=None), 2)
    for step in (5, 10, 11):
        for path in (saved / f"step-{step}").iterdir():
            path.unlink()
    with pytest.raises(CheckpointError, match="step-15 can't be used, the run went back to an earlier step"):
        loaders(data, saved, 1)


def test_a_trace_does_not_read_abandoned_steps(data: fmsdata.Rescalable, saved: Path) -> None:
    run(loaders(data, saved, 1, step=5, every=2, keep=None), 2)
    assert Trace(data, checkpoints=Checkpoints(str(saved))).newest == 6


def go_back_and_die(data: fmsdata.Rescalable, folder: Path, count: int) -> None:
    """Go back to step 5 and reach step 10 again; this process is killed at its count-th write."""
    writes, plain = 0, Location.write_bytes

    def deadly(self: Location, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes == count:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, data)

    Location.write_bytes = deadly  # type: ignore[method-assign]
    ranks = [iter(loader) for loader in loaders(data, folder, 2, step=5, keep=None)]
    for _ in range(6):
        for rank in ranks:
            next(rank)


def test_a_kill_while_going_back_loses_nothing(
    data: fmsdata.Rescalable, saved: Path, stream: Rows, tmp_path: Path
) -> None:
    """Whichever write the kill hits: the folder resumes from a step, and the next start goes back all the same."""
    before = contents(saved)
    for count in range(1, 20):
        folder = tmp_path / f"killed-{count}"
        shutil.copytree(saved, folder)
        process = multiprocessing.get_context("fork").Process(target=go_back_and_die, args=(data, folder, count))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        assert {name: text for name, text in contents(folder).items() if name in before} == before
        assert newest(data, folder) in (5, 10, 15)
        some = loaders(data, folder, 2, step=5, keep=None)
        start = some[0].state_dict()["step"]
        assert start == some[1].state_dict()["step"]
        assert start in (5, 10)
        assert run(some, 6) == stream[start : start + 6]
        assert newest(data, folder) == start + 5
        if process.exitcode == 0:
            break
    assert 6 < count < 19


def test_going_back_works_on_object_stores(data: fmsdata.Rescalable, stream: Rows, object_store: ObjectStore) -> None:
    url = f"{object_store.bucket()}/loader"
    options = {"storage_options": object_store.options}
    run(loaders(data, url, 2, **options), 16)
    assert run(loaders(data, url, 2, step=5, keep=None, every=2, **options), 2) == stream[5:7]
    assert newest(data, url, **options) == 6
    assert run(loaders(data, url, 2, step=5, keep=None, **options), 11) == stream[6:17]
    assert newest(data, url, **options) == 15
    assert not [name for name in object_store.list(url) if "abandoned" in name]


def test_the_configuration_names_the_step(corpus: Path, data: fmsdata.Rescalable, tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    config = {**CONFIG, "path": str(corpus), "checkpoint": {"path": folder, "every": 2}}
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    for _ in islice(loader, 7):
        pass
    loader.close()
    assert fmsdata.build_loader(config, {"checkpoint.step": 4}, rank=0, world_size=1).state_dict()["step"] == 4
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(fmsdata.ConfigError, match="step"):
            fmsdata.build_loader(config, {"checkpoint.step": wrong}, rank=0, world_size=1)
        with pytest.raises(fmsdata.ConfigError, match="step"):
            Checkpoints(folder, step=wrong)  # type: ignore[arg-type]
    assert os.path.isdir(folder)
