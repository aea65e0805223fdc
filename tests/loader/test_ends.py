"""Ends: a loader with `steps` has a length and an end, and a run that ends unsaved says so."""

import gc
import logging
import subprocess
import sys
import warnings
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fmsdata
from fmsdata import Checkpoints, ConfigError, FmsdataWarning, StatefulDataLoader, testing
from tests.helpers import CONFIG, maker

Rows = list[list[list[int]]]


@pytest.fixture
def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=12)(0, 1).data


def loader_over(data: fmsdata.Rescalable, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(data, **{"batch_size": 2, "rank": 0, "world_size": 1, "prefetch": 1, **options})


def rows(batches: Any) -> Rows:
    return [batch["input_ids"].tolist() for batch in batches]


@pytest.fixture
def stream(data: fmsdata.Rescalable) -> Rows:
    return rows(islice(loader_over(data), 40))


@pytest.mark.parametrize("workers", [0, 1])
def test_each_iteration_ends_after_the_steps_and_the_next_one_goes_on(
    data: fmsdata.Rescalable, stream: Rows, workers: int
) -> None:
    loader = loader_over(data, steps=5, num_workers=workers)
    assert len(loader) == 5
    assert [rows(loader) for epoch in range(3)] == [stream[:5], stream[5:10], stream[10:15]]
    assert loader.state_dict()["step"] == 15
    loader.close()


def test_a_loader_that_resumes_inside_hands_out_the_rest(data: fmsdata.Rescalable, stream: Rows) -> None:
    first = loader_over(data, steps=5)
    for step in range(13):
        again = loader_over(data, steps=5)
        again.load_state_dict(first.state_dict())
        rest = 5 - step % 5
        assert len(again) == 5
        assert rows(again) == stream[step : step + rest]
        assert rows(again) == stream[step + rest : step + rest + 5], "and the next one is whole"
        if step % 5 == 0 and step:
            with pytest.raises(StopIteration):
                next(first)
        next(first)


def test_the_end_is_a_multiple_of_the_steps_however_the_batches_were_taken(
    data: fmsdata.Rescalable, stream: Rows
) -> None:
    loader = loader_over(data, steps=5)
    for batch in loader:
        assert batch
        break
    assert rows(loader) == stream[1:5]
    assert rows(islice(loader, 5)) == stream[5:10], "its end was not asked for"
    assert rows(loader) == stream[10:15]
    assert rows([next(loader) for _ in range(5)]) == stream[15:20]
    assert rows(loader) == stream[20:25]
    loader.load_state_dict(loader_over(data).state_dict())
    assert rows(loader) == stream[:5]
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader_over(data).state_dict())
    assert rows(batches) == stream[:5], "loaded in the middle of an iteration"


def test_next_works_with_and_without_an_end(data: fmsdata.Rescalable, stream: Rows) -> None:
    endless, ending = loader_over(data), loader_over(data, steps=3)
    assert rows(next(endless) for _ in range(10)) == stream[:10]
    with pytest.raises(TypeError, match=r"no length; give it one with steps="):
        len(endless)
    assert rows(next(ending) for _ in range(3)) == stream[:3]
    with pytest.raises(StopIteration):
        next(ending)
    assert rows([next(ending)]) == stream[3:4], "StopIteration came once, and the next period begins"
    assert rows(ending) == stream[4:6]
    assert next(ending, None) is not None


def test_all_ranks_end_at_the_same_step(data: fmsdata.Rescalable, stream: Rows) -> None:
    ranks = [loader_over(data, rank=rank, world_size=3, steps=4) for rank in range(3)]
    batches = [rows(rank) for rank in ranks]
    assert [len(rank) for rank in batches] == [4, 4, 4]
    flat = [row for step in zip(*batches, strict=True) for row in zip(*step, strict=True)]
    assert [row for line in flat for row in line] == [row for batch in stream[:12] for row in batch]


def test_the_laws_hold_for_loaders_with_an_end(corpus: Path) -> None:
    make = maker(corpus, loader__steps=3)
    testing.check_same_stream(make, world_sizes=[2, 3], samples=60)
    testing.check_restore_anywhere(make, steps=8)


def test_steps_are_checked_and_read_from_the_configuration(corpus: Path, data: fmsdata.Rescalable) -> None:
    for wrong in (0, -1, 1.5, "3"):
        with pytest.raises(ConfigError, match="steps"):
            loader_over(data, steps=wrong)
    loader = fmsdata.build_loader({**CONFIG, "path": str(corpus)}, {"loader.steps": 4}, rank=0, world_size=1)
    assert (len(loader), len(list(loader))) == (4, 4)


def test_epochs_over_an_endless_loader_warn_once(data: fmsdata.Rescalable) -> None:
    loader = loader_over(data)

    def train() -> None:
        for _epoch in range(4):
            for step, _batch in enumerate(loader):
                if step == 1:
                    break

    with pytest.warns(FmsdataWarning, match=r"continues at step 2.*steps=N.*next\(loader\)") as seen:
        train()
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_habits_that_continue_on_purpose_are_not_warned_about(data: fmsdata.Rescalable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_over(data)
        next(iter(loader))
        assert len(list(islice(loader, 3))) == 3
        assert len(list(islice(loader, 3))) == 3
        assert len(list(zip(range(2), loader, strict=False))) == 2
        for _ in range(3):
            next(loader)
        for _ in range(3):  # from a state each time
            loader.load_state_dict(loader.state_dict())
            next(iter(loader))
        ending = loader_over(data, steps=2)
        assert sum(1 for _ in range(3) for _ in ending) == 6


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("steps", "every", "saved"), [(10, 5, [5, 10]), (10, 4, [4, 8, 10]), (7, 100, [7]), (7, None, [])]
)
def test_a_run_that_ends_by_its_steps_is_saved(
    data: fmsdata.Rescalable, tmp_path: Path, steps: int, every: int | None, saved: list[int]
) -> None:
    folder = tmp_path / "checkpoints"
    loader = loader_over(data, steps=steps, checkpoint=Checkpoints(str(folder), every=every))
    for _ in loader:
        pass
    assert saved_steps(folder) == saved
    loader.close()


def test_a_save_that_fails_at_the_end_is_an_error_and_can_be_repeated(
    data: fmsdata.Rescalable, stream: Rows, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("not a folder")
    loader = loader_over(data, steps=3, checkpoint=Checkpoints(str(tmp_path / "none"), every=5))
    loader.checkpoint = Checkpoints(str(folder), every=5)
    with pytest.raises(fmsdata.CheckpointError):
        rows(loader)
    folder.unlink()
    loader.save()
    assert saved_steps(folder) == [3]
    assert rows(loader) == stream[3:6]
    loader.close()


def test_closing_names_the_steps_that_are_not_saved(
    data: fmsdata.Rescalable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def closed(take: int, *, save: bool = False, **settings: Any) -> list[str]:
        loader = loader_over(data, checkpoint=Checkpoints(str(tmp_path / "saved"), **settings))
        for _ in islice(loader, take):
            pass
        if save:
            loader.save()
        caplog.clear()
        loader.close()
        loader.close()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    (said,) = closed(10, every=5)
    assert "stopped at step 10" in said
    assert "since step 5 is not saved" in said
    assert "loader.save()" in said
    assert closed(5, every=5, save=True) == []
    assert closed(0, every=5) == []
    assert closed(3, every=None) == [], "the trainer decides when to save"
    assert closed(3, every=1, read_only=True) == []


ENDING = """
import sys
sys.path.insert(0, {tests!r})
from itertools import islice
from pathlib import Path
from tests.helpers import maker
from fmsdata import Checkpoints, StatefulDataLoader

def main():
    data = maker(Path({corpus!r}), lanes=12)(0, 1).data
    loader = StatefulDataLoader(data, batch_size=2, rank=0, world_size=1, checkpoint=Checkpoints({folder!r}, every=5))
    for _ in islice(loader, 7):
        pass
    {last}

main()
"""


@pytest.mark.parametrize("last", ["", "raise ValueError('crashed')"])
def test_a_process_that_ends_unsaved_says_so(corpus: Path, tmp_path: Path, last: str) -> None:
    folder = tmp_path / "checkpoints"
    script = tmp_path / "trainer.py"
    tests = str(Path(__file__).parents[2])
    script.write_text(ENDING.format(tests=tests, corpus=str(corpus), folder=str(folder), last=last))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == bool(last), done.stderr
    assert done.stderr.count("stopped at step 7") == 1
    assert f"what it handed out since step 5 is not saved in {folder}" in done.stderr
    assert not (folder / "in-use.json").exists()


def test_sigterm_needs_an_iteration(data: fmsdata.Rescalable, tmp_path: Path) -> None:
    loader = loader_over(data, checkpoint=Checkpoints(str(tmp_path / "saved"), on_sigterm=True))
    with pytest.raises(ConfigError, match=r"batches = iter\(loader\)"):
        next(loader)


def test_a_loader_that_was_iterated_over_is_freed_with_its_last_reference(data: fmsdata.Rescalable) -> None:
    gc.disable()
    try:
        loader = loader_over(data, prefetch=0)
        next(iter(loader))
        next(loader)
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
    finally:
        gc.enable()
