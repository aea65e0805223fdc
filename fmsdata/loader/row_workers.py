"""Batches of rows: read in the trainer's process, or ahead of it by worker processes.

Both follow a plan, the batches up to the end of the epoch. A new plan can come at any time, when the
position of the sampler was changed: batches of the old one that workers still make are thrown away.

A worker has as many memories for replies as requests it may have at the same time. A reply is copied
before the next request is sent, so a memory is never written to while it is needed.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fmsdata.epochs.cursor import PlannedBatch, RowRequest
from fmsdata.errors import StageError
from fmsdata.loader.patience import stack_of
from fmsdata.loader.reply import Reply, ReplySize, WorkerFailure, write_reply
from fmsdata.loader.row_reply import read_batch, write_batch
from fmsdata.loader.worker import Channel
from fmsdata.loader.worker_pool import WorkerPool


class BatchReader(Protocol):
    """Makes batches."""

    def read(self, request: RowRequest) -> Any:
        """The batch of these rows."""


class BatchRecipe(Protocol):
    """How batches are made. It is sent to workers."""

    def open(self) -> BatchReader: ...


class ReadBatch(NamedTuple):
    """A batch and its rows."""

    batch: Any
    planned: PlannedBatch


class RowSource(Protocol):
    """Where batches of rows come from."""

    def follow(self, plan: Iterator[PlannedBatch]) -> None:
        """Make the batches of another plan from now on."""

    def next(self) -> ReadBatch | None:
        """The next batch of the plan; None at its end."""

    def silent(self) -> list[str]:
        """What keeps the next batch from coming. Called from another thread."""

    @property
    def pids(self) -> list[int]: ...

    def wake(self) -> None:
        """Let `next` raise instead of waiting. Called from another thread."""

    def close(self) -> None: ...


class LocalRows:
    """Rows that are read in this process, when they are needed."""

    def __init__(self, recipe: BatchRecipe) -> None:
        self._reader = recipe.open()
        self._thread = threading.get_ident()
        self._plan: Iterator[PlannedBatch] = iter(())
        self._request: RowRequest | None = None

    def follow(self, plan: Iterator[PlannedBatch]) -> None:
        self._plan = plan

    def next(self) -> ReadBatch | None:
        planned = next(self._plan, None)
        if planned is None:
            return None
        self._request = planned.request
        return ReadBatch(self._reader.read(planned.request), planned)

    @property
    def pids(self) -> list[int]:
        return []

    def silent(self) -> list[str]:
        return [f"This process was reading {self._request}: its Python stack:\n{stack_of(self._thread)}"]

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class RowWorkerSpec:
    """A worker that reads rows."""

    recipe: BatchRecipe
    index: int
    workers: int
    trainer: int  # its process id

    def open(self, channel: Channel) -> "RowWorker":
        return RowWorker(self.recipe, channel)


class RowWorker:
    """Answers the requests in a worker: one batch each, or why there is none."""

    def __init__(self, recipe: BatchRecipe, channel: Channel) -> None:
        self._reader, self._channel, self._requests = recipe.open(), channel, 0

    def read(self, request: RowRequest) -> ReplySize:
        memory = self._channel.memories[self._requests % len(self._channel.memories)]
        self._requests += 1
        self._channel.note.write(str(request))
        try:
            batch = self._reader.read(request)
        except Exception as error:
            return write_reply(memory, Reply(failure=WorkerFailure.of(error)))
        try:
            return write_batch(memory, batch)
        except Exception as error:
            failed = StageError(
                f"a batch can't be sent from a worker process: {type(error).__name__}: {error}; "
                "return plain data, tensors or arrays, or use num_workers=0"
            )
            return write_reply(memory, Reply(failure=WorkerFailure.of(failed)))


class WorkerRows:
    """Rows that worker processes read, `prefetch` batches ahead each. They take batches in turn."""

    def __init__(self, recipe: BatchRecipe, *, workers: int, prefetch: int, method: str, pin: bool) -> None:
        self._workers, self._prefetch, self._pin = workers, prefetch, pin
        self._plan: Iterator[PlannedBatch] = iter(())
        self._requested: deque[tuple[int, PlannedBatch]] = deque()  # the worker, and its batch
        self._in_flight = [0] * workers  # requests without a reply, also those of an old plan
        self._stale = [0] * workers  # of an old plan
        self._replies = [0] * workers
        self._turn = 0
        specs = [
            RowWorkerSpec(recipe=recipe, index=index, workers=workers, trainer=os.getpid()) for index in range(workers)
        ]
        self._pool = WorkerPool(specs, method, memories=prefetch)

    def follow(self, plan: Iterator[PlannedBatch]) -> None:
        for worker, _ in self._requested:
            self._stale[worker] += 1
        self._requested.clear()
        self._plan = plan

    def next(self) -> ReadBatch | None:
        self._request()
        if not self._requested:
            return None
        worker, planned = self._requested[0]
        batch = self._receive(worker)
        if isinstance(batch, Reply):
            if batch.failure is None:
                raise RuntimeError(f"{self._pool.describe(worker)}, sent no batch")
            raise batch.failure.rebuild(self._pool.describe(worker))
        self._requested.popleft()
        self._request()
        return ReadBatch(batch, planned)

    def _request(self) -> None:
        """Request batches, as many as may be under way."""
        while len(self._requested) < self._workers * self._prefetch:
            planned = next(self._plan, None)
            if planned is None:
                return
            worker, self._turn = self._turn, (self._turn + 1) % self._workers
            while self._in_flight[worker] >= self._prefetch:
                self._drop(worker)
            self._pool.send(worker, planned.request)
            self._in_flight[worker] += 1
            self._requested.append((worker, planned))

    def _receive(self, worker: int) -> Any:
        """The next batch of a worker that belongs to the plan."""
        while self._stale[worker]:
            self._drop(worker)
        return self._reply(worker)

    def _drop(self, worker: int) -> None:
        """Wait for a batch of an old plan."""
        self._stale[worker] -= 1
        self._reply(worker)

    def _reply(self, worker: int) -> Any:
        size = self._pool.receive(worker)
        self._in_flight[worker] -= 1
        memory = self._pool.memory(worker, self._replies[worker] % self._prefetch)
        self._replies[worker] += 1
        return read_batch(memory, size, self._pin)

    def silent(self) -> list[str]:
        return self._pool.silent()

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    def wake(self) -> None:
        self._pool.wake()

    def close(self) -> None:
        self._pool.close()
