"""Looking is safe: read-only loaders and commands change nothing, and a load outlives a run that prunes."""

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

import fmsdata
from fmsdata import CheckpointError, Checkpoints, FmsdataWarning, StatefulDataLoader
from fmsdata.storage.clients.base import Listing
from fmsdata.storage.location import Location
from tests.helpers import CONFIG, maker
from tests.run.test_checkpoints import loaders, run


@pytest.fixture
def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=12)(0, 1).data


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A run that has saved the steps 4, 6 and 8."""
    section = {"path": str(tmp_path / "saved"), "every": 2, "keep": 3}
    config = {**CONFIG, "path": str(corpus), "checkpoint": section}
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    for _ in islice(loader, 9):
        pass
    loader.close()
    return config


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def test_a_read_only_loader_resumes_like_the_run_and_writes_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    before = contents(tmp_path / "saved")
    looking = fmsdata.build_loader(config, rank=0, world_size=1, read_only=True)
    seen = [batch["input_ids"].tolist() for batch in islice(looking, 25)]
    assert looking.state_dict()["step"] == 33
    with pytest.raises(CheckpointError, match=r"open for reading only \(read_only=True\).*without read_only"):
        looking.save()
    looking.load(step=6)
    with pytest.raises(CheckpointError, match="reading only"):
        looking.save()
    assert [batch["input_ids"].tolist() for batch in islice(looking, 27)][2:] == seen
    looking.close()
    ending = fmsdata.build_loader(config, {"loader.steps": 3}, rank=0, world_size=1, read_only=True)
    assert len(list(ending)) == 1
    assert len(list(ending)) == 3
    assert contents(tmp_path / "saved") == before
    real = fmsdata.build_loader(config, rank=0, world_size=1)
    assert [batch["input_ids"].tolist() for batch in islice(real, 3)] == seen[:3]
    real.close()


def test_a_read_only_loader_of_a_folder_without_checkpoints_creates_nothing(corpus: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "path": str(corpus), "checkpoint": {"path": str(tmp_path / "new"), "every": 1}}
    loader = fmsdata.build_loader(config, rank=0, world_size=1, read_only=True)
    for _ in islice(loader, 5):
        pass
    loader.close()
    assert not (tmp_path / "new").exists()
    assert fmsdata.build_loader({**config, "checkpoint": None}, rank=0, world_size=1, read_only=True)
    with pytest.raises(fmsdata.ConfigError, match="read_only is 'yes'"):
        Checkpoints("folder", read_only="yes")  # type: ignore[arg-type]


def test_a_read_only_loader_leaves_sigterm_alone(data: fmsdata.Rescalable, tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path / "saved"), read_only=True, on_sigterm=True)
    loader = StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, checkpoint=checkpoints)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(next(iter(loader))))  # signals need the main thread
    thread.start()
    thread.join(30)
    assert found
    loader.close()


def test_where_a_loader_resumes_from_and_saves_is_logged(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(**options: Any) -> list[tuple[str, str]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "fmsdata"):
            overrides = options.pop("overrides", {})
            for rank in range(2):
                fmsdata.build_loader(config, overrides, rank=rank, world_size=2, **options)
        records = [record for record in caplog.records if record.module == "checkpoints"]
        return [(record.levelname, record.getMessage()) for record in records]

    folder = tmp_path / "saved"
    saves = "the loader saves there every 2 steps and keeps the newest 3"
    assert said() == [("WARNING", f"resuming from {folder}/step-8; {saves}")]
    assert said(read_only=True) == [("WARNING", f"resuming from {folder}/step-8; nothing is written there (read_only)")]
    ((level, text),) = said(overrides={"checkpoint.step": 6})
    assert level == "WARNING"
    assert text.startswith(f"going back to {folder}/step-6; later steps are set aside")
    shutil.rmtree(folder)
    assert said() == [("INFO", f"starting at step 0: {folder} has no checkpoint; {saves}")]


COMMANDS = """
plan
preview --batches 12
bench --batches 12
audit --samples 60
trace --step 7
trace --step 5 --checkpoint SAVED
trace --document web/part-0.arrow#1
"""
ONE_AFTER_THE_OTHER = """
import sys
from fmsdata.cli.app import main

path, *commands = sys.argv[1:]
for command in commands:
    name, *options = command.split()
    sys.argv = ["fmsdata", name, path, *options]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{command}: {end.code}")
"""


def test_no_command_writes_to_the_folder(config: dict[str, Any], tmp_path: Path) -> None:
    """With a configuration that saves after every step, keeps one, and ends after two."""
    path = tmp_path / "run.yaml"
    section = {**config["checkpoint"], "every": 1, "keep": 1}
    loader = {**config["loader"], "steps": 2}
    path.write_text(yaml.safe_dump({**config, "checkpoint": section, "loader": loader}))
    before = contents(tmp_path / "saved")
    commands = COMMANDS.replace("SAVED", str(tmp_path / "saved")).strip().splitlines()
    call = [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(path), *commands]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step") > 3
    assert contents(tmp_path / "saved") == before


class Pruner:
    """Another run that completes a new checkpoint, keeps only that, and so removes the others."""

    def __init__(self, data: fmsdata.Rescalable, folder: Path) -> None:
        self._loaders = loaders(data, folder, 2, every=None, keep=1)
        self._batches = [iter(loader) for loader in self._loaders]

    def prune(self) -> None:
        for batches in self._batches:
            next(batches)
        for loader in self._loaders:
            loader.save()

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()


@pytest.fixture
def saved(data: fmsdata.Rescalable, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    run(loaders(data, folder, 2), 16)
    return folder


@pytest.mark.parametrize("method", ["read_bytes", "level"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_that_is_removed_under_a_load_gives_way_to_the_next(
    data: fmsdata.Rescalable, saved: Path, monkeypatch: pytest.MonkeyPatch, method: str, at: int, world_size: int
) -> None:
    """After any of the listings and reads of a load, the other run completes step 16 and removes all others."""
    pruner = Pruner(data, saved)
    calls, plain = 0, getattr(Location, method)

    def then_prune(place: Location) -> bytes | Listing:
        nonlocal calls
        calls += 1
        before = calls == at and method == "read_bytes"
        if before:
            pruner.prune()
        found: bytes | Listing = plain(place)
        if calls == at and not before:
            pruner.prune()
        return found

    monkeypatch.setattr(Location, method, then_prune)
    some = loaders(data, saved, world_size)
    steps = {loader.state_dict()["step"] for loader in some}
    assert steps <= {15, 16}
    monkeypatch.undo()
    pruner.close()


@pytest.mark.filterwarnings("ignore:resuming from")  # the newest one is incomplete while it is written
def test_loading_beside_a_run_that_prunes_all_the_time(data: fmsdata.Rescalable, saved: Path) -> None:
    pruner, stop = Pruner(data, saved), threading.Event()
    problems: list[BaseException] = []

    def save_and_prune() -> None:
        try:
            while not stop.is_set():
                pruner.prune()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=save_and_prune)
    thread.start()
    try:
        last, end = 15, time.monotonic() + 60
        while last < 40 and not problems and time.monotonic() < end:
            states = Checkpoints(str(saved)).load(range(12))
            assert states is not None
            assert states[0]["step"] == states[1]["step"] >= last
            last = states[0]["step"]
    finally:
        stop.set()
        thread.join()
        pruner.close()
    assert not problems
    assert last >= 40


def test_a_rank_that_starts_while_others_save_reads_the_folder_at_once(
    data: fmsdata.Rescalable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks start at different moments. Steps that only others have saved are new at each look, and incomplete."""
    folder = tmp_path / "checkpoints"
    batches = iter(loaders(data, folder, 2)[0])
    look = Checkpoints.steps

    def save_and_look(self: Checkpoints) -> list[int]:
        for _ in range(5):
            next(batches)
        return look(self)

    for _ in range(6):
        next(batches)
    monkeypatch.setattr(Checkpoints, "steps", save_and_look)
    with pytest.warns(FmsdataWarning, match="starting from the beginning"):
        assert Checkpoints(str(folder)).load([1]) is None


def test_a_folder_that_never_holds_still_is_an_error(
    data: fmsdata.Rescalable, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruner, plain = Pruner(data, saved), Location.read_bytes

    def too_late(place: Location) -> bytes:
        if "step-" in str(place):
            pruner.prune()
        return plain(place)

    monkeypatch.setattr(Location, "read_bytes", too_late)
    with pytest.raises(
        CheckpointError, match=r"changed under each of 8 attempts.*step-22 was removed while it was read"
    ):
        Checkpoints(str(saved)).load(range(12))
    with pytest.raises(CheckpointError, match=r"step-23 (was removed while it was read|can't be used)"):
        Checkpoints(str(saved)).load(range(12), step=23)
    monkeypatch.undo()
    pruner.close()


def test_a_damaged_file_is_not_taken_for_a_removed_one(data: fmsdata.Rescalable, saved: Path) -> None:
    (path,) = (saved / "step-15").glob("rank-0*")
    header, body = path.read_bytes().split(b"\n", 1)
    path.write_bytes(header + b"\n" + body.replace(b"lines", b"linez", 1))
    assert json.loads(body)["step"] == 15
    with pytest.raises(CheckpointError, match="is damaged"):
        loaders(data, saved, 1)
