"""What runs in a worker process.

A worker reads some of the rank's lanes. For each request, a number of batches, it works out alone
which samples of that round belong to its lanes, reads their lines and replies. It ends when it is
told to, when its pipe is closed, or when the trainer is gone.
"""

import os
import random
import select
import signal
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from fmsdata.core.chunk import Row
from fmsdata.loader.reply import Failure, Reply, ReplySize, join_lines, write_reply
from fmsdata.loader.shared_memory import SharedMemory
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.positions import Milestone, Positions
from fmsdata.run.rescalable import Rescalable
from fmsdata.tasks.batch import gather, padding_of

NOTE_BYTES = 1024
ORPHAN_SECONDS = 1.0  # how often a worker checks whether the trainer is still there


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker is started with, besides its end of the pipe."""

    data: Rescalable
    positions: Positions  # of all lanes of the rank
    index: int
    workers: int
    batch_size: int
    needs_lines: bool
    parent: int | None  # the trainer, if it is the parent process of the worker
    memories: Sequence[SharedMemory]  # for the replies of successive rounds, in turn
    note: SharedMemory  # what the worker is reading, for the error if it dies

    @property
    def lanes(self) -> list[int]:
        """The lanes that this worker reads."""
        return lanes_of_worker(self.positions, self.workers)[self.index]


def lanes_of_worker(positions: Positions, workers: int) -> list[list[int]]:
    """The rank's lanes, dealt out to its workers in turn."""
    lanes = list(positions.lines)
    return [lanes[index::workers] for index in range(workers)]


def run_worker(spec: WorkerSpec, requests: Connection, inherited: Sequence[Connection] = ()) -> None:
    """Be a worker until it is time to end.

    `inherited` are pipe ends of the trainer, which only a fork has.
    """
    for connection in inherited:
        connection.close()
    _detach_from_trainer(spec)
    _end_with_trainer(spec.parent, requests)
    reader = RoundReader(spec)
    pending: deque[int] = deque()  # batches of the rounds that were requested
    with suppress(EOFError, ConnectionError):  # the trainer is gone
        while True:
            while not pending or requests.poll():
                batches: int | None = requests.recv()
                if batches is None:
                    return
                pending.append(batches)
            requests.send(reader.read(pending.popleft()))


class RoundReader:
    """Reads a worker's lines, round after round, into its shared memories."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._lane_set = set(spec.lanes)
        self._turns = spec.positions.turns()
        self._round = 0
        self._failure: Failure | None = None
        try:
            files = OpenFiles(len(spec.lanes) / spec.data.lanes, self._write_note)
            self._lanes = spec.data.start(spec.lanes, spec.positions.states(spec.lanes), files)
        except Exception as error:
            self._failure = Failure.of(error)

    def read(self, batches: int) -> ReplySize:
        """Read the lines of the next round, as far as possible.

        After a failure nothing more is read.
        """
        memory = self._spec.memories[self._round % len(self._spec.memories)]
        self._round += 1
        samples = self._turns.take(batches * self._spec.batch_size)
        rows: list[Row] = []
        passed: list[Milestone] = []
        try:
            if self._failure is None:
                for sample in samples:
                    if sample % self._spec.data.lanes in self._lane_set:
                        more_rows, more_passed = self._lanes.take([sample])
                        rows += more_rows
                        passed += more_passed
        except Exception as error:
            self._failure = Failure.of(error)
        try:
            if rows:
                return self._write(memory, rows, passed)
        except Exception as error:
            self._failure = Failure.of(error)
        return write_reply(memory, Reply(failure=self._failure))

    def _write(self, memory: SharedMemory, rows: list[Row], passed: list[Milestone]) -> ReplySize:
        tokens = gather(rows)
        reply = Reply(
            length=tokens.shape[1],
            dtype=tokens.dtype.str,
            padding=padding_of(rows),
            lines=join_lines(rows) if self._spec.needs_lines else None,
            passed=passed,
            stats=self._lanes.files.stats(),
            failure=self._failure,
        )
        return write_reply(memory, reply, tokens)

    def _write_note(self, reading: str) -> None:
        self._spec.note.write(reading.encode()[:NOTE_BYTES].ljust(NOTE_BYTES))


def _detach_from_trainer(spec: WorkerSpec) -> None:
    """Undo what a fork inherits.

    Interrupts are for the trainer, which decides what they mean. Handlers of the trainer for
    SIGTERM must not run here. Random generators differ between workers, for stages that draw from
    the global ones.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    random.seed(spec.index)
    np.random.seed(spec.index)  # noqa: NPY002
    torch.manual_seed(spec.index)


def _end_with_trainer(parent: int | None, requests: Connection) -> None:
    """End this process when the trainer is gone, however it ended, and whatever is read here.

    Then the other end of the pipe is closed. If another fork of the trainer still has it open, the
    parent process has changed. The descriptor is a copy that stays open until this process ends, so
    that the trainer never sees a closed pipe before the exit code.
    """
    hang_up = select.poll()
    hang_up.register(os.dup(requests.fileno()), 0)  # reports nothing but a hang-up

    def watch() -> None:
        while parent in (None, os.getppid()):
            if hang_up.poll(ORPHAN_SECONDS * 1000):
                break
        os._exit(1)

    threading.Thread(target=watch, name="fmsdata-watch-trainer", daemon=True).start()
