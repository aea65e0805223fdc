"""Where a run is in its epochs, and which rows the next batches have.

A `Cursor` is immutable. The loader plans batches ahead, and each carries the cursor after it. When a
batch is handed out, its cursor becomes that of the sampler: so the state never counts what was only
read ahead.

Positions are samples of all ranks. Sample `p` of an epoch belongs to rank `p mod world size`. Global
batches are cut from the samples, one after the other, and each rank takes its part of them:
`batch[rank::world_size]`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints, Keys
from fmsdata.epochs.exclusions import Exclusions
from fmsdata.epochs.lines import Lines
from fmsdata.epochs.order import Order

CHUNK_ROWS = 4096  # rows of a rank that are planned at once, since arrays are faster than numbers
CHUNK_SAMPLES = 1 << 16  # samples of all ranks that are planned at once, at most
EPOCH_IDS = 1 << 40  # `epoch_id` of the first sample of epoch 1
MANY = 8  # ids in a description


class Change(NamedTuple):
    """Weights of a mixture that hold from a step on."""

    step: int
    weights: Mapping[str, float]


class Layout(NamedTuple):
    """How samples are cut into batches."""

    global_batch: int
    drop_last: bool
    rank: int
    world_size: int


class Cursor(NamedTuple):
    """A position in an epoch. Two are the same only if they are the same object."""

    epoch: int
    position: int  # samples of this epoch that were handed out
    order: Order  # of the samples from `start` on
    start: int = 0
    cut: int = 0  # from where the samples are cut into global batches
    step: int = 0  # global batches before `cut`, of the whole run
    changes: tuple[Change, ...] = ()  # that are still to come, by step
    ended: bool = False  # in the run that saved it: rows that it dropped are not left for other batches

    def end(self, layout: Layout) -> int:
        """The position at which the epoch ends: whole global batches, dropped or filled up."""
        if self.ended:
            return self.position
        left = max(0, self.start + self.order.size - self.cut)
        size = layout.global_batch
        return self.cut + (left // size if layout.drop_last else -(-left // size)) * size

    def steps(self, layout: Layout) -> int:
        """Complete global batches of the whole run."""
        return self.step + (self.position - self.cut) // layout.global_batch

    def recut(self, layout: Layout) -> "Cursor":
        """The same position, from which the global batches are cut anew."""
        return self._replace(cut=self.position, step=self.steps(layout))

    def excluding(self, excluded: Exclusions) -> "Cursor":
        """The same position, with other exclusions for the rest of the epoch."""
        order = self.order.changed(self.position - self.start, excluded=excluded)
        return self._replace(order=order, start=self.position)

    def with_due_changes(self, layout: Layout) -> "Cursor":
        """With the weights that hold from here on."""
        due = [change for change in self.changes if change.step <= self.steps(layout)]
        if not due or (self.position - self.cut) % layout.global_batch:
            return self
        order = self.order.changed(self.position - self.start, weights=due[-1].weights)
        return self._replace(order=order, start=self.position, changes=self.changes[len(due) :])

    def next_epoch(self, layout: Layout, excluded: Exclusions, weights: Mapping[str, float] | None) -> "Cursor":
        """The beginning of the next epoch, when this one was handed out."""
        step = self.steps(layout)
        due = [change for change in self.changes if change.step <= step]
        weights = due[-1].weights if due else weights
        taken = min(self.position - self.start, self.order.size)
        order = self.order.next_epoch(taken, excluded, weights)
        return Cursor(self.epoch + 1, 0, order, step=step, changes=self.changes[len(due) :])

    def global_tokens(self, layout: Layout) -> int:
        """The labels of all lines of the global batch that comes next, or is in progress."""
        if (plan := self.order.plan) is None:
            return 0
        first = self.cut - self.start + (self.position - self.cut) // layout.global_batch * layout.global_batch
        return plan.trained_between(first, first + layout.global_batch)

    def plan(self, layout: Layout, batch_size: int) -> Iterator["PlannedBatch"]:
        """The batches of a rank from here to the end of the epoch."""
        cursor, size = self, batch_size * layout.world_size  # samples of a step
        while cursor.position < (end := cursor.end(layout)):
            cursor = cursor.with_due_changes(layout)
            if cursor.changes:
                end = min(end, cursor.cut + (cursor.changes[0].step - cursor.step) * layout.global_batch)
            most = max(1, min(-(-CHUNK_ROWS // batch_size), CHUNK_SAMPLES // size))
            steps = min(most, -(-(end - cursor.position) // size))
            first = cursor.position + layout.rank
            positions = np.arange(first, first + steps * size, layout.world_size)
            numbers = positions - cursor.start
            padding, epoch_ids = numbers >= cursor.order.size, positions + cursor.epoch * EPOCH_IDS
            plan = cursor.order.plan
            rows = cursor.order.rows(numbers) if plan is None else numbers
            columns = [column.reshape(-1, batch_size) for column in (rows, epoch_ids, padding)]
            epoch, position, *others = cursor
            after = (Cursor._make((epoch, position + size * step, *others)) for step in range(1, steps + 1))
            if plan is None:
                chunk = repeat(Chunk(columns))
                requests = map(RowRequest, repeat(epoch), *columns, repeat(None), repeat(0), chunk, count())
                yield from map(PlannedBatch, requests, after)
            else:
                for places, ids, filling, following in zip(*columns, after, strict=True):
                    lines, tokens = plan.lines.take(places), cursor.global_tokens(layout)
                    cursor = following
                    yield PlannedBatch(RowRequest(epoch, lines.row, ids, filling, lines, tokens), cursor)
            cursor = Cursor._make((epoch, position + size * steps, *others))


class Chunk:
    """Batches that were planned together: the keys of their rows are made for all at once, if they are needed."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = columns  # as in a `RowRequest`, with a row for each batch
        self.keys: list[Keys] | None = None  # of the rows of each batch


class RowRequest(NamedTuple):
    """The rows of a rank in a step, as they are sent to a worker."""

    epoch: int
    rows: Ints
    epoch_ids: Ints  # the position in the epoch, and `EPOCH_IDS` for each epoch before it
    padding: npt.NDArray[np.bool_]  # the rows that only fill up
    lines: Lines | None = None  # that the rows are packed into
    global_tokens: int = 0  # labels of the global batch, on all ranks and in all of its steps
    chunk: Chunk | None = None  # that it is a part of; a worker gets its own rows alone
    number: int = 0  # in the chunk

    def __reduce__(self) -> tuple[Any, ...]:
        return RowRequest, self[:6]

    @property
    def columns(self) -> tuple[Any, ...]:
        """The row, the `epoch_id` and the padding of each."""
        return self[1:4]

    def __str__(self) -> str:
        more = f" and {len(self.rows) - MANY} more" if len(self.rows) > MANY else ""
        return f"epoch {self.epoch}, rows {', '.join(map(str, self.rows[:MANY].tolist()))}{more}"


class PlannedBatch(NamedTuple):
    """A step of a rank that was not handed out yet."""

    request: RowRequest
    after: Cursor  # when it was handed out
