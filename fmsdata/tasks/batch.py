"""Batch: the lines of one step, from which tasks and outputs make tensors.

Tokens are copied here and only here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fmsdata.core.chunk import Chunk, Row, check_lengths, epochs, provenance
from fmsdata.core.keys import Ints, Keys, mix_array, offsets
from fmsdata.core.memory import Source
from fmsdata.core.spans import BEGINS, BUFFER, DOCUMENT, LENGTH, PADDING, POSITION, TAIL, Span
from fmsdata.core.tokens import Tokens
from fmsdata.errors import ConfigError


class DocumentSpans(NamedTuple):
    """Where the documents lie in the lines: each is tokens `start` to `stop - 1` of line `line`."""

    line: Ints
    number: Ints  # of the document, counted in its line
    start: Ints
    stop: Ints


@dataclass(frozen=True)
class Batch:
    """The lines of one step of one rank. The model sees all but the last `extra_tokens` of each."""

    tokens: Tokens  # (lines, line length), in the narrowest type that holds all of them
    padding: list[int]  # how many tokens at the end of each line are padding
    extra_tokens: int
    _make_lines: Callable[[], Chunk]

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(
                f"seq_len {self.tokens.shape[1]} is too short: "
                f"this task needs {self.extra_tokens} token more than the model sees"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """How many tokens of each line the model sees."""
        return int(self.tokens.shape[1]) - self.extra_tokens

    @cached_property
    def lines(self) -> Chunk:
        """The lines as one chunk, which says where documents begin and where they come from."""
        return self._make_lines()

    @cached_property
    def keys(self) -> Keys:
        """A 64-bit key for each line, its `Item.key`.

        Random choices about the line must be derived from it.
        """
        lines, spans = self.lines, self.lines.spans
        stored = np.append(np.flatnonzero(spans[:, DOCUMENT] >= 0), len(spans))
        first = stored[np.searchsorted(stored, lines.first[:-1])]
        first = np.where(first < lines.first[1:], first, lines.first[:-1])
        keys = np.array([lines.buffers[buffer].key for buffer in spans[first, BUFFER].tolist()], np.uint64)
        for column in (DOCUMENT, POSITION):
            keys = mix_array(keys ^ spans[first, column].astype(np.uint64))
        return keys

    @cached_property
    def segments(self) -> tuple[Ints, Ints]:
        """The documents in the tokens that the model sees.

        Returns where each starts in the flat batch, and its number in its line. Padding has the
        number -1.
        """
        line, position, begins, number = self._positions
        seen = begins & (position < self.length)
        return line[seen] * self.length + position[seen], number[seen]

    @cached_property
    def parts(self) -> DocumentSpans:
        """The documents in the whole lines, without the tokens that were inserted around them."""
        spans = self.lines.spans
        line, position, begins, number = self._positions
        stored = np.where(spans[:, DOCUMENT] >= 0, spans[:, LENGTH] - (spans[:, TAIL] > 0), 0)
        spans_with_tokens = np.flatnonzero(stored)
        document = np.cumsum(begins).take(spans_with_tokens)
        first = spans_with_tokens[np.diff(document, prepend=0) > 0]
        last = spans_with_tokens[np.diff(document, append=0) != 0]
        return DocumentSpans(line[first], number[first], position[first], position[last] + stored[last])

    @cached_property
    def _positions(self) -> tuple[Ints, Ints, npt.NDArray[np.bool_], Ints]:
        """For each span: line, position in it, whether a document begins, the document's number."""
        lines, spans = self.lines, self.lines.spans
        line = np.repeat(np.arange(len(lines)), np.diff(lines.first))
        ends = offsets(spans[:, LENGTH])
        position = ends[:-1] - ends[lines.first[:-1]][line]
        begins = (spans[:, BEGINS] & 1) == 1
        begins[lines.first[:-1]] = True
        number = np.cumsum(begins)
        number -= number[lines.first[:-1]][line]
        number[spans[:, DOCUMENT] == PADDING] = -1
        return line, position, begins, number

    def spread(self, values: Ints) -> torch.Tensor:
        """One value per document, repeated for each of its tokens: (lines, length)."""
        cu = self.cu_seqlens()
        return torch.from_numpy(np.repeat(values, np.diff(cu)).reshape(len(self), self.length))

    def cu_seqlens(self) -> Ints:
        """Where each document starts in the flat batch, and the end of the batch."""
        return np.append(self.segments[0], len(self) * self.length)


def widen(tokens: npt.NDArray[Any]) -> torch.Tensor:
    """A copy of the tokens as an int64 tensor."""
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
    """Raise if a name is not an output that a batch can hold."""
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
    chunks = {id(chunk): chunk for chunk, _ in rows}.values()
    check_lengths(chunk.line_length for chunk in chunks)
    dtypes = {chunk.dtype for chunk in chunks}
    tokens = np.empty((len(rows), rows[0][0].line_length), dtypes.pop() if len(dtypes) == 1 else np.int64)
    unchecked: set[Source] = set()
    try:
        for line, (chunk, row) in enumerate(rows):
            tokens[line] = chunk.copies.read(row, unchecked)
        for source in unchecked:
            source.check()
    except BaseException:
        for chunk in chunks:
            chunk.copies.forget()
        raise
    return tokens


def padding_of(rows: Sequence[Row]) -> list[int]:
    """How many tokens at the end of each line are padding."""
    return [chunk.padding[row] for chunk, row in rows]
