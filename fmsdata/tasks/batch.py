"""Batch: the lines of one step, from which tasks and outputs make tensors.

Tokens are copied here and only here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fmsdata.core import native
from fmsdata.core.chunk import Chunk, Row, check_lengths, epochs, provenance
from fmsdata.core.keys import Ints, Keys, mix_array, offsets
from fmsdata.core.memory import Source, copy_and_check, start_copy
from fmsdata.core.pieces import Piece, pieces_of
from fmsdata.core.spans import BEGINS, BUFFER, DOCUMENT, LENGTH, PADDING, POSITION, TAIL, Span
from fmsdata.core.tokens import Tokens
from fmsdata.core.wording import counted, shown
from fmsdata.errors import ConfigError, StageError
from fmsdata.tasks.buffers import buffers


class DocumentSpans(NamedTuple):
    """Where the documents lie in the lines: each is tokens `start` to `stop - 1` of line `line`."""

    line: Ints
    number: Ints  # of the document, counted in its line
    start: Ints
    stop: Ints


@dataclass(frozen=True, repr=False)
class Batch:
    """The lines of one step of one rank. The model sees all but the last `extra_tokens` of each."""

    tokens: Tokens  # (lines, line length), in the narrowest type that holds all of them
    padding: list[int]  # how many tokens at the end of each line are padding
    extra_tokens: int
    _make_lines: Callable[[], Chunk]
    sources: Collection[str] = ()  # all sources of the run by name, sorted; their numbers are `source_ids`
    padding_segment: bool = False  # whether padding is a segment of its own
    made: list[tuple[Ints, Ints]] = field(default_factory=list)  # what `shifted` returns, if it was made already

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(
                f"seq_len {self.tokens.shape[1]} is too short: "
                f"this task needs {self.extra_tokens} token more than the model sees"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        lines, length = self.tokens.shape
        seen = "" if not self.extra_tokens else f", of which the model sees {self.length}"
        padded = f", {counted(sum(self.padding), 'token')} of padding" if any(self.padding) else ""
        return f"Batch of {counted(lines, 'line')} of {counted(length, 'token')}{seen} ({self.tokens.dtype}){padded}"

    @property
    def length(self) -> int:
        """How many tokens of each line the model sees."""
        return int(self.tokens.shape[1]) - self.extra_tokens

    def shifted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each line but its last `extra_tokens`, and each line but its first, as int64 tensors of their own."""
        if self.made:
            inputs, labels = self.made.pop()
            return torch.from_numpy(inputs), torch.from_numpy(labels)
        extra, tokens = self.extra_tokens, self.tokens
        if native.kernel is None or not tokens.flags.c_contiguous or not tokens.dtype.isnative:
            return widen(tokens[:, : self.length]), widen(tokens[:, extra:])
        inputs, labels = buffers().get((2, len(tokens), self.length))
        native.kernel.widen(tokens, inputs, labels, extra)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

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
        origins = zip(spans[first, BUFFER].tolist(), spans[first, DOCUMENT].tolist(), strict=True)
        keys = np.array([lines.buffers[buffer].key(document) for buffer, document in origins], np.uint64)
        for column in (DOCUMENT, POSITION):
            keys = mix_array(keys ^ spans[first, column].astype(np.uint64))
        return keys

    @property
    def document_starts(self) -> tuple[Ints, Ints]:
        """Where documents start in the whole lines: line and position of each first token.

        A document that continues from the line before starts at position 0.
        """
        line, position, begins, number = self._positions
        starts = begins & (number >= 0)
        return line[starts], position[starts]

    def cu_seqlens(self) -> Ints:
        """Where segments start in the flat batch that the model sees, and the end of the batch.

        A segment is a document. Padding continues the segment before it, unless it is to be a
        segment of its own.
        """
        line, position, begins, number = self._positions
        starts = begins & (position < self.length)
        if not self.padding_segment:
            starts &= (number >= 0) | (position == 0)
        return np.append(line[starts] * self.length + position[starts], len(self) * self.length)

    def document_numbers(self) -> Ints:
        """For each token of the whole lines, its document's number in the line; -1 for padding."""
        return self._per_token(self._positions[3])

    def source_numbers(self) -> Ints:
        """For each token of the whole lines, its source as a place in `sources`; -1 for padding."""
        lines, places = self.lines, {name: place for place, name in enumerate(self.sources)}
        of_buffer = np.array([places.get(buffer.source, -1) for buffer in lines.buffers], np.int64)
        padding = lines.spans[:, DOCUMENT] == PADDING
        numbers = np.where(padding, -1, of_buffer.take(lines.spans[:, BUFFER]))
        if unknown := np.flatnonzero((numbers < 0) & ~padding).tolist():
            name = lines.buffers[lines.spans[unknown[0], BUFFER]].source
            raise StageError(
                f"a token is of source {name!r}, which is not one of {', '.join(self.sources)}: "
                "a stage of your own must keep the source of its items, as Item.replace does"
            )
        return self._per_token(numbers)

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

    def _per_token(self, values: Ints) -> Ints:
        """One value per span, repeated for each of its tokens: (lines, line length)."""
        return np.repeat(values, self.lines.spans[:, LENGTH]).reshape(len(self), -1)

    def seen(self, values: Ints) -> torch.Tensor:
        """Of a value for each token, those of the tokens that the model sees."""
        return torch.from_numpy(values[:, : self.length].copy())

    def labelled(self, values: Ints) -> torch.Tensor:
        """Of a value for each token, those of the tokens that stand in `labels`.

        A label is the token that is `extra_tokens` further on.
        """
        return torch.from_numpy(values[:, self.extra_tokens :].copy())


def widen(tokens: npt.NDArray[Any]) -> torch.Tensor:
    """A copy of the tokens as an int64 tensor."""
    copied = buffers().get(tokens.shape)
    np.copyto(copied, tokens, casting="unsafe")
    return torch.from_numpy(copied)


def _document_ids(batch: Batch) -> torch.Tensor:
    return batch.seen(batch.document_numbers())


def _label_document_ids(batch: Batch) -> torch.Tensor:
    return batch.labelled(batch.document_numbers())


def _source_ids(batch: Batch) -> torch.Tensor:
    return batch.seen(batch.source_numbers())


def _label_source_ids(batch: Batch) -> torch.Tensor:
    return batch.labelled(batch.source_numbers())


def _position_ids(batch: Batch) -> torch.Tensor:
    cu = batch.cu_seqlens()
    return torch.from_numpy((np.arange(cu[-1]) - np.repeat(cu[:-1], np.diff(cu))).reshape(len(batch), -1))


def _cu_seqlens(batch: Batch) -> torch.Tensor:
    return torch.from_numpy(batch.cu_seqlens().astype(np.int32))


def _max_seqlen(batch: Batch) -> int:
    return int(np.diff(batch.cu_seqlens()).max())


def _provenance(batch: Batch) -> list[list[Span]]:
    return provenance(batch.lines)


def _epochs(batch: Batch) -> list[list[int]]:
    return epochs(batch.lines)


def _pieces(batch: Batch) -> list[list[Piece]]:
    return [list(pieces_of(batch.lines, row, batch.tokens[row].tolist())) for row in range(len(batch))]


OUTPUTS: dict[str, Callable[[Batch], Any]] = {
    "document_ids": _document_ids,
    "position_ids": _position_ids,
    "cu_seqlens": _cu_seqlens,
    "max_seqlen": _max_seqlen,
    "source_ids": _source_ids,
    "label_document_ids": _label_document_ids,
    "label_source_ids": _label_source_ids,
    "provenance": _provenance,
    "epochs": _epochs,
    "pieces": _pieces,
}


def check_outputs(names: Sequence[str]) -> None:
    """Raise if a name is not an output that a batch can hold."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"outputs is {shown(names)}; it must be a list of names")
    for name in names:
        if name not in OUTPUTS:
            raise ConfigError(f"unknown output {name!r}; batches can hold {', '.join(OUTPUTS)}")


def collect(rows: Sequence[Row], extra_tokens: int) -> Batch:
    """A batch of these lines."""
    return start_collecting([rows], extra_tokens)()[0]


def start_collecting(
    batches: Sequence[Sequence[Row]], extra_tokens: int, *, shifted: bool = False
) -> Callable[[], list[Batch]]:
    """A function that returns a batch of each of these lists of lines, which are copied meanwhile.

    With `shifted`, what `Batch.shifted` returns is made meanwhile, too.
    """
    together = Gathering.of([row for rows in batches for row in rows])
    if together.pieces is None and len(batches) > 1:  # they may differ from batch to batch
        return lambda: [collect(rows, extra_tokens) for rows in batches]
    lengths, length = list(map(len, batches)), together.length - extra_tokens
    wide: list[Ints] = []
    if shifted and native.kernel is not None and together.pieces is not None and length > 0:
        wide = [half for lines in lengths for half in buffers().get((2, lines, length))]
    tokens = buffers().tokens((len(together.rows), together.length), together.dtype)
    wait = together.start_copy_to(tokens, wide, extra_tokens)

    def collected() -> list[Batch]:
        pairs = list(zip(wide[::2], wide[1::2], strict=True)) if wait() else []
        return [
            Batch(
                tokens[first:stop],
                together.padding[first:stop],
                extra_tokens,
                partial(lines_of, rows),
                made=pairs[which : which + 1],
            )
            for which, (rows, (first, stop)) in enumerate(
                zip(batches, pairwise([0, *accumulate(lengths)]), strict=True)
            )
        ]

    return collected


def lines_of(rows: Sequence[Row]) -> Chunk:
    """These lines as one chunk."""
    return Chunk.join([chunk.slice(row, row + 1) for chunk, row in rows])


class Gathering(NamedTuple):
    """Lines that are about to be copied to an array (lines, line length)."""

    rows: list[Row]
    length: int
    dtype: np.dtype[Any]  # holds all tokens
    padding: list[int]  # how many tokens at the end of each line are padding
    pieces: Ints | None  # their memory, rows of address and bytes; None if they can't be copied at once
    unchecked: set[Source]  # what that memory is mapped from

    @classmethod
    def of(cls, rows: list[Row]) -> "Gathering":
        length, dtype, _, _ = rows[0][0].at_once
        unchecked: set[Source] = set()
        if dtype is not None:
            located = (locate if native.kernel is None else native.kernel.locate)(rows, length, dtype, unchecked)
            if located is not None:
                pieces = np.frombuffer(located[1], np.int64).reshape(-1, 2)
                return cls(rows, length, dtype, located[0], pieces, unchecked)
        length, dtype = _shape_of(rows)
        return cls(rows, length, dtype, [chunk.padding[row] for chunk, row in rows], None, set())

    def start_copy_to(self, tokens: Tokens, wide: list[Ints], extra: int) -> Callable[[], bool]:
        """Copy them meanwhile, if that is possible. Returns a function that waits, see `start_copy`."""
        if self.pieces is not None:
            return start_copy(self.pieces, tokens, self.unchecked, wide, extra)

        def copy() -> bool:
            self.copy_to(tokens)
            return False

        return copy

    def copy_to(self, tokens: Tokens) -> Tokens:
        """Copy them. Raises if a file is not what it was when it was mapped."""
        if self.pieces is not None:
            copy_and_check(self.pieces, tokens.reshape(-1).view(np.uint8), self.unchecked)
            return tokens
        try:
            for line, (chunk, row) in enumerate(self.rows):
                tokens[line] = chunk.copies.read(row, self.unchecked)
            for source in self.unchecked:
                source.check()
        except BaseException:
            for chunk, _ in self.rows:
                chunk.copies.forget()
            raise
        return tokens


def locate(
    rows: list[Row], length: int, dtype: np.dtype[Any], unchecked: set[Source]
) -> tuple[list[int], bytearray] | None:
    """The padding of lines, and their memory, rows of address and bytes, which is mapped from the sources it adds.

    None if lines differ in length or type.
    """
    padding: list[int] = []
    pieces = bytearray()
    for chunk, row in rows:
        its_length, its_dtype, table, padded = chunk.at_once
        if its_length != length or its_dtype != dtype or table is None:
            unchecked.clear()
            return None
        table.add(row, pieces, unchecked)
        padding.append(0 if padded is None else padded[row])
    return padding, pieces


def _shape_of(rows: Sequence[Row]) -> tuple[int, np.dtype[Any]]:
    """The length of these lines, which must be the same, and a type that holds all their tokens."""
    length, dtype, last = rows[0][0].line_length, rows[0][0].dtype, rows[0][0]
    for chunk, _ in rows:
        if chunk is not last:
            if chunk.line_length != length:
                check_lengths(chunk.line_length for chunk, _ in rows)
            if chunk.dtype is not dtype and chunk.dtype != dtype:
                dtype = np.dtype(np.int64)
            last = chunk
    return length, dtype
