"""Checkpoint folders: complete or told why not, never a wrong resume, never a lost older checkpoint."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest

import fmsdata
from fmsdata import CheckpointError, Checkpoints, FmsdataWarning, StatefulDataLoader
from fmsdata.run import lease
from fmsdata.storage.location import Location
from tests.helpers import CONFIG, maker

Rows = list[list[int]]


def loaders(data: Any, folder: Any, world_size: int, **options: Any) -> list[StatefulDataLoader]:
    settings = {"every": 5, "keep": 3, **options}
    return [
        StatefulDataLoader(
            data,
            batch_size=2,
            rank=rank,
            world_size=world_size,
            prefetch=1,
            checkpoint=Checkpoints(str(folder), **settings),
        )
        for rank in range(world_size)
    ]


def run(some: list[StatefulDataLoader], steps: int) -> list[Rows]:
    """All ranks step by step, as a trainer would; what each step held, in canonical order."""
    ranks = [iter(loader) for loader in some]
    seen = []
    for _ in range(steps):
        batches = [next(rank)["input_ids"].tolist() for rank in ranks]
        seen.append([batch[i] for i in range(2) for batch in batches])
    for loader in some:
        loader.close()
    return seen


def steps_in(folder: Path) -> list[str]:
    """All that is in the folder but the lease of a run that is not closed yet."""
    return sorted((path.name for path in folder.iterdir() if path.name != lease.NAME), key=lambda name: int(name[5:]))


@pytest.fixture
def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=12)(0, 1).data


@pytest.fixture
def saved(data: fmsdata.Rescalable, tmp_path: Path) -> Path:
    """Complete checkpoints of 2 ranks after the steps 5, 10 and 15."""
    folder = tmp_path / "checkpoints"
    run(loaders(data, folder, 2), 16)
    assert steps_in(folder) == ["step-5", "step-10", "step-15"]
    return folder


def test_a_loader_saves_itself_when_a_step_is_done_and_resumes_by_itself(
    data: fmsdata.Rescalable, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    expected = run(loaders(data, tmp_path / "none", 2, every=None), 30)
    (loader,) = loaders(data, folder, 1)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    assert not folder.exists(), "the trainer may still be at work on step 5"
    next(batches)
    assert steps_in(folder) == ["step-5"]
    loader.close()
    shutil.rmtree(folder)

    assert run(loaders(data, folder, 2), 13) == expected[:13]
    assert steps_in(folder) == ["step-5", "step-10"]
    assert run(loaders(data, folder, 2), 10) == expected[10:20]
    assert run(loaders(data, folder, 2), 1) == expected[15:16]


@pytest.mark.parametrize("world_sizes", [(2, 4, 3, 1, 6), (1, 12, 5, 7, 2)])
def test_a_chain_of_world_sizes_goes_through_one_folder(
    data: fmsdata.Rescalable, tmp_path: Path, world_sizes: tuple[int, ...]
) -> None:
    count: dict[str, int] = {}
    for world_size in world_sizes:
        some = loaders(data, tmp_path / "checkpoints", world_size)
        for rows in run(some, 5):
            for row in rows:
                count[str(row)] = count.get(str(row), 0) + 1
        for loader in some:
            loader.save()
    lines = sum(count.values())
    assert lines == 2 * 5 * sum(world_sizes)
    alone = StatefulDataLoader(data, batch_size=1, rank=0, world_size=1)
    taken = [batch["input_ids"].tolist()[0] for batch in islice(alone, 3 * lines)]
    assert set(count) <= {str(row) for row in taken}


def test_loading_reads_only_the_files_that_hold_a_ranks_lanes(
    data: fmsdata.Rescalable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(loaders(data, tmp_path / "checkpoints", 6), 6)
    read: list[str] = []
    read_bytes = Location.read_bytes

    def noted(file: Location) -> bytes:
        read.append(file.name)
        return read_bytes(file)

    monkeypatch.setattr(Location, "read_bytes", noted)
    for world_size, rank, ranks in ((12, 7, {1}), (6, 2, {2}), (3, 1, {1, 4}), (1, 0, {0, 1, 2, 3, 4, 5})):
        read.clear()
        StatefulDataLoader(
            data,
            batch_size=2,
            rank=rank,
            world_size=world_size,
            checkpoint=Checkpoints(str(tmp_path / "checkpoints")),
        )
        assert {int(name.split("rank-")[1].split("-")[0]) for name in read} == ranks


def test_keep_removes_the_oldest_and_never_the_last_complete(data: fmsdata.Rescalable, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run(loaders(data, folder, 2, keep=1), 16)
    assert steps_in(folder) == ["step-15"]
    shutil.rmtree(folder)
    run(loaders(data, folder, 2, keep=None), 16)
    assert steps_in(folder) == ["step-5", "step-10", "step-15"]
    shutil.rmtree(folder)
    first, second = loaders(data, folder, 2, keep=1)
    ahead, behind = iter(first), iter(second)
    for _ in range(16):
        next(ahead)
    for _ in range(6):
        next(behind)
    first.close()
    second.close()
    assert steps_in(folder) == ["step-5", "step-10", "step-15"]
    assert [Checkpoints(str(folder)).is_complete(step) for step in (5, 10, 15)] == [True, False, False]


def file_of(folder: Path, rank: int) -> Path:
    (path,) = folder.glob(f"rank-{rank}-of-*.json")
    return path


def remove(folder: Path) -> None:
    file_of(folder, 1).unlink()


def empty(folder: Path) -> None:
    file_of(folder, 1).write_bytes(b"")


def truncate(folder: Path) -> None:
    path = file_of(folder, 0)
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(folder: Path) -> None:
    with file_of(folder, 0).open("ab") as file:
        file.write(b" ")


def without_loader(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "model.pt").write_bytes(b"weights")


def of_two_world_sizes(folder: Path) -> None:
    path = file_of(folder, 1)
    path.rename(path.with_name(path.name.replace("rank-1-of-2", "rank-1-of-3")))


def of_another_digest(folder: Path) -> None:
    """As if rank 1's file were of a run with another past."""
    path = file_of(folder, 1)
    rank, digest, size, end = path.name.rsplit(".", 3)
    path.rename(path.with_name(f"{rank}.{'0' * len(digest)}.{size}.{end}"))


FAULTS: dict[Callable[[Path], None], str] = {
    remove: "rank 1 of 2 is missing",
    empty: "a file has the wrong size: rank-1-of-2.* has 0 bytes",
    truncate: "a file has the wrong size: rank-0-of-2",
    lengthen: "a file has the wrong size: rank-0-of-2",
    without_loader: "no file of a loader",
    of_two_world_sizes: "is missing",
    of_another_digest: "rank 0 and rank 1 planned from different data, configurations or checkpoints",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    data: fmsdata.Rescalable, saved: Path, fault: Callable[[Path], None], world_size: int
) -> None:
    fault(saved / "step-15")
    with pytest.warns(FmsdataWarning, match=rf"resuming from .*step-10: step-15 can't be used, .*{FAULTS[fault]}"):
        some = loaders(data, saved, world_size)
    assert {loader.state_dict()["step"] for loader in some} == {10}
    assert (saved / "step-5").exists()
    assert (saved / "step-10").exists()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_if_all_are_damaged_nobody_starts_from_scratch_without_a_word(
    data: fmsdata.Rescalable, saved: Path, fault: Callable[[Path], None]
) -> None:
    for step in (5, 10, 15):
        fault(saved / f"step-{step}")
    if fault is without_loader:  # nothing there tells that a loader was ever saved
        with pytest.warns(FmsdataWarning, match="starting from the beginning"):
            loaders(data, saved, 1)
    else:
        with pytest.raises(CheckpointError, match=r"no checkpoint is complete.*a different folder"):
            loaders(data, saved, 1)


def test_a_first_save_that_was_cut_short_starts_from_the_beginning_with_a_warning(
    data: fmsdata.Rescalable, tmp_path: Path
) -> None:
    first, _ = loaders(data, tmp_path / "checkpoints", 2)
    next(iter(first))
    first.save()
    with pytest.warns(FmsdataWarning, match="no complete checkpoint and never had one: step-1 .*rank 1 of 2"):
        some = loaders(data, tmp_path / "checkpoints", 2)
    assert [loader.state_dict()["step"] for loader in some] == [0, 0]


def test_a_file_whose_content_was_changed_is_refused_and_named(data: fmsdata.Rescalable, saved: Path) -> None:
    path = file_of(saved / "step-15", 1)
    text = path.read_bytes()
    path.write_bytes(text.replace(b"lines", b"linez", 1))
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged: .*checksum.*remove step-15 to resume from"):
        loaders(data, saved, 2)
    shutil.rmtree(saved / "step-15")
    assert loaders(data, saved, 1)[0].state_dict()["step"] == 10


def test_stray_files_and_folders_are_no_matter(data: fmsdata.Rescalable, saved: Path) -> None:
    for name in ("notes.txt", "step-99.txt", "step-15/notes.txt", "step-15/.rank-0-of-2.x.unfinished", "step-x"):
        (saved / name).write_text("hello")
    (saved / "step-020").mkdir()
    (saved / "logs").mkdir()
    (saved / "step-15" / "model").mkdir()
    (saved / "step-15" / "rank-7-of-9.0123abcd.5.json").write_text("hello")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaders(data, saved, 3)[0].state_dict()["step"] == 15


def test_a_named_step_is_read_though_there_are_newer_ones(data: fmsdata.Rescalable, saved: Path) -> None:
    checkpoints = Checkpoints(str(saved))
    for step in (5, 10, 15):
        states = checkpoints.load(range(12), step=step)
        assert states is not None
        assert [state["step"] for state in states] == [step, step]
    with pytest.raises(
        CheckpointError, match=r"step-7 can't be used, it holds no file .* complete are step-15, step-10"
    ):
        checkpoints.load(range(12), step=7)


def test_a_checkpoint_of_another_run_is_refused(corpus: Path, saved: Path) -> None:
    for overrides, words in (({"seed": 9}, "seed"), ({"lanes": 24}, "lanes")):
        other = maker(corpus, **{"lanes": 12, **overrides})(0, 1).data
        with pytest.raises(fmsdata.StateError, match=words):
            loaders(other, saved, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_an_error_and_older_checkpoints_stay(data: fmsdata.Rescalable, small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    run(loaders(data, folder, 1), 6)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(OSError, match="No space"), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)
    (loader,) = loaders(data, folder, 1)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(CheckpointError, match=r"step-10.*can't be written: No space left"):
        next(batches)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (small_disk / "ballast").unlink()
    assert loader.save() == f"{folder}/step-10", "the loader is where it was"
    assert loader.state_dict()["step"] == 10
    loader.close()


def test_a_read_only_folder_is_an_error_that_names_it(data: fmsdata.Rescalable, small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    run(loaders(data, folder, 1), 6)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    (loader,) = loaders(data, folder, 1)
    assert loader.state_dict()["step"] == 5, "reading is all right"
    next(iter(loader))
    with pytest.raises(CheckpointError, match=r"checkpoints/step-6.*can't be written: Read-only file system"):
        loader.save()
    loader.close()


def test_a_path_that_is_a_file_is_an_error(data: fmsdata.Rescalable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(CheckpointError, match="file"):
        loaders(data, tmp_path / "file", 1)[0].save()


def test_checkpoints_work_on_other_filesystems(data: fmsdata.Rescalable) -> None:
    """The memory filesystem writes as object stores do: whole files, no folders, no renaming."""
    files = fsspec.filesystem("memory")
    expected = run(loaders(data, "memory://none", 2, every=None), 20)
    assert run(loaders(data, "memory://run/loader", 2), 12) == expected[:12]
    names = files.find("/run/loader")
    assert sum("step-10/rank-" in name for name in names) == 2
    assert run(loaders(data, "memory://run/loader", 2), 10) == expected[10:]
    assert [path.rpartition("/")[2] for path in sorted(files.ls("/run/loader", detail=False))] == [
        "step-10",
        "step-15",
        "step-5",
    ]
    files.pipe_file(next(name for name in files.find("/run/loader/step-15") if "rank-0" in name), b"torn")
    with pytest.warns(FmsdataWarning, match="step-15 can't be used"):
        assert loaders(data, "memory://run/loader", 1)[0].state_dict()["step"] == 10
    files.rm("/run", recursive=True)


def test_a_checkpoint_is_plain_text(saved: Path) -> None:
    header, body = file_of(saved / "step-10", 0).read_text().splitlines()
    assert json.loads(header)["format"] == "fmsdata loader"
    state = json.loads(body)
    assert state["step"] == 10
    assert sorted(map(int, state["lanes"])) == list(range(0, 12, 2))


def test_save_needs_a_folder(data: fmsdata.Rescalable) -> None:
    loader = StatefulDataLoader(data, batch_size=1, rank=0, world_size=1)
    with pytest.raises(fmsdata.ConfigError, match="checkpoint=Checkpoints"):
        loader.save()


def test_the_configuration_names_the_folder(corpus: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "path": str(corpus), "checkpoint": {"path": str(tmp_path / "c"), "every": 3, "keep": 2}}
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    for _ in islice(loader, 10):
        pass
    loader.close()
    assert steps_in(tmp_path / "c") == ["step-6", "step-9"]
    assert fmsdata.build_loader(config, rank=0, world_size=1).state_dict()["step"] == 9


TRAINER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.helpers import maker
from fmsdata import Checkpoints, StatefulDataLoader

data = maker(Path({corpus!r}), lanes=12)(0, 1).data
rank = int(sys.argv[1])
loader = StatefulDataLoader(data, batch_size=2, rank=rank, world_size=2, num_workers={workers},
                            checkpoint=Checkpoints({folder!r}, on_sigterm=True))
for step, batch in enumerate(loader, 1):
    print(step, flush=True)
    sys.stdin.readline()  # until the other ranks have done the step too
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_saves_a_step_that_all_ranks_have_and_ends_the_run(corpus: Path, tmp_path: Path, workers: int) -> None:
    """Rank 0 gets the signal in step 4, rank 1 only in step 5, where it waits for rank 0 in vain."""
    folder = tmp_path / "checkpoints"
    script = tmp_path / "trainer.py"
    script.write_text(
        TRAINER.format(tests=str(Path(__file__).parents[2]), corpus=str(corpus), folder=str(folder), workers=workers)
    )
    pipe = subprocess.PIPE
    ranks: list[Any] = [
        subprocess.Popen([sys.executable, script, str(rank)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for rank in range(2)
    ]

    def step_done(rank: Any, step: int) -> None:
        assert rank.stdout.readline() == f"{step}\n"

    def release(rank: Any) -> None:
        rank.stdin.write("\n")
        rank.stdin.flush()

    for step in (1, 2, 3, 4):
        for rank in ranks:
            step_done(rank, step)
        if step == 4:
            ranks[0].send_signal(signal.SIGTERM)
        for rank in ranks:
            release(rank)
    step_done(ranks[1], 5)
    ranks[1].send_signal(signal.SIGTERM)
    checkpoints = Checkpoints(str(folder))
    deadline = time.monotonic() + 30
    while not checkpoints.is_complete(4) and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGTERM)
    for rank in ranks:
        _, errors = rank.communicate(timeout=30)
        assert rank.returncode == 143, errors
        assert "Traceback" not in errors
    assert [checkpoints.is_complete(step) for step in (3, 4, 5)] == [False, True, False]
    states = checkpoints.load(range(12))
    assert states is not None
    data = maker(corpus, lanes=12)(0, 1).data
    alone = StatefulDataLoader(data, batch_size=4, rank=0, world_size=1)
    again = StatefulDataLoader(data, batch_size=4, rank=0, world_size=1)
    again.load_state_dict(states)
    for _ in islice(alone, 4):
        pass
    assert next(iter(again))["input_ids"].tolist() == next(iter(alone))["input_ids"].tolist()


def test_a_write_is_whole_or_not_at_all(data: fmsdata.Rescalable, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails on the way, nothing appears under the final name."""
    for name in ("fsync", "replace"):
        (loader,) = loaders(data, saved, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
            patch.setattr(Path, "replace", os.replace)
            next(iter(loader))
            with pytest.raises(CheckpointError, match="Input/output error"):
                loader.save()
        loader.close()
        assert not list((saved / "step-16").iterdir())
        (saved / "step-16").rmdir()


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (3, 2), (1, 4)])
@pytest.mark.parametrize("keep", [1, 3])
def test_saving_right_after_a_resume_of_another_shape_spoils_nothing(
    data: fmsdata.Rescalable, tmp_path: Path, world_size: int, batch_size: int, keep: int
) -> None:
    folder = tmp_path / "checkpoints"
    run(loaders(data, folder, 2, keep=keep), 11)

    def make() -> list[StatefulDataLoader]:
        checkpoints = Checkpoints(str(folder), keep=keep)
        return [
            StatefulDataLoader(data, batch_size=batch_size, rank=rank, world_size=world_size, checkpoint=checkpoints)
            for rank in range(world_size)
        ]

    for loader in make():
        assert loader.save() == f"{folder}/step-10"
    assert [loader.state_dict()["step"] for loader in make()] == [10] * world_size


def test_a_run_that_went_back_takes_the_place_of_the_one_before(data: fmsdata.Rescalable, saved: Path) -> None:
    """From step 5 once more, with another batch size: its step 10 replaces the old one, and step 15 is told of."""
    states = Checkpoints(str(saved)).load(range(12))
    assert states is not None
    old = [json.loads(file_of(saved / "step-5", rank).read_text().splitlines()[1]) for rank in range(2)]
    again = [
        StatefulDataLoader(
            data, batch_size=3, rank=rank, world_size=2, checkpoint=Checkpoints(str(saved), keep=5), prefetch=0
        )
        for rank in range(2)
    ]
    for loader in again:
        loader.load_state_dict(old)
        for _ in islice(loader, 5):
            pass
    again[0].save()
    assert len(list((saved / "step-10").glob("rank-*"))) == 3
    assert loaders(data, saved, 1)[0].state_dict()["step"] == 15
    with pytest.warns(FmsdataWarning, match=r"step-15 is newer than step 10, and the next resume would take it"):
        again[1].save()
    assert len(list((saved / "step-10").glob("rank-*"))) == 2
    shutil.rmtree(saved / "step-15")
    (loader,) = loaders(data, saved, 1)
    assert loader.state_dict()["history"] == [[0, 2, 2], [5, 2, 3], [10, 1, 2]]


def test_of_two_complete_ones_the_one_completed_last_is_taken(data: fmsdata.Rescalable, saved: Path) -> None:
    """As after a kill between the mark and the removal of the files that it replaces."""
    for path in list((saved / "step-15").glob("rank-*")):
        rank, digest, size, end = path.name.rsplit(".", 3)
        shutil.copy(path, path.with_name(f"{rank}.{'0' * len(digest)}.{size}.{end}"))
    assert "course" in (saved / "step-15" / "complete").read_text()
    assert loaders(data, saved, 1)[0].state_dict()["step"] == 15
    (saved / "step-15" / "complete").write_text("")
    with pytest.warns(FmsdataWarning, match="several complete sets of files, and none is marked"):
        assert loaders(data, saved, 1)[0].state_dict()["step"] == 10


def test_a_folder_that_was_copied_or_renamed_is_refused(data: fmsdata.Rescalable, saved: Path) -> None:
    shutil.copytree(saved / "step-5", saved / "step-20")
    with pytest.raises(CheckpointError, match=r"step-20 holds the state of step 5: it was copied or renamed"):
        loaders(data, saved, 1)


def test_a_rank_that_saves_alone_is_told(data: fmsdata.Rescalable, tmp_path: Path) -> None:
    loader, _ = loaders(data, tmp_path / "checkpoints", 2, every=2)
    with pytest.warns(FmsdataWarning, match=r"step-2 is still incomplete, rank 1 of 2 is missing.*every rank must"):
        for _ in islice(loader, 9):
            pass
    loader.close()


def test_a_rank_that_is_never_the_last_to_save_is_told_nothing(data: fmsdata.Rescalable, tmp_path: Path) -> None:
    """The other rank completes every checkpoint, and removes the old ones."""
    ranks = loaders(data, tmp_path / "checkpoints", 2, every=1, keep=1)
    batches = [iter(loader) for loader in ranks]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FmsdataWarning)
        for _ in range(20):
            for rank in batches:
                next(rank)
    for loader in ranks:
        loader.close()


def test_a_rank_that_planned_from_other_data_is_an_error_at_the_first_save(
    data: fmsdata.Rescalable, corpus: Path, tmp_path: Path
) -> None:
    other = maker(corpus, lanes=12, sources={"web": {"weight": 1}})(0, 1).data
    ranks = [loaders(each, tmp_path / "checkpoints", 3)[rank] for rank, each in enumerate((data, other, data))]
    for loader, expected in zip(ranks, (True, False, False), strict=True):
        for _ in range(5):
            next(loader)
        if expected:
            loader.save()
        else:
            with pytest.raises(CheckpointError, match=r"step-5: rank \d and rank \d planned from different .* again"):
                loader.save()
    for loader in ranks:
        loader.close()


def test_a_save_that_was_cut_short_before_an_edit_is_no_disagreement(
    data: fmsdata.Rescalable, corpus: Path, saved: Path
) -> None:
    """The file of the run of before is there until all ranks have saved that step again."""
    file_of(saved / "step-15", 0).unlink()
    (saved / "step-15/complete").unlink()
    edited = maker(corpus, lanes=12, sources={"web": {"weight": 1}})(0, 1).data
    with pytest.warns(FmsdataWarning, match=r"resuming from .*step-10"):
        ranks = loaders(edited, saved, 2)
    run(ranks, 6)
    assert Checkpoints(str(saved)).is_complete(15)
    assert len([*(saved / "step-15").glob("rank-*")]) == 2


def test_sigterm_reaches_all_loaders_and_handlers_and_no_forked_child(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        f"""
import multiprocessing, os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.helpers import maker
from fmsdata import Checkpoints, StatefulDataLoader

signal.signal(signal.SIGTERM, lambda *_: print("mine too", flush=True))
data = maker(Path({str(corpus)!r}), lanes=12)(0, 1).data
folders = [Checkpoints({str(tmp_path)!r} + "/" + name, on_sigterm=True) for name in ("one", "other")]
one, other = [StatefulDataLoader(data, batch_size=2, rank=0, world_size=1, checkpoint=folder) for folder in folders]
for step, batches in enumerate(zip(one, other), 1):
    if step == 3:
        fork = multiprocessing.get_context("fork")
        ready = fork.Event()  # Python drops signals that a child gets before it is set up
        child = fork.Process(target=lambda: (ready.set(), time.sleep(60)))
        child.start()
        ready.wait(20)
        child.terminate()
        child.join(20)
        print(child.exitcode, flush=True)
        print("stopped", Path({str(tmp_path)!r}, "one").exists(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 143, done.stderr
    assert done.stdout.split("\n")[:3] == ["-15", "stopped False", "mine too"]
    assert steps_in(tmp_path / "one") == ["step-2", "step-3"]
    assert steps_in(tmp_path / "other") == ["step-2"], "the first loader ended the run"


def test_processes_that_share_data_write_a_step_once(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As tensor-parallel partners do that were given the same rank: the second is one step behind."""
    folder = tmp_path_factory.mktemp("shared")
    first, second = (Checkpoints(str(folder), keep=2) for _ in range(2))
    loader = maker(corpus)(0, 1)
    states = []
    for _ in range(3):
        next(loader)
        states.append(loader.state_dict())
    first.save(states[0], 0, 1, shared=True)
    for before, state in pairwise(states):
        first.save(state, 0, 1, shared=True)
        written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
        second.save(before, 0, 1, shared=True)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == written
    first.release()
    loader.close()
