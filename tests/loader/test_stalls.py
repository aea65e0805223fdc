"""Silence: a batch that does not come is reported, with what is waited for, and can become an error."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata.loader.patience import Patience, StallLimits
from fmsdata.loader.worker_note import LISTENS, STACK_SECONDS, TEXT_BYTES, WorkerNote
from tests.helpers import documents, maker, worker_processes, write_source

RELEASE = threading.Event()  # ends the function that never returns, when a test is over


def stuck(item: fmsdata.Item) -> fmsdata.Item:
    if item.document == 15:
        RELEASE.wait(600)
    return item


def loader_of(folder: Path, function: Any, **options: Any) -> fmsdata.StatefulDataLoader:
    write_source(folder / "web", documents(np.random.default_rng(0), 400, shortest=20), shards=1)
    lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader(folder / "web"), function), seq_len=33)
    data = fmsdata.Rescalable(lines, lanes=4, seed=1)
    return fmsdata.StatefulDataLoader(data, batch_size=2, rank=0, world_size=1, **options)


@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 1, "prefetch": 0}, {"num_workers": 0}], ids=str
)
def test_a_function_that_never_returns_is_named_and_ends_the_wait(tmp_path: Path, options: dict[str, Any]) -> None:
    warm = loader_of(tmp_path, lambda item: item, **options)  # the first worker of a process takes longer
    next(iter(warm))
    warm.close()
    loader = loader_of(tmp_path, stuck, stall_warning=2, stall_timeout=8, **options)
    with (
        pytest.warns(fmsdata.FmsdataWarning, match="no batch came for") as warned,
        pytest.raises(fmsdata.StallError, match="no batch came for 8 s, and stall_timeout is 8") as raised,
    ):
        for _ in loader:
            pass
    for message in [str(raised.value), str(warned[-1].message)]:
        assert "reading source 'web', part-0.arrow, documents" in message
        assert "in stuck" in message, "the stack"
        assert ("worker" in message) == bool(options["num_workers"])
    assert loader.state_dict()["step"] > 0
    RELEASE.set()
    loader.close()
    RELEASE.clear()


def test_a_stopped_worker_is_named_and_continues_where_it_was(corpus: Path) -> None:
    expected = [batch["input_ids"].tolist() for batch in islice(maker(corpus)(0, 1), 400)]
    loader = maker(corpus, loader__num_workers=2, loader__stall_warning=2)(0, 1)
    batches = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first worker of a process may take long
        seen = [next(batches)["input_ids"].tolist()]
    victim = worker_processes()[1].pid
    os.kill(victim, signal.SIGSTOP)
    threading.Timer(6, os.kill, [victim, signal.SIGCONT]).start()
    with pytest.warns(fmsdata.FmsdataWarning, match=rf"process {victim}: worker 1 of 2.*kill -CONT {victim}"):
        seen += [next(batches)["input_ids"].tolist() for _ in range(399)]
    assert seen == expected
    loader.close()


BLOCK = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)  # somebody opens the file, and waits
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("blocked", flush=True)
input()
"""


@contextmanager
def blocked(file: Path) -> Iterator[Callable[[], object]]:
    """A file that can't be opened, like one on a server that does not answer; and a function that ends that."""
    command = [sys.executable, "-c", BLOCK, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as lease:
        assert lease.stdout is not None
        assert lease.stdout.readline() == b"blocked\n"
        try:
            yield lease.kill
        finally:
            lease.kill()


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 0}], ids=str)
def test_a_file_that_can_not_be_opened_is_named_and_read_when_it_can(tmp_path: Path, options: dict[str, Any]) -> None:
    with closing(loader_of(tmp_path, lambda item: item, **options)) as warm:
        expected = [next(warm)["input_ids"].tolist() for _ in range(3)]
    loader = loader_of(tmp_path, lambda item: item, stall_warning=1, **options)
    with blocked(tmp_path / "web" / "part-0.arrow") as release, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")

        def release_when_named() -> None:
            end = time.monotonic() + 60
            while time.monotonic() < end and not any("in _map" in str(warning.message) for warning in warned):
                time.sleep(0.1)
            release()

        thread = threading.Thread(target=release_when_named)
        thread.start()
        assert [next(loader)["input_ids"].tolist() for _ in range(3)] == expected
        thread.join()
    message = next(str(warning.message) for warning in warned if "in _map" in str(warning.message))
    assert "no batch came for" in message
    assert "reading source 'web', part-0.arrow, documents" in message
    assert ("worker 0 of 1" in message) == (options == {"num_workers": 1})
    loader.close()


def test_a_call_without_a_thread_is_watched_too(tmp_path: Path) -> None:
    def slow(item: fmsdata.Item) -> fmsdata.Item:
        if item.document == 15:
            time.sleep(3)
        return item

    loader = loader_of(tmp_path, slow, prefetch=0, stall_warning=1)
    with pytest.warns(fmsdata.FmsdataWarning, match=r"(?s)no batch came for \d s.*reading source 'web'.*in slow"):
        for _ in islice(loader, 250):
            pass
    loader.close()


@pytest.mark.parametrize("options", [{"loader__num_workers": 1}, {}, {"loader__prefetch": 0}], ids=str)
def test_a_slow_trainer_causes_no_alarm(corpus: Path, options: dict[str, Any]) -> None:
    loader = maker(corpus, loader__stall_warning=1, **options)(0, 1)
    batches = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        next(batches)
        time.sleep(1)  # for a worker to fill up
        warnings.simplefilter("error")
        for _ in range(2):
            time.sleep(2)
            next(batches)
    loader.close()


def test_time_in_which_the_whole_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    patience = Patience(StallLimits(warning=30, timeout=60))
    for _ in range(20):
        now += 0.5
        patience.check(lambda: "")
    now += 3600
    patience.check(lambda: "")


def test_warnings_come_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    patience = Patience(StallLimits(warning=30))
    when = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(600):
            now += 0.5
            before = len(caught)
            patience.check(lambda: "It waits.")
            when += [now] * (len(caught) - before)
    assert when == [30, 60, 120, 240]


@pytest.mark.parametrize("name", ["stall_warning", "stall_timeout"])
@pytest.mark.parametrize("value", [0, -1, "soon", True, float("nan")])
def test_limits_must_be_seconds(corpus: Path, name: str, value: Any) -> None:
    data = maker(corpus)(0, 1).data
    with pytest.raises(fmsdata.ConfigError, match=f"{name} is .*; it must be a number of seconds above zero"):
        fmsdata.StatefulDataLoader(data, batch_size=1, **{name: value})


def test_a_timeout_that_nothing_could_enforce_is_refused(corpus: Path) -> None:
    data = maker(corpus)(0, 1).data
    with pytest.raises(fmsdata.ConfigError, match="stall_timeout needs prefetch or num_workers"):
        fmsdata.StatefulDataLoader(data, batch_size=1, prefetch=0, stall_timeout=5)


def test_a_stopped_fork_server_is_named(corpus: Path) -> None:
    warm = maker(corpus, loader__num_workers=1)(0, 1)
    next(warm)
    server = worker_processes()[0].ppid()
    warm.close()
    os.kill(server, signal.SIGSTOP)
    try:
        loader = maker(corpus, loader__num_workers=1, loader__stall_warning=1, loader__stall_timeout=3)(0, 1)
        with (
            pytest.warns(fmsdata.FmsdataWarning, match=r"After 3 s it becomes an error"),
            pytest.raises(fmsdata.StallError, match=f"by its fork server, process {server}: .*kill -CONT {server}"),
        ):
            next(loader)
    finally:
        os.kill(server, signal.SIGCONT)
    loader.close()


def test_a_worker_that_does_not_listen_yet_is_not_ended_by_the_question_for_its_stack() -> None:
    note = WorkerNote()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as new:
        assert note.stack(new.pid) == "the process was started a moment ago"
        new.communicate(b"\n")
    assert new.returncode == 0


def test_a_note_that_is_closed_while_a_stack_is_awaited_is_closed_after_that() -> None:
    note = WorkerNote()
    os.pwrite(note.memory.fileno(), LISTENS, TEXT_BYTES)
    deaf = "import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        threading.Timer(STACK_SECONDS / 3, note.close).start()
        assert note.stack(worker.pid) == "the process does not answer"
        worker.communicate(b"\n")
    assert worker.returncode == 0
    assert note.memory.fileno() < 0
