"""Worker processes: lanes read beside the trainer, on top of torch's own DataLoader.

The lanes of a rank are dealt out to its workers. All of them, and the loader, know whose turn it is, so the
stream is the same for any number of workers. It comes in rounds of a few batches: in each round a worker sends
one piece, the lines that it has in those batches. The tokens of a piece go through shared memory, in the type
that the shards have; only what describes them goes through torch's queue.

A worker has one memory more than the pieces that torch asks it for in advance. So, when it is asked to fill a
memory again, the loader has taken the piece that was in it.
"""

import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fmsdata.core.chunk import Chunk, Row
from fmsdata.core.tokens import Tokens
from fmsdata.errors import ConfigError, FmsdataError, StageError, WorkerError
from fmsdata.loader.feed import Taken
from fmsdata.loader.shared_memory import SharedMemory
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.lanes import Lanes, Passed, Places
from fmsdata.run.rescalable import Rescalable
from fmsdata.storage.stats import StorageStats
from fmsdata.tasks.batch import Batch, check_lengths, gather, padding_of

PREFETCH = 2  # pieces that torch asks each worker for in advance
MEMORIES = PREFETCH + 1  # of each worker
# A round grows to this many tokens of all workers together, so that what is said for each costs little; unless it
# lasts this long, with a slow stage or a slow trainer, where it costs little anyway.
ROUND_TOKENS, ROUND_SECONDS = 1 << 21, 0.25
NOTE_BYTES = 1024
LOOK_SECONDS = 0.5  # how often the loader looks whether the workers are still there
ORPHAN_SECONDS = 1.0  # how often a worker looks whether the trainer is still there


class Piece(NamedTuple):
    """What a worker has in a round. Its tokens are in shared memory."""

    length: int = 0  # of a line
    dtype: str = ""
    padding: Sequence[int] = ()  # of each line
    lines: Chunk | None = None  # without tokens, and only if they are needed
    passed: Sequence[Passed] = ()
    traffic: StorageStats | None = None  # of this worker so far
    failure: "Failure | None" = None  # what kept the rest of the lines from coming


class Failure(NamedTuple):
    """An error in a worker, in a form that can be sent."""

    kind: type[Exception]
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        kind = type(error)
        try:  # what can't be sent would be lost, and the loader would wait for ever
            pickle.dumps(kind)
            kind(str(error))
        except Exception:
            kind = RuntimeError
        return cls(kind, str(error), "".join(traceback.format_exception(error)))

    def raised(self, where: str) -> Exception:
        error = self.kind(self.message)
        error.add_note(f"in {where}")
        if not isinstance(error, FmsdataError):
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class Work:
    """What all workers of a rank are told."""

    data: Rescalable
    places: Places
    batch_size: int
    needs_lines: bool
    parent: int | None  # the process that must be there; None: whichever it is at the start
    rounds: SharedMemory  # how many batches the next rounds have
    memories: list[list[SharedMemory]]  # of each worker
    notes: list[SharedMemory]  # what each worker is reading

    @property
    def workers(self) -> int:
        return len(self.notes)

    def batches_in_round(self, number: int) -> int:
        """How many batches a round has. The loader says so before it asks for a piece of that round."""
        return int(np.frombuffer(self.rounds.read(8 * MEMORIES), np.int64)[number % MEMORIES])

    def worker_of_lane(self) -> dict[int, int]:
        return {lane: i % self.workers for i, lane in enumerate(self.places.lines)}


class _Worker(IterableDataset[Piece]):
    """One worker's pieces, endlessly. Runs in the worker."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __iter__(self) -> Iterator[Piece]:
        work, info = self._work, get_worker_info()
        if info is None:
            raise RuntimeError("this is for worker processes")
        note, pid = work.notes[info.id], os.getpid()
        _keep_company(work.parent)

        def reading(what: str) -> None:
            note.write(f"{pid} {what}".encode()[:NOTE_BYTES].ljust(NOTE_BYTES))

        reading("nothing yet")
        mine = [lane for lane, worker in work.worker_of_lane().items() if worker == info.id]
        turns, own = work.places.turns(), set(mine)
        try:
            lanes = work.data.start(mine, work.places.states(mine), OpenFiles(len(mine) / work.data.lanes, reading))
        except Exception as error:
            yield Piece(failure=Failure.of(error))
            return
        for number in count():
            samples = turns.take(work.batches_in_round(number) * work.batch_size)
            piece = self._piece(
                lanes,
                [sample for sample in samples if sample % work.data.lanes in own],
                work.memories[info.id][number % MEMORIES],
            )
            yield piece
            if piece.failure:
                return

    def _piece(self, lanes: Lanes, samples: list[int], memory: SharedMemory) -> Piece:
        """The lines of these samples, as far as they can be read."""
        rows: list[Row] = []
        passed: list[Passed] = []
        failure = None
        try:
            for sample in samples:
                some, on_the_way = lanes.take([sample])
                rows += some
                passed += on_the_way
        except Exception as error:
            failure = Failure.of(error)
        if not rows:
            return Piece(failure=failure)
        try:
            tokens = gather(rows)
            memory.write(tokens.reshape(-1).view(np.uint8).data)
            lines = _join_lines(rows) if self._work.needs_lines else None
            traffic = lanes.files.stats()
            return Piece(tokens.shape[1], tokens.dtype.str, padding_of(rows), lines, passed, traffic, failure)
        except Exception as error:
            return Piece(failure=Failure.of(error))


def _join_lines(rows: list[Row]) -> Chunk:
    """Many lines as one chunk without tokens. What is of one chunk is taken from it at once."""
    places: dict[int, list[int]] = {}
    for place, (chunk, _) in enumerate(rows):
        places.setdefault(id(chunk), []).append(place)
    parts = [rows[some[0]][0].take(np.array([rows[place][1] for place in some])).compact() for some in places.values()]
    lines = Chunk.join(parts).take(np.argsort(np.concatenate(list(places.values()))))
    nothing = np.empty(0, np.uint8)
    return Chunk([replace(buffer, tokens=nothing) for buffer in lines.buffers], lines.spans, lines.first)


def _keep_company(parent: int | None) -> None:
    """Leave interrupts to the trainer, who decides what they mean, and end when it is gone, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _as_it_is(piece: Any) -> Any:
    return piece


class WorkerFeed:
    """Lines that worker processes read."""

    def __init__(
        self,
        data: Rescalable,
        places: Places,
        *,
        workers: int,
        batch_size: int,
        extra_tokens: int,
        needs_lines: bool,
        context: str | None,
    ) -> None:
        method = context or multiprocessing.get_start_method()
        self._work = Work(
            data,
            places,
            batch_size,
            needs_lines,
            parent=None if method == "forkserver" else os.getpid(),
            rounds=SharedMemory(),
            memories=[[SharedMemory() for _ in range(MEMORIES)] for _ in range(workers)],
            notes=[SharedMemory() for _ in range(workers)],
        )
        self._extra_tokens = extra_tokens
        self._turns = places.turns()
        self._worker_of_lane = self._work.worker_of_lane()
        self._round = self._batches_left = 0
        self._sizes = np.ones(MEMORIES, np.int64)  # batches in the rounds that are under way
        self._work.rounds.write(self._sizes.data.cast("B"))
        self._began = time.monotonic()  # when this round was taken on
        self._received: list[_Received] = []  # of this round, by worker
        self._ahead: dict[int, deque[Passed]] = {lane: deque() for lane in places.lines}  # received, not passed yet
        self._traffic = [StorageStats()] * workers
        self._children: list[Any] = []
        self._aborted = False
        # torch would have signals of dying workers raise errors in the middle of whatever the trainer does. It does
        # not where it is started by a thread, and the trainer learns of them here. If a loader of the trainer's own
        # has set torch's handler for these signals, it must not look after these workers.
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._start, method).result()
        else:
            self._start(method)

    def _start(self, method: str) -> None:
        loader = DataLoader(
            _Worker(self._work),
            batch_size=None,
            num_workers=self._work.workers,
            prefetch_factor=PREFETCH,
            collate_fn=_as_it_is,
            multiprocessing_context=method,
            timeout=LOOK_SECONDS,
            generator=torch.Generator(),  # torch would draw from the trainer's
        )
        before = multiprocessing.active_children()
        try:
            self._source: Iterator[Piece] = iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the pipeline can't be sent to processes that are started by {method!r}: {error}; "
                "define functions and classes in a module, or use multiprocessing_context='fork'"
            ) from None
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        if getattr(self._source, "_worker_pids_set", False):
            _remove_worker_pids(id(self._source))
            setattr(self._source, "_worker_pids_set", False)  # noqa: B010

    def next(self) -> Taken:
        if not self._batches_left:
            self._next_round()
        self._batches_left -= 1
        lanes = self._work.data.lanes
        samples = self._turns.take(self._work.batch_size)
        rows: list[list[int]] = [[] for _ in self._received]  # of the batch, by worker
        passed: list[Passed] = []
        for row, sample in enumerate(samples):
            lane, lines = sample % lanes, sample // lanes + 1
            rows[self._worker_of_lane[lane]].append(row)
            ahead = self._ahead[lane]
            while ahead and ahead[0].lines <= lines:
                passed.append(ahead.popleft())
        parts = [received.take(len(some)) for received, some in zip(self._received, rows, strict=True)]
        return Taken(_assemble(parts, rows, self._extra_tokens), samples, passed)

    def _next_round(self) -> None:
        self._plan_round(self._round + PREFETCH)  # torch asks for it as soon as it hands out a piece of this one
        self._received = []
        for worker in range(self._work.workers):
            piece = self._receive()
            memory = self._work.memories[worker][self._round % MEMORIES]
            self._received.append(_Received(piece, memory, partial(self._note, worker)))
            for one in piece.passed:
                self._ahead[one.lane].append(one)
            self._traffic[worker] = piece.traffic or self._traffic[worker]
        check_lengths(received.piece.length for received in self._received if received.piece.length)
        self._batches_left = int(self._sizes[self._round % MEMORIES])
        self._round += 1

    def _receive(self) -> Piece:
        """The next piece, from the worker whose turn it is. Looks now and then whether one can still come."""
        while True:
            began = time.monotonic()
            try:
                return next(self._source)
            except RuntimeError:  # torch's, when a worker is gone or nothing came in time
                self.check()
                if self._aborted or time.monotonic() < began + 0.9 * LOOK_SECONDS:
                    raise

    def _plan_round(self, number: int) -> None:
        """Say how large a round will be: the first ones small, so that the first batch comes soon."""
        size = 2 * int(self._sizes[(number - 1) % MEMORIES])
        now = time.monotonic()
        seconds, self._began = (now - self._began) / int(self._sizes[(self._round - 1) % MEMORIES]), now
        tokens = self._work.batch_size * max((received.piece.length for received in self._received), default=0)
        grows = self._received and size * tokens <= ROUND_TOKENS and size * seconds <= ROUND_SECONDS
        self._sizes[number % MEMORIES] = size if grows else size // 2
        self._work.rounds.write(self._sizes.data.cast("B"))

    def check(self) -> None:
        """Raise if a worker is gone. The others go too: what they read would be of no use."""
        for child in self._children:
            if child.exitcode is not None:
                self.abort()
                notes = dict(map(self._note, range(self._work.workers)))
                who = notes.get(str(child.pid), "a worker, before it read anything,")
                raise WorkerError(
                    f"process {child.pid} {_ending(child.exitcode)}: {who}. "
                    "The loader is where it was: iterate again to start new workers, or resume from its state"
                )

    def wake(self) -> None:
        pass  # workers wait for storage, and are ended with what they work for

    def traffic(self) -> StorageStats:
        return sum(self._traffic, StorageStats())

    def close(self) -> None:
        self._source = iter(())  # torch ends the workers with the iterator that they work for
        self._received = []

    def abort(self) -> None:
        self._aborted = True
        for child in self._children:
            child.kill()

    def _note(self, worker: int) -> tuple[str, str]:
        """The process that is this worker, and what it was reading last."""
        note = bytes(self._work.notes[worker].read(NOTE_BYTES)).decode(errors="replace").strip(" \0")
        pid, _, what = note.partition(" ")
        return pid, f"worker {worker} of {self._work.workers}, which was reading {what}"


class _Received:
    """A piece, and how many of its lines went into batches."""

    def __init__(self, piece: Piece, memory: SharedMemory, note: Callable[[], tuple[str, str]]) -> None:
        self.piece, self._note = piece, note
        self._taken = 0
        dtype = np.dtype(piece.dtype or np.uint8)
        shape = len(piece.padding), piece.length
        self._tokens: Tokens = np.frombuffer(memory.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)

    def take(self, count: int) -> "_Part":
        start, self._taken = self._taken, self._taken + count
        piece = self.piece
        if self._taken > len(piece.padding):
            _, worker = self._note()
            if piece.failure is None:
                raise RuntimeError(f"{worker}, sent {len(piece.padding)} lines, not {self._taken}")
            raise piece.failure.raised(worker)
        return _Part(self._tokens[start : self._taken], piece.padding[start : self._taken], piece.lines, start)


class _Part(NamedTuple):
    """What a worker has in a batch."""

    tokens: Tokens
    padding: Sequence[int]
    lines: Chunk | None
    start: int


def _assemble(parts: list[_Part], rows: list[list[int]], extra_tokens: int) -> Batch:
    """The batch that some workers' parts make up. Its tokens are a copy: the memory will be written to again."""
    given = [(part, where) for part, where in zip(parts, rows, strict=True) if where]
    size = sum(map(len, rows))
    common = np.result_type(*{part.tokens.dtype for part, _ in given})
    tokens = np.empty((size, given[0][0].tokens.shape[1]), common if common.kind in "iu" else np.int64)
    padding = [0] * size
    for part, where in given:
        tokens[where if len(given) > 1 else slice(None)] = part.tokens
        for row, one in zip(where, part.padding, strict=True):
            padding[row] = one

    def lines() -> Chunk:
        chunks = [part.lines.slice(part.start, part.start + len(where)) for part, where in given if part.lines]
        if not chunks:
            raise StageError("the task says needs_lines=False, but looks at the lines of the batch or at their keys")
        return Chunk.join(chunks).take(np.argsort(np.concatenate([where for _, where in given])))

    return Batch(tokens, padding, extra_tokens, lines)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", perhaps by the system for want of memory" if name == "SIGKILL" else "")
