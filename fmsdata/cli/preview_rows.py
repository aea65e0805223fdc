"""What `fmsdata preview` shows, as data: rows as pieces of documents, each with its origin."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fmsdata.core.chunk import Chunk
from fmsdata.core.spans import BEGINS, BUFFER, DOCUMENT, LENGTH, POSITION, TAIL, Span
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.planning.schedule import Turns
from fmsdata.tasks.base import IGNORED, Task
from fmsdata.tasks.batch import Batch

LINES = ""  # the key of the lines in a batch; no task has such a field


@dataclass(frozen=True)
class WithLines:
    """A task that also returns the lines, as they were before the task."""

    task: Task
    needs_lines: bool = True

    @property
    def extra_tokens(self) -> int:
        return self.task.extra_tokens

    @property
    def causal(self) -> bool:
        return getattr(self.task, "causal", True)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return {LINES: batch, **self.task(batch)}


class Piece(NamedTuple):
    """Consecutive tokens of one row. Tokens that are in no shard have no origin."""

    tokens: list[int]
    begins: bool  # a new document, or padding
    origin: Span | None = None
    epoch: int = 0


class ShownRow(NamedTuple):
    """One row of a batch."""

    sample: int | None  # None: it fills up the last batch of a finite pass
    pieces: list[Piece]
    ignored: int  # labels
    changed: list[int] | None  # the row's `input_ids`, if the task changed the tokens


class ShownBatch(NamedTuple):
    """One batch."""

    step: int
    fields: dict[str, list[int]]  # the shape of each
    rows: list[ShownRow]


def inspect_batch(step: int, fields: dict[str, Any], loader: StatefulDataLoader, most: int | None) -> ShownBatch:
    """The first rows (`most`, or all) of a batch from a loader with the task `WithLines`."""
    batch: Batch = fields.pop(LINES)
    samples = _samples(loader, step)
    shapes = {name: list(value.shape) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    rows = []
    for row in range(len(batch))[:most]:
        ids, labels = (fields[name][row] if name in shapes else None for name in ("input_ids", "labels"))
        tokens = batch.tokens[row].tolist()
        rows.append(
            ShownRow(
                sample=samples[row] if row < len(samples) else None,
                pieces=list(_pieces(batch.lines, row, tokens)),
                ignored=0 if labels is None else int((labels == IGNORED).sum()),
                changed=None if ids is None or ids.tolist() == tokens[: batch.length] else ids.flatten().tolist(),
            )
        )
    return ShownBatch(step, shapes, rows)


def _samples(loader: StatefulDataLoader, step: int) -> list[int]:
    """The samples in a step of a loader that began at the start of the stream."""
    limits = None if loader.data.epochs is None else np.array(loader.pass_lines)
    lanes = loader.data.lanes_of(loader.rank, loader.world_size)
    turns = Turns(dict.fromkeys(lanes, 0), loader.data.lanes, limits)
    return turns.take((step + 1) * loader.batch_size)[step * loader.batch_size :]


def _pieces(lines: Chunk, row: int, tokens: list[int]) -> Iterator[Piece]:
    place = 0
    for span in lines.slice(row, row + 1).spans.tolist():
        end = place + span[LENGTH]
        stored_end, begins = end - (span[TAIL] > 0), bool(span[BEGINS] & 1)
        if span[DOCUMENT] < 0:
            yield Piece(tokens[place:stored_end], begins)
        elif place < stored_end:
            buffer = lines.buffers[span[BUFFER]]
            stop = span[POSITION] + stored_end - place
            origin = Span(buffer.source, buffer.shard, span[DOCUMENT], span[POSITION], stop)
            yield Piece(tokens[place:stored_end], begins, origin, buffer.epoch)
        if stored_end < end:
            yield Piece(tokens[stored_end:end], place == stored_end and begins)
        place = end


def as_json_data(batch: ShownBatch, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """The batch as plain data, with text if there is a decoder."""

    def piece_data(piece: Piece) -> dict[str, Any]:
        text = {} if decode is None else {"text": decode(piece.tokens)}
        origin = {} if piece.origin is None else {**piece.origin._asdict(), "epoch": piece.epoch}
        return {"inserted": piece.origin is None, **origin, "tokens": piece.tokens, **text}

    def row_data(row: ShownRow) -> dict[str, Any]:
        changed = {} if row.changed is None else {"input_ids": row.changed}
        pieces = [piece_data(piece) for piece in row.pieces]
        return {"sample": row.sample, "ignored_labels": row.ignored, "pieces": pieces, **changed}

    return {"step": batch.step, "fields": batch.fields, "rows": [row_data(row) for row in batch.rows]}
