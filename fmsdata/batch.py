"""Batch: lines become tensors. The one place where tokens are copied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fmsdata.chunk import BEGINS, DOCUMENT, LENGTH, PADDING, Chunk, Span, epochs, provenance
from fmsdata.errors import ConfigError, StageError
from fmsdata.keys import Ints, offsets
from fmsdata.readers import Tokens

Row: TypeAlias = tuple[Chunk, int]


@dataclass(frozen=True)
class Batch:
    """The lines of one step of one rank. `length` is the part of each line that the model sees."""

    rows: list[Row]
    length: int

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens, (lines, line length), in the narrowest type that all shards of the batch fit in."""
        pieces: list[Any] = []  # before Python 3.12 the stubs don't tell that arrays are buffers
        dtypes = set()
        for chunk, row in self.rows:
            pieces += chunk.pieces(row)
            dtypes.add(chunk.dtype)
        if len(dtypes) > 1:
            return np.stack([chunk[row].tokens.astype(np.int64) for chunk, row in self.rows])
        return np.frombuffer(b"".join(pieces), dtypes.pop()).reshape(len(self.rows), -1)

    @cached_property
    def padding(self) -> list[int]:
        """How many tokens at the end of each line are padding."""
        return [chunk.padding[row] for chunk, row in self.rows]

    @cached_property
    def lines(self) -> Chunk:
        """The lines as one chunk."""
        return Chunk.join([chunk.slice(row, row + 1) for chunk, row in self.rows])

    @cached_property
    def segments(self) -> tuple[Ints, Ints]:
        """The documents in what the model sees: where each starts in the flat batch, and its number in its line.

        The number of padding is -1.
        """
        lines, spans = self.lines, self.lines.spans
        line = np.repeat(np.arange(len(lines)), np.diff(lines.first))
        ends = offsets(spans[:, LENGTH])
        place = ends[:-1] - ends[lines.first[:-1]][line]
        begins = spans[:, BEGINS] == 1
        begins[lines.first[:-1]] = True
        number = np.cumsum(begins)
        number -= number[lines.first[:-1]][line]
        number[spans[:, DOCUMENT] == PADDING] = -1
        seen = begins & (place < self.length)
        return line[seen] * self.length + place[seen], number[seen]

    def spread(self, values: Ints) -> torch.Tensor:
        """One value per document, at each of its tokens: (lines, length)."""
        cu = self.cu_seqlens()
        return torch.from_numpy(np.repeat(values, np.diff(cu)).reshape(len(self.rows), self.length))

    def cu_seqlens(self) -> Ints:
        return np.append(self.segments[0], len(self.rows) * self.length)


def widen(tokens: npt.NDArray[Any]) -> torch.Tensor:
    """Tokens as a tensor of int64 of its own."""
    return torch.from_numpy(tokens.astype(np.int64, order="C"))


def _document_ids(batch: Batch) -> torch.Tensor:
    return batch.spread(batch.segments[1])


def _position_ids(batch: Batch) -> torch.Tensor:
    return torch.arange(len(batch.rows) * batch.length).view(len(batch.rows), -1) - batch.spread(batch.segments[0])


def _cu_seqlens(batch: Batch) -> torch.Tensor:
    return torch.from_numpy(batch.cu_seqlens().astype(np.int32))


def _provenance(batch: Batch) -> list[list[Span]]:
    return provenance(batch.lines)


def _epochs(batch: Batch) -> list[list[int]]:
    return epochs(batch.lines)


OUTPUTS: dict[str, Callable[[Batch], Any]] = {
    "document_ids": _document_ids,
    "position_ids": _position_ids,
    "cu_seqlens": _cu_seqlens,
    "provenance": _provenance,
    "epochs": _epochs,
}


def check_outputs(names: Sequence[str]) -> None:
    """Raise if a name is not one that a batch can hold."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"outputs is {names!r}; it must be a list of names")
    for name in names:
        if name not in OUTPUTS:
            raise ConfigError(f"unknown output {name!r}; batches can hold {', '.join(OUTPUTS)}")


def collect(rows: list[Row], extra_tokens: int) -> Batch:
    """A batch of these lines, of which the model sees all but the last `extra_tokens`."""
    lengths = {chunk.line_length for chunk, _ in rows}
    length = max(lengths) - extra_tokens
    if len(lengths) > 1:
        raise StageError(
            f"lines of {' and '.join(map(str, sorted(lengths)))} tokens can't be in one batch; put a Pack below"
        )
    if length < 1:
        raise ConfigError(
            f"seq_len {max(lengths)} is too short: this task takes {extra_tokens} token more than the model sees"
        )
    return Batch(rows, length)
