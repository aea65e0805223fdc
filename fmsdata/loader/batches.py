"""Batch sources: where the lines of a loader's batches come from.

A source returns batch after batch, together with the samples in it and the anchors and tallies that
their lanes passed. The loader records those when it hands the batch out, so lines that were only
read ahead do not count.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from fmsdata.core.chunk import Chunk, Row
from fmsdata.loader.device import DeviceCopy, replaced
from fmsdata.loader.patience import stack_of
from fmsdata.planning.schedule import Turns
from fmsdata.run.lanes import Lanes
from fmsdata.run.positions import Milestone
from fmsdata.storage.stats import StorageStats
from fmsdata.tasks.batch import Batch, collect, start_collecting
from fmsdata.tasks.collate import Collate

# At most this number of batches, and of bytes of tokens, is read together. No further one is begun after this time.
ROUND, ROUND_BYTES, ROUND_SECONDS = 8, 1 << 20, 0.0005
STEADY = 8  # rounds before one is planned ahead: the first batches come sooner


class LineBatch(NamedTuple):
    """The lines of one batch, the samples that they are, and what their lanes passed."""

    batch: Batch
    samples: list[int]
    passed: list[Milestone]


class FinishedBatch(NamedTuple):
    """A batch as the trainer gets it, with the same account of samples and lanes."""

    fields: dict[str, Any]
    samples: list[int]
    passed: list[Milestone]
    wait: Callable[[], None] | None = None  # to be called before the trainer gets it, in its thread


Taken: TypeAlias = tuple[list[Row], list[int], list[Milestone]]  # the lines of a batch, and what a LineBatch has
PlannedRound: TypeAlias = tuple[list[Taken], Callable[[], list[Batch]]]  # and what makes their batches


class BatchSource(Protocol):
    """Reads the lines of one batch after the other."""

    def next(self) -> LineBatch: ...

    @property
    def buffered(self) -> int:
        """How many batches were read already, so that `next` returns them at once."""

    def check(self) -> None:
        """Raise if no further batch can come. May be called from another thread."""

    def silent(self) -> list[str]:
        """What keeps the next batch from coming, for a trainer that has waited long.

        Called from another thread.
        """

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""

    def wake(self) -> None:
        """Stop waiting for storage or for workers: the next batch is not needed.

        Called from another thread.
        """

    def stats(self) -> StorageStats:
        """What was fetched from remote shards so far."""

    def close(self) -> None:
        """End everything that works for this source."""

    def abort(self) -> None:
        """Do the same at once. Called from another thread, possibly while `next` waits."""


class LocalBatchSource:
    """Lines that this process reads itself."""

    def __init__(
        self,
        lanes: Lanes,
        turns: Turns,
        *,
        batch_size: int,
        extra_tokens: int,
        filler: Chunk | None = None,
        shifted: bool = False,
    ) -> None:
        self._lanes, self._turns = lanes, turns
        self._filler = filler  # the line that fills up the last batches of a finite pass
        self._batch_size, self._extra_tokens = batch_size, extra_tokens
        self._thread: int | None = None  # that reads
        self._shifted = shifted  # whether the task needs `Batch.shifted`
        self._planned: PlannedRound | None = None
        self._round = 1  # batches that are read together
        self._round_number = 0
        self._read: deque[LineBatch] = deque()
        self._failure: Exception | None = None  # after the batches that were read

    pids: ClassVar[list[int]] = []

    @property
    def buffered(self) -> int:
        return len(self._read)

    def next(self) -> LineBatch:
        self._thread = threading.get_ident()
        if not self._read:
            self._read_round()
        return self._read.popleft()

    def _read_round(self) -> None:
        """Read some batches. Their tokens are copied together, which costs less.

        In steady state, a round is planned before the tokens of the one before it are needed, and copied meanwhile.
        """
        taken, collected = self._planned or self._plan_round()
        self._planned = None
        if self._round_number > STEADY and self._failure is None:
            try:
                self._planned = self._plan_round()
            except Exception as error:
                self._failure = error
        try:
            batches = collected()
        except Exception as error:  # what was planned behind it must not come either
            self._failure, self._planned = error, None
            batches = self._collect_some([rows for rows, _, _ in taken])
            if not batches:
                raise
        self._read += [LineBatch(batch, *read[1:]) for batch, read in zip(batches, taken, strict=False)]
        self._round = max(1, min(2 * self._round, ROUND, ROUND_BYTES // batches[0].tokens.nbytes))
        self._round_number += 1

    def _plan_round(self) -> "PlannedRound":
        """Take the lines of some batches, and start to copy them."""
        began, round = time.perf_counter(), self._round
        if self._failure is not None:
            raise self._failure
        taken: list[Taken] = []
        try:
            while len(taken) < round and (not taken or time.perf_counter() - began < ROUND_SECONDS):
                samples = self._turns.take(self._batch_size)
                rows, passed = self._lanes.take(samples)
                if self._filler is not None:
                    rows += [(self._filler, 0)] * (self._batch_size - len(rows))
                taken.append((rows, samples, passed))
        except Exception as error:
            if not taken:
                raise
            self._failure = error
        try:
            return taken, start_collecting([rows for rows, _, _ in taken], self._extra_tokens, shifted=self._shifted)
        except Exception as error:  # some of the batches may be good
            return taken, partial(_fail, error)

    def _collect_some(self, batches: list[list[Row]]) -> list[Batch]:
        """The batches before the first that can't be made."""
        made: list[Batch] = []
        with suppress(Exception):
            made.extend(collect(rows, self._extra_tokens) for rows in batches)
        return made

    def check(self) -> None:
        pass

    def silent(self) -> list[str]:
        reading = self._lanes.files.reading_now or "nothing yet"
        return [f"This process was reading {reading}: its Python stack:\n{stack_of(self._thread)}"]

    def wake(self) -> None:
        self.close()

    def stats(self) -> StorageStats:
        return self._lanes.files.stats()

    def close(self) -> None:
        self._lanes.files.close()

    def abort(self) -> None:
        self.close()


def _fail(error: Exception) -> list[Batch]:
    raise error


@dataclass(frozen=True)
class BatchFinisher:
    """Turns lines into the fields that the trainer gets."""

    collate: Collate
    pin_memory: bool = False
    device: torch.device | None = None
    copy: DeviceCopy | None = None
    mark: Callable[[dict[str, Any], Batch], dict[str, Any]] | None = None  # adds fields of a finite pass

    def opened(self) -> "BatchFinisher":
        """The same for a new thread that reads ahead. Called in the trainer's thread."""
        if self.device is None or self.device.type == "cpu":
            return self
        return replace(self, copy=DeviceCopy(self.device))

    def __call__(self, lines: LineBatch) -> FinishedBatch:
        fields = self.collate.fields(lines.batch)
        if self.mark is not None:
            fields = self.mark(fields, lines.batch)
        if self.copy is not None:
            fields, wait = self.copy(fields)
            return FinishedBatch(fields, lines.samples, lines.passed, wait)
        if self.device is not None:
            fields = replaced(fields, lambda tensor: tensor.to(self.device))
        if self.pin_memory:
            fields = replaced(fields, torch.Tensor.pin_memory)
        return FinishedBatch(fields, lines.samples, lines.passed)
