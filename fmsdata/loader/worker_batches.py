"""Batches whose lines worker processes read.

The lanes of a rank are dealt out to its workers. The workers and the trainer all know which sample
comes next, so the stream is the same for any number of workers. It comes in rounds of a few
batches: for each round every worker replies with the lines that it has in those batches.

The trainer requests `PREFETCH` rounds in advance. A worker has one memory more than that, and the
next round is only requested when all lines of a finished one were copied. So a memory is never
refilled while its lines are needed.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fmsdata.core.chunk import Chunk, check_lengths
from fmsdata.core.tokens import Tokens
from fmsdata.errors import StageError
from fmsdata.loader.batches import LineBatch
from fmsdata.loader.reply import Reply, read_reply
from fmsdata.loader.rounds import RoundSizes
from fmsdata.loader.worker import WorkerSpec, lanes_of_worker
from fmsdata.loader.worker_pool import WorkerPool
from fmsdata.run.finite import PassPlan
from fmsdata.run.positions import Milestone, Positions
from fmsdata.run.rescalable import Rescalable
from fmsdata.storage.stats import StorageStats
from fmsdata.tasks.batch import Batch

PREFETCH = 2  # rounds that are requested in advance
MEMORIES = PREFETCH + 1  # of each worker


class WorkerBatchSource:
    """Lines that worker processes read."""

    def __init__(
        self,
        data: Rescalable,
        positions: Positions,
        *,
        workers: int,
        batch_size: int,
        extra_tokens: int,
        needs_lines: bool,
        method: str,
        plan: PassPlan | None = None,
        filler: Chunk | None = None,
    ) -> None:
        specs = [
            WorkerSpec(
                data=data,
                positions=positions,
                index=index,
                workers=workers,
                batch_size=batch_size,
                needs_lines=needs_lines,
                trainer=os.getpid(),
                plan=plan,
            )
            for index in range(workers)
        ]
        self._lanes, self._batch_size, self._extra_tokens = data.lanes, batch_size, extra_tokens
        self._versions = data.versions
        self._turns = positions.turns(None if plan is None else plan.lines)
        self._filler = filler
        lanes = lanes_of_worker(positions, workers)
        self._worker_of_lane = {lane: index for index in range(workers) for lane in lanes[index]}
        # Received, not yet taken.
        self._passed: dict[int, deque[Milestone]] = {lane: deque() for lane in positions.lines}
        self._stats = [StorageStats()] * workers
        self._replies: list[_ReceivedReply] = []  # of the round in progress, by worker
        self._round = 0  # rounds received
        self._batches_left = 0  # in the round in progress
        self._sizes = RoundSizes()
        self._requested = deque([1] * PREFETCH)  # batches in the rounds that are under way
        self._finished = 1  # batches in the last round that ended
        self._pool = WorkerPool(specs, method, memories=MEMORIES)
        for batches in self._requested:
            self._pool.request(batches)

    @property
    def buffered(self) -> int:
        return self._batches_left

    def next(self) -> LineBatch:
        if not self._batches_left:
            self._next_round()
        self._batches_left -= 1
        samples = self._turns.take(self._batch_size)
        rows: list[list[int]] = [[] for _ in self._replies]  # of the batch, by worker
        passed: list[Milestone] = []
        for row, sample in enumerate(samples):
            lane, lines = sample % self._lanes, sample // self._lanes + 1
            rows[self._worker_of_lane[lane]].append(row)
            ahead = self._passed[lane]
            while ahead and ahead[0].lines <= lines:
                passed.append(ahead.popleft())
        taken = [self._take(worker, len(mine)) for worker, mine in enumerate(rows)]
        if self._filler is not None and len(samples) < self._batch_size:
            rows.append(list(range(len(samples), self._batch_size)))
            taken.append(_filled_up(self._filler, len(rows[-1])))
        return LineBatch(_assemble(taken, rows, self._extra_tokens), samples, passed)

    def _next_round(self) -> None:
        self._request_round()
        self._replies = []
        for worker in range(len(self._stats)):
            size = self._pool.receive(worker)
            received = _ReceivedReply(*read_reply(self._pool.memory(worker, self._round % MEMORIES), size))
            self._replies.append(received)
            for passed in received.reply.passed:
                self._passed[passed.lane].append(passed)
            self._stats[worker] = received.reply.stats or self._stats[worker]
            self._versions.require(received.reply.versions or {})
        check_lengths(received.reply.length for received in self._replies if received.reply.length)
        self._finished = self._batches_left = self._requested.popleft()
        self._round += 1

    def _request_round(self) -> None:
        """Request another round: the memories of the one that just ended are free."""
        if self._replies:
            longest = max(received.reply.length for received in self._replies)
            batches = self._sizes.next(self._finished, self._batch_size * longest)
        else:
            batches = 1
        self._requested.append(batches)
        self._pool.request(batches)

    def _take(self, worker: int, count: int) -> "_TakenLines":
        """The next lines of a worker's reply.

        If they are missing because it failed, its error is raised.
        """
        received = self._replies[worker]
        if received.left < count:
            description = self._pool.describe(worker)
            if received.reply.failure is None:
                raise RuntimeError(f"{description}, sent {received.left} lines, expected at least {count}")
            raise received.reply.failure.rebuild(description)
        return received.take(count)

    def check(self) -> None:
        self._pool.check()

    def silent(self) -> list[str]:
        return self._pool.silent()

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    def wake(self) -> None:
        self._pool.wake()

    def stats(self) -> StorageStats:
        return sum(self._stats, StorageStats())

    def close(self) -> None:
        self._pool.close()
        self._replies = []

    def abort(self) -> None:
        self._pool.abort()


class _ReceivedReply:
    """A reply, and how many of its lines were taken for batches."""

    def __init__(self, reply: Reply, tokens: Tokens) -> None:
        self.reply, self._tokens = reply, tokens
        self._taken = 0

    @property
    def left(self) -> int:
        return len(self.reply.padding) - self._taken

    def take(self, count: int) -> "_TakenLines":
        start, self._taken = self._taken, self._taken + count
        reply, stop = self.reply, self._taken
        lines = reply.lines.slice(start, stop) if reply.lines is not None and count else None
        return _TakenLines(self._tokens[start:stop], reply.padding[start:stop], lines)


def _filled_up(filler: Chunk, count: int) -> "_TakenLines":
    """Lines of padding, which no worker has sent."""
    tokens = np.tile(filler.copies.read(0, set()), (count, 1))
    return _TakenLines(tokens, [filler.line_length] * count, filler.take(np.zeros(count, np.int64)))


class _TakenLines(NamedTuple):
    """The lines that a worker has in a batch."""

    tokens: Tokens
    padding: Sequence[int]
    lines: Chunk | None


def _assemble(taken: list[_TakenLines], rows: list[list[int]], extra_tokens: int) -> Batch:
    """The batch of all workers' lines, each at its row.

    Tokens are copied: the memory is going to be reused.
    """
    parts = [(part, where) for part, where in zip(taken, rows, strict=True) if where]
    size = sum(map(len, rows))
    common = np.result_type(*{part.tokens.dtype for part, _ in parts})
    tokens = np.empty((size, parts[0][0].tokens.shape[1]), common if common.kind in "iu" else np.int64)
    padding = [0] * size
    for part, where in parts:
        tokens[where if len(parts) > 1 else slice(None)] = part.tokens
        for row, count in zip(where, part.padding, strict=True):
            padding[row] = count

    def lines() -> Chunk:
        chunks = [part.lines for part, _ in parts if part.lines is not None]
        if not chunks:
            raise StageError("the task says needs_lines=False, but uses the lines of the batch or their keys")
        return Chunk.join(chunks).take(np.argsort(np.concatenate([where for _, where in parts])))

    return Batch(tokens, padding, extra_tokens, lines)
