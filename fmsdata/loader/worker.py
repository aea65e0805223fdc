"""What runs in a worker process.

A worker of a stream reads some of the rank's lanes. For each request, a number of batches, it works
out alone which samples of that round belong to its lanes, reads their lines and replies. A worker of
map-style rows (`fmsdata/loader/row_workers.py`) is sent the ids of its rows. Both end when they are
asked to, when the pipe is closed, or when the trainer is gone.
"""

import os
import pickle
import random
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fmsdata.core.chunk import Row
from fmsdata.core.limits import start_thread
from fmsdata.corpus.tokenizer_threads import THREADS
from fmsdata.errors import ConfigError, WorkerError
from fmsdata.loader.fork_server import watch_process
from fmsdata.loader.reply import Reply, ReplySize, WorkerFailure, join_lines, write_reply
from fmsdata.loader.shared_memory import SharedMemory
from fmsdata.loader.worker_note import WorkerNote
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.finite import PassPlan
from fmsdata.run.positions import Milestone, Positions
from fmsdata.run.rescalable import Rescalable
from fmsdata.tasks.batch import Gathering

WATCH_SECONDS = 1.0  # how often a worker checks whether the trainer is still there, where nothing wakes it


class Reader(Protocol):
    """What answers the requests in a worker."""

    def read(self, request: Any) -> ReplySize: ...


class Spec(Protocol):
    """What a worker reads. It is sent to workers that are not forked from the trainer."""

    @property
    def index(self) -> int: ...

    @property
    def workers(self) -> int: ...

    @property
    def trainer(self) -> int:
        """Its process id."""

    def open(self, channel: "Channel") -> Reader:
        """Called in the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """A worker that reads lanes."""

    data: Rescalable
    positions: Positions  # of all lanes of the rank
    index: int
    workers: int
    batch_size: int
    needs_lines: bool
    trainer: int  # its process id
    plan: PassPlan | None = None  # of a finite pass

    @property
    def lanes(self) -> list[int]:
        """The lanes that this worker reads."""
        return lanes_of_worker(self.positions, self.workers)[self.index]

    def open(self, channel: "Channel") -> Reader:
        return RoundReader(self, channel)


class Channel(NamedTuple):
    """What a worker and the trainer share."""

    requests: Connection  # this side's end of the pipe
    note: WorkerNote
    memories: Sequence[SharedMemory]  # for the replies of successive rounds, in turn

    def close(self) -> None:
        self.requests.close()
        self.note.close()
        for memory in self.memories:
            memory.close()


class Surroundings(NamedTuple):
    """What a worker takes over from the trainer before its specification can be read."""

    path: list[str]
    environ: dict[str, str]
    folder: str
    trainer: int  # its process id
    worker: int  # the number of the worker
    workers: int

    @classmethod
    def of_trainer(cls, worker: int, workers: int) -> "Surroundings":
        return cls(list(sys.path), dict(os.environ), os.getcwd(), os.getpid(), worker, workers)

    def take_over(self) -> None:
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)


def lanes_of_worker(positions: Positions, workers: int) -> list[list[int]]:
    """The rank's lanes, dealt out to its workers in turn."""
    lanes = list(positions.lines)
    return [lanes[index::workers] for index in range(workers)]


def serve_worker(descriptors: Sequence[int]) -> None:
    """Be a worker that a fork server started: everything else comes through the pipe."""
    requests, *shared = descriptors
    note, *memories = map(SharedMemory, shared)
    channel = Channel(Connection(requests), WorkerNote(note), memories)
    with suppress(EOFError, ConnectionError):  # the trainer is gone, or has closed the loader
        surroundings: Surroundings = channel.requests.recv()
        _detach_from_trainer(surroundings.worker, channel)
        failed = _end_with_trainer(surroundings.trainer, channel)
        text = channel.requests.recv_bytes()
        reader: Reader
        try:
            surroundings.take_over()
            THREADS.share(surroundings.workers)
            reader = failed or pickle.loads(text).open(channel)
        except Exception as error:
            reader = FailedReader(_unreadable(error), channel.memories)
        _reply_to_requests(reader, channel.requests)


def run_worker(spec: Spec, channel: Channel, inherited: Sequence[Connection]) -> None:
    """Be a worker that was forked from the trainer.

    `inherited` are pipe ends of the trainer.
    """
    for connection in inherited:
        connection.close()
    _detach_from_trainer(spec.index, channel)
    failed = _end_with_trainer(spec.trainer, channel)
    THREADS.share(spec.workers)
    with suppress(EOFError, ConnectionError):
        _reply_to_requests(failed or spec.open(channel), channel.requests)


def _reply_to_requests(reader: Reader, requests: Connection) -> None:
    pending: deque[Any] = deque()
    while True:
        while not pending or requests.poll():
            request = requests.recv()
            if request is None:
                return
            pending.append(request)
        requests.send(reader.read(pending.popleft()))


def _unreadable(error: Exception) -> WorkerFailure:
    return WorkerFailure.of(
        ConfigError(
            f"the pipeline can't be used in a worker process: {type(error).__name__}: {error}; functions and classes "
            "must be in a module that workers can import, or in the script or notebook itself; or use "
            "multiprocessing_context='fork'"
        )
    )


class FailedReader:
    """Takes the place of a reader that could not be created: every reply says why."""

    def __init__(self, failure: WorkerFailure, memories: Sequence[SharedMemory]) -> None:
        self._failure, self._memories = failure, deque(memories)

    def read(self, request: Any) -> ReplySize:  # noqa: ARG002
        self._memories.rotate(-1)
        return write_reply(self._memories[-1], Reply(failure=self._failure))


class RoundReader:
    """Reads a worker's lines, round after round, into its shared memories."""

    def __init__(self, spec: WorkerSpec, channel: Channel) -> None:
        self._spec, self._memories = spec, channel.memories
        self._lane_set = set(spec.lanes)
        self._turns = spec.positions.turns(None if spec.plan is None else spec.plan.lines)
        self._round = 0
        self._failure: WorkerFailure | None = None
        try:
            share = len(spec.lanes) / spec.data.lanes
            files = OpenFiles(share, lambda block: channel.note.write(str(block)), spec.data.versions)
            self._lanes = spec.data.start(spec.lanes, spec.positions.states(spec.lanes), files)
            self._lanes.expect(spec.plan)
        except Exception as error:
            self._failure = WorkerFailure.of(error)

    def read(self, request: int) -> ReplySize:
        """Read the lines of the next round, of this number of batches, as far as possible.

        After a failure nothing more is read.
        """
        memory = self._memories[self._round % len(self._memories)]
        self._round += 1
        samples = self._turns.take(request * self._spec.batch_size)
        rows: list[Row] = []
        passed: list[Milestone] = []
        try:
            if self._failure is None:
                lanes, mine = self._spec.data.lanes, self._lane_set
                self._lanes.take_into(rows, passed, [sample for sample in samples if sample % lanes in mine])
        except Exception as error:
            self._failure = WorkerFailure.of(error)
        try:
            if rows:
                return self._write(memory, rows, passed)
        except Exception as error:
            self._failure = WorkerFailure.of(error)
        return write_reply(memory, Reply(failure=self._failure))

    def _write(self, memory: SharedMemory, rows: list[Row], passed: list[Milestone]) -> ReplySize:
        lines = Gathering.of(rows)
        length, dtype = lines.length, lines.dtype
        size = len(rows) * length * dtype.itemsize
        lines.copy_to(np.frombuffer(memory.reserve(size), dtype).reshape(len(rows), length))
        reply = Reply(
            length=length,
            dtype=dtype.str,
            padding=lines.padding,
            lines=join_lines(rows) if self._spec.needs_lines else None,
            passed=passed,
            stats=self._lanes.files.stats(),
            versions=self._spec.data.versions.news(),
            failure=self._failure,
        )
        return write_reply(memory, reply, size)


def _detach_from_trainer(index: int, channel: Channel) -> None:
    """Set up what differs between a worker and the trainer.

    Signals are for the trainer, which decides what they mean. Handlers of the trainer for SIGTERM
    must not run here. Random generators differ between workers, for stages that draw from the
    global ones.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # schedulers warn all processes of a job with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel.note.answer_signals()
    torch.set_num_threads(1)
    random.seed(index)
    np.random.seed(index)  # noqa: NPY002
    torch.manual_seed(index)


def _end_with_trainer(trainer: int, channel: Channel) -> FailedReader | None:
    """End this process when the trainer is gone, however it ended, and whatever is read here.

    The pipe's other end is closed then, unless another fork of the trainer still has it open. So
    the process itself is watched too, where the system allows that. The descriptor of the pipe is a
    copy that stays open until this process ends, so that the trainer never sees a closed pipe
    before the exit code.

    Returns a reader that says why, if there can be no thread that watches.
    """
    ended = select.poll()
    ended.register(os.dup(channel.requests.fileno()), 0)  # reports nothing but a hang-up
    watched = watch_process(trainer)
    if watched is not None:
        ended.register(watched, select.POLLIN)

    def watch() -> None:
        while watched is not None or _exists(trainer):
            if ended.poll(None if watched is not None else WATCH_SECONDS * 1000):
                break
        os._exit(1)

    try:
        start_thread(threading.Thread(target=watch, name="fmsdata-watch-trainer", daemon=True))
    except WorkerError as error:
        return FailedReader(WorkerFailure.of(error), channel.memories)
    return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
