"""Worker processes and their pipes: how they start, fail and end, one by one."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fmsdata
from fmsdata.loader.rounds import ROUND_TOKENS, RoundSizes
from fmsdata.loader.shared_memory import SharedMemory
from fmsdata.loader.worker import lanes_of_worker
from tests.helpers import documents, maker, worker_processes, write_source

START_METHODS = ["fork", "forkserver", "spawn"]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := worker_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


class Misbehave(fmsdata.Stage):
    """Does something to its process at the documents of one number."""

    def __init__(self, below: fmsdata.Stage, action: str, busy: str) -> None:
        super().__init__(below)
        self.action, self.busy = action, busy

    def transform(self, item: fmsdata.Item, key: int) -> list[fmsdata.Item]:  # noqa: ARG002
        if item.document == 15:
            match self.action:
                case "segfault":
                    faulthandler.disable()
                    ctypes.string_at(0)
                case "exit":
                    sys.exit(5)
                case "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                case "terminate":
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
                case "sleep":
                    Path(self.busy).touch()
                    time.sleep(600)
                case "end of file":
                    raise EOFError("this is not the end of the pipe")
                case "connection":
                    raise ConnectionResetError("this is not the pipe either")
        return [item]


def misbehaving(
    folder: Path, action: str, *, workers: int = 2, prefetch: int = 2, method: str | None = None
) -> fmsdata.StatefulDataLoader:
    write_source(folder / "web", documents(np.random.default_rng(0), 400, shortest=20), shards=1)
    below = Misbehave(fmsdata.ShardReader(folder / "web"), action, str(folder / "busy"))
    data = fmsdata.Rescalable(fmsdata.Pack(below, seq_len=33), lanes=4, seed=1)
    return fmsdata.StatefulDataLoader(
        data,
        batch_size=2,
        num_workers=workers,
        prefetch=prefetch,
        rank=0,
        world_size=1,
        multiprocessing_context=method,
    )


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(("action", "ending"), [("segfault", "was killed by SIGSEGV"), ("exit", "exited with code 5")])
def test_a_worker_that_dies_is_named_with_its_ending(tmp_path: Path, action: str, ending: str, method: str) -> None:
    loader = misbehaving(tmp_path, action, method=method)
    with pytest.raises(fmsdata.WorkerError, match=rf"{ending}: worker \d of 2, which was reading source 'web'"):
        for _ in loader:
            pass
    loader.close()


def test_workers_ignore_interrupts(tmp_path: Path) -> None:
    expected = [batch["input_ids"].tolist() for batch in islice(misbehaving(tmp_path / "a", "", workers=0), 40)]
    loader = misbehaving(tmp_path / "b", "interrupt")
    assert [batch["input_ids"].tolist() for batch in islice(loader, 40)] == expected
    loader.close()


@pytest.mark.parametrize("method", START_METHODS)
def test_signal_handlers_of_the_trainer_do_not_run_in_workers(tmp_path: Path, method: str) -> None:
    calls = tmp_path / "calls"

    def handle(number: int, frame: object) -> None:
        calls.write_text("the trainer's handler was called")

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        loader = misbehaving(tmp_path, "terminate", method=method)
        with pytest.raises(fmsdata.WorkerError, match="was killed by SIGTERM"):
            for _ in loader:
                pass
        loader.close()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not calls.exists()


@pytest.mark.parametrize(("action", "kind"), [("end of file", EOFError), ("connection", ConnectionResetError)])
def test_errors_of_a_stage_are_not_taken_for_errors_of_the_pipe(
    tmp_path: Path, action: str, kind: type[Exception]
) -> None:
    loader = misbehaving(tmp_path, action)
    with pytest.raises(kind, match="this is not"):
        for _ in loader:
            pass
    loader.close()


class Unopenable(fmsdata.Stage):
    """Can't be opened in a worker."""

    def open(self, lane: Any, state: Any = None) -> Any:
        if multiprocessing.parent_process() is not None and lane.index == 3:
            raise fmsdata.StageError("lane 3 can't be opened")
        return super().open(lane, state)

    def transform(self, item: fmsdata.Item, key: int) -> list[fmsdata.Item]:  # noqa: ARG002
        return [item]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_worker_that_fails_to_start_raises_at_its_first_line(corpus: Path, prefetch: int) -> None:
    """Also if other workers have lines for some batches before that."""
    lines = fmsdata.Pack(Unopenable(fmsdata.ShardReader(corpus / "web")), seq_len=9)
    data = fmsdata.Rescalable(lines, lanes=4)
    loader = fmsdata.StatefulDataLoader(
        data, batch_size=1, num_workers=4, rank=0, world_size=1, prefetch=prefetch, multiprocessing_context="fork"
    )
    expected = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1)
    with pytest.raises(fmsdata.StageError, match="lane 3 can't be opened"):
        for batch, other in zip(loader, expected, strict=False):
            assert torch.equal(batch["input_ids"], other["input_ids"])
    assert loader.state_dict()["step"] == 3
    loader.close()
    expected.close()


def until_busy(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "busy").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_is_heard_while_a_worker_is_busy(tmp_path: Path, prefetch: int) -> None:
    loader = misbehaving(tmp_path, "sleep", prefetch=prefetch)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until_busy(tmp_path)
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in loader:
            pass
    began = time.monotonic()
    thread.join()
    loader.close()
    assert time.monotonic() - began < 10
    assert not worker_processes()


def test_closing_does_not_wait_for_a_worker_that_is_busy(tmp_path: Path) -> None:
    loader = misbehaving(tmp_path, "sleep", prefetch=1000)
    next(iter(loader))
    until_busy(tmp_path)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 10
    assert not worker_processes()


def test_a_loader_that_is_dropped_does_not_wait_for_a_busy_worker(tmp_path: Path) -> None:
    loader = misbehaving(tmp_path, "sleep", prefetch=1000)
    next(iter(loader))
    until_busy(tmp_path)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 10
    while worker_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker_processes()


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_leaves_no_process_descriptor_or_thread(corpus: Path, method: str, prefetch: int) -> None:
    loader = maker(corpus, loader__num_workers=2, loader__prefetch=prefetch, loader__multiprocessing_context=method)(
        0, 1
    )
    me = psutil.Process()
    counts = []
    for _ in range(4):
        next(iter(loader))
        loader.close()
        gc.collect()
        counts.append((me.num_fds(), threading.active_count()))
    assert counts[1:] == counts[1:2] * 3, "the first time starts a fork server and the like"


def test_a_pipeline_that_can_not_be_sent_leaves_nothing_behind(corpus: Path) -> None:
    lock = threading.Lock()

    def locked(item: fmsdata.Item) -> fmsdata.Item:
        with lock:
            return item

    lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader(corpus / "web"), locked), seq_len=9)
    loader = fmsdata.StatefulDataLoader(
        fmsdata.Rescalable(lines, lanes=4), batch_size=1, num_workers=2, multiprocessing_context="spawn"
    )
    me, counts = psutil.Process(), []
    for _ in range(3):
        with pytest.raises(fmsdata.ConfigError, match="create such objects inside the function that uses them"):
            next(iter(loader))
        gc.collect()
        counts.append((me.num_fds(), threading.active_count()))
    assert counts[0] == counts[1] == counts[2]


def test_a_forked_child_that_drops_the_loader_leaves_the_workers_alone(corpus: Path) -> None:
    loader = maker(corpus, loader__num_workers=2, loader__prefetch=0)(0, 1)
    batches = iter(loader)
    next(batches)
    held = [loader]
    del loader

    def child() -> None:
        nonlocal batches
        batches = iter(())
        engine = held[0]._engine
        held.clear()
        gc.collect()
        assert engine is not None
        engine.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    time.sleep(0.2)
    expected = maker(corpus)(0, 1)
    for batch, other in zip(islice(held[0], 50), islice(expected, 1, 51), strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])
    held[0].close()
    expected.close()


def note_draws(item: fmsdata.Item) -> fmsdata.Item:
    folder = Path(os.environ["DRAWS"])
    if not (path := folder / str(os.getpid())).exists():
        drawn = random.random(), float(np.random.random()), float(torch.rand(())), torch.get_num_threads()  # noqa: NPY002
        path.write_text(" ".join(map(str, drawn)))
    return item


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_one_thread_and_random_generators_of_their_own(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    folder = tmp_path_factory.mktemp("draws")
    monkeypatch.setenv("DRAWS", str(folder))
    lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader(corpus / "web"), note_draws), seq_len=9)
    loader = fmsdata.StatefulDataLoader(
        fmsdata.Rescalable(lines, lanes=4), batch_size=4, num_workers=3, multiprocessing_context=method
    )
    next(iter(loader))
    loader.close()
    drawn = [path.read_text().split() for path in folder.iterdir()]
    assert len(drawn) == 3
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == (1 if column[0] == "1" else 3), "the last column is the number of threads"
    assert {row[-1] for row in drawn} == {"1"}


TRAINER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.loader.test_worker_pool import misbehaving, until_busy
import multiprocessing

if __name__ == "__main__":
    loader = misbehaving(Path({folder!r}), "sleep", prefetch=1000, method={method!r})
    next(iter(loader))
    until_busy(Path({folder!r}))
    print(*loader.worker_pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_that_are_busy_end_when_the_trainer_is_killed(tmp_path: Path, method: str) -> None:
    script = tmp_path / "trainer.py"
    root = str(Path(__file__).parents[2])
    script.write_text(TRAINER.format(root=root, folder=str(tmp_path), method=method))
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert len(workers) == 2
    trainer.kill()
    trainer.communicate()
    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_rounds_double_until_they_are_large_or_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    sizes = RoundSizes()
    assert [sizes.next(finished=1, batch_tokens=ROUND_TOKENS // 16) for _ in range(6)] == [2, 4, 8, 16, 16, 16]
    sizes = RoundSizes()
    rounds = []
    for _ in range(5):
        now += 0.05
        rounds.append(sizes.next(finished=1, batch_tokens=1))
    assert rounds == [2, 4, 4, 4, 4]


def test_lanes_are_dealt_out_to_workers_in_turn(corpus: Path) -> None:
    data = maker(corpus, lanes=7)(0, 1).data
    positions = data.start(range(7)).positions(0)
    assert lanes_of_worker(positions, 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_shared_memory_grows_and_shows_what_was_written_last() -> None:
    memory = SharedMemory()
    memory.write(b"ab", b"", b"cd")
    first = memory.read(4)
    assert bytes(first) == b"abcd"
    memory.write(b"x" * 100_000, b"y")
    assert bytes(memory.read(100_001)) == b"x" * 100_000 + b"y"
    assert bytes(first) == b"xxxx", "a view is of the same memory"


def test_closing_frees_descriptors_without_the_garbage_collector(corpus: Path) -> None:
    loader = maker(corpus, loader__num_workers=2)(0, 1)
    list(islice(loader, 2))
    loader.close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(5):
            list(islice(loader, 2))
            loader.close()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_signal_without_a_name_is_reported_by_number(corpus: Path) -> None:
    loader = maker(corpus, loader__num_workers=1)(0, 1)
    batches = iter(loader)
    next(batches)
    (worker,) = worker_processes()
    os.kill(worker.pid, 40)
    with pytest.raises(fmsdata.WorkerError, match="was killed by signal 40"):
        for _ in range(10_000):
            next(batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "folder"}, r"checkpoint is 'folder'; it must be a Checkpoints, as in Checkpoints\('folder'\)"),
        ({"outputs": "epochs"}, "outputs is 'epochs'; it must be a list of names"),
        ({"outputs": 5}, "outputs is 5; it must be a list of names"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(corpus: Path, arguments: dict[str, Any], message: str) -> None:
    data = maker(corpus)(0, 1).data
    with pytest.raises(fmsdata.ConfigError, match=message):
        fmsdata.StatefulDataLoader(data, batch_size=1, **arguments)
