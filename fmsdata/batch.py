"""Batch: lines become tensors. The one place where tokens are copied."""

from collections.abc import Callable, Iterable, Sequence
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
    """The lines of one step of one rank, of which the model sees all but the last `extra_tokens`."""

    tokens: Tokens  # (lines, line length), in the narrowest type that all shards of the batch fit in
    padding: list[int]  # how many tokens at the end of each line are padding
    extra_tokens: int
    _make_lines: Callable[[], Chunk]

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(
                f"seq_len {self.tokens.shape[1]} is too short: "
                f"this task takes {self.extra_tokens} token more than the model sees"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """The part of each line that the model sees."""
        return int(self.tokens.shape[1]) - self.extra_tokens

    @cached_property
    def lines(self) -> Chunk:
        """The lines as one chunk: where documents begin, and where they come from."""
        return self._make_lines()

    @cached_property
    def segments(self) -> tuple[Ints, Ints]:
        """The documents in what the model sees: where each starts in the flat batch, and its number in its line.

        The number of padding is -1.
        """
        lines, spans = self.lines, self.lines.spans
        line = np.repeat(np.arange(len(lines)), np.diff(lines.first))
        ends = offsets(spans[:, LENGTH])
        place = ends[:-1] - ends[lines.first[:-1]][line]
        begins = (spans[:, BEGINS] & 1) == 1
        begins[lines.first[:-1]] = True
        number = np.cumsum(begins)
        number -= number[lines.first[:-1]][line]
        number[spans[:, DOCUMENT] == PADDING] = -1
        seen = begins & (place < self.length)
        return line[seen] * self.length + place[seen], number[seen]

    def spread(self, values: Ints) -> torch.Tensor:
        """One value per document, at each of its tokens: (lines, length)."""
        cu = self.cu_seqlens()
        return torch.from_numpy(np.repeat(values, np.diff(cu)).reshape(len(self), self.length))

    def cu_seqlens(self) -> Ints:
        return np.append(self.segments[0], len(self) * self.length)


def widen(tokens: npt.NDArray[Any]) -> torch.Tensor:
    """Tokens as a tensor of int64 of its own."""
    return torch.from_numpy(tokens.astype(np.int64, order="C"))


def _document_ids(batch: Batch) -> torch.Tensor:
    return batch.spread(batch.segments[1])


def _position_ids(batch: Batch) -> torch.Tensor:
    return torch.arange(len(batch) * batch.length).view(len(batch), -1) - batch.spread(batch.segments[0])


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


def collect(rows: Sequence[Row], extra_tokens: int) -> Batch:
    """A batch of these lines."""

    def lines() -> Chunk:
        return Chunk.join([chunk.slice(row, row + 1) for chunk, row in rows])

    return Batch(gather(rows), padding_of(rows), extra_tokens, lines)


def gather(rows: Sequence[Row]) -> Tokens:
    """The tokens of these lines, (lines, line length)."""
    check_lengths(chunk.line_length for chunk, _ in rows)
    pieces: list[Any] = []  # before Python 3.12 the stubs don't tell that arrays are buffers
    dtypes = set()
    for chunk, row in rows:
        pieces += chunk.pieces(row)
        dtypes.add(chunk.dtype)
    if len(dtypes) > 1:
        return np.stack([chunk[row].tokens.astype(np.int64) for chunk, row in rows])
    return np.frombuffer(b"".join(pieces), dtypes.pop()).reshape(len(rows), -1)


def padding_of(rows: Sequence[Row]) -> list[int]:
    """How many tokens at the end of each line are padding."""
    return [chunk.padding[row] for chunk, row in rows]


def check_lengths(lengths: Iterable[int]) -> None:
    """Raise unless all lines of a batch have one length."""
    if len(different := set(lengths)) > 1:
        raise StageError(
            f"lines of {' and '.join(map(str, sorted(different)))} tokens can't be in one batch; put a Pack below"
        )
