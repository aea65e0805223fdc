"""Chunks: what travels between stages, documents or lines as spans of stored tokens.

A chunk is a table of spans, and the index of the first span of each item (a document or a line).
All planning is arithmetic on that table. Tokens stay where they are until a batch is made of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fmsdata.core import native
from fmsdata.core.copying import MemoryTable, TokenCopies, take_tokens
from fmsdata.core.keys import Ints, mix, offsets
from fmsdata.core.memory import MappedTokens, Source, system_copy
from fmsdata.core.spans import (
    BEGINS,
    BUFFER,
    COLUMNS,
    DOCUMENT,
    INSERTED,
    LENGTH,
    PADDING,
    POSITION,
    START,
    TAIL,
    Buffer,
    Span,
)
from fmsdata.core.tokens import Tokens, constant
from fmsdata.core.wording import counted, few
from fmsdata.errors import StageError

MOST_NAMES = 4  # of documents in a repr


@dataclass(frozen=True, eq=False, repr=False)
class Chunk:
    """Items in a row: item `i` is the spans `first[i]` to `first[i + 1] - 1`."""

    buffers: list[Buffer]
    spans: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.first) - 1

    def __repr__(self) -> str:
        return f"Chunk of {counted(len(self), 'item')} with {counted(int(self.spans[:, LENGTH].sum()), 'token')}"

    def __getitem__(self, i: int) -> "Item":
        return Item(self.slice(i, i + 1).compact())

    def __iter__(self) -> Iterator["Item"]:
        return (self[i] for i in range(len(self)))

    def slice(self, start: int, stop: int) -> "Chunk":
        low, high = self.first[start], self.first[stop]
        return Chunk(self.buffers, self.spans[low:high], self.first[start : stop + 1] - low)

    def take(self, items: Ints) -> "Chunk":
        """The items with these indices, in this order."""
        start = self.first.take(items)
        count = self.first.take(items + 1) - start
        first = offsets(count)
        if len(items) == first[-1]:  # one span per item
            return Chunk(self.buffers, self.spans.take(start, axis=0), first)
        index = np.repeat(start - first[:-1], count) + np.arange(first[-1])
        return Chunk(self.buffers, self.spans.take(index, axis=0), first)

    def lengths(self) -> Ints:
        """The number of tokens in each item."""
        ends = offsets(self.spans[:, LENGTH])
        return ends[self.first[1:]] - ends[self.first[:-1]]

    @cached_property
    def line_length(self) -> int:
        """The length of all items, which must be the same."""
        lengths = self.lengths()
        check_lengths({int(lengths.min()), int(lengths.max())})
        return int(lengths[0])

    @cached_property
    def padding(self) -> list[int]:
        """How many tokens at the end of each item are padding."""
        last = self.spans[self.first[1:] - 1]
        padding: list[int] = np.where(last[:, DOCUMENT] == PADDING, last[:, LENGTH], 0).tolist()
        return padding

    def first_tokens(self) -> Ints:
        """The first token of each item."""
        spans = self.spans.take(self.first[:-1], axis=0)
        return self._tokens(spans, spans[:, START], (spans[:, TAIL] > 0) & (spans[:, LENGTH] == 1))

    def last_tokens(self) -> Ints:
        """The last token of each item."""
        spans = self.spans.take(self.first[1:] - 1, axis=0)
        if native.kernel is not None and system_copy() is not None:
            stored = native.kernel.last_tokens(self.buffers, MappedTokens, self.spans, self.first)
            if stored is not None:
                tails, tokens = spans[:, TAIL], np.frombuffer(stored[1], stored[0]).astype(np.int64)
                return np.where(tails, tails - 1, tokens)
        return self._tokens(spans, spans[:, START] + spans[:, LENGTH] - 1, spans[:, TAIL] > 0)

    def _tokens(self, spans: Ints, place: Ints, is_tail: npt.NDArray[np.bool_]) -> Ints:
        """For each span its tail, or the token at a place of its buffer."""
        out = spans[:, TAIL] - 1
        stored = np.flatnonzero(~is_tail)
        out[stored] = take_tokens(self.buffers, spans[:, BUFFER].take(stored), place.take(stored))
        return out

    def with_heads(self, where: npt.NDArray[np.bool_], token: int) -> "Chunk":
        """Insert a token before the items at `where`.

        It belongs to the document that follows it.
        """
        first = self.first + offsets(where)
        heads = first[:-1][where]
        chunk = self._with_inserted(first, heads, heads + 1, token)
        chunk.spans[heads, BEGINS] = chunk.spans[heads + 1, BEGINS]
        chunk.spans[heads + 1, BEGINS] = 0
        return chunk

    def with_tails(self, where: npt.NDArray[np.bool_], token: int) -> "Chunk":
        """Append a token to the items at `where`."""
        last = self.first[1:] - 1
        taken = where & (self.spans[:, TAIL].take(last) > 0)
        if taken.any():  # a tail behind a tail is a span of its own
            first = self.first + offsets(taken)
            tails = first[1:][taken] - 1
            return self._with_inserted(first, tails, tails - 1, token).with_tails(where & ~taken, token)
        spans = self.spans.copy()
        spans[last[where], TAIL] = token + 1
        spans[last[where], LENGTH] += 1
        return Chunk(self.buffers, spans, self.first)

    def padded(self, length: int, token: int) -> "Chunk":
        """Pad all items to this length."""
        missing = length - self.lengths()
        short = missing > 0
        first = self.first + offsets(short)
        tails = first[1:][short] - 1
        chunk = self._with(first, tails, Buffer(constant(token, length)), PADDING)
        chunk.spans[tails, LENGTH] = missing[short]
        chunk.spans[tails, BEGINS] = 1
        return chunk

    def _with_inserted(self, first: Ints, places: Ints, owners: Ints, token: int) -> "Chunk":
        """The same spans with an inserted token at each of these indices.

        It has the source of the span at `owners`, because it may be alone in its line.
        """
        names = {name: number for number, name in enumerate(dict.fromkeys(buffer.source for buffer in self.buffers))}
        number = np.array([names[buffer.source] for buffer in self.buffers], np.int64)
        chunk = self._with(first, places, Buffer(constant(token)), INSERTED)
        chunk.spans[places, BUFFER] = len(self.buffers) + number.take(chunk.spans[owners, BUFFER])
        return Chunk([*self.buffers, *(Buffer(constant(token), name) for name in names)], chunk.spans, chunk.first)

    def _with(self, first: Ints, places: Ints, buffer: Buffer, kind: int) -> "Chunk":
        """The same spans with one more at each of these indices."""
        index = np.ones(first[-1], np.int64)
        index[places] = 0
        index = np.cumsum(index) - 1
        index[places] = len(self.spans)
        span = np.array([[len(self.buffers), 0, 1, kind, 0, 0, 0]])
        return Chunk([*self.buffers, buffer], np.concatenate([self.spans, span]).take(index, axis=0), first)

    def compact(self) -> "Chunk":
        """The same items without unused buffers, so that those can be unmapped."""
        buffer = self.spans[:, BUFFER]
        used = np.zeros(len(self.buffers), bool)
        used[buffer] = True
        if used.all():
            return self
        spans = self.spans.copy()
        spans[:, BUFFER] = offsets(used).take(buffer)
        return Chunk([self.buffers[i] for i in used.nonzero()[0].tolist()], spans, self.first)

    @staticmethod
    def join(chunks: Sequence["Chunk"]) -> "Chunk":
        """Concatenate chunks."""
        if len(chunks) == 1:
            return chunks[0]
        rows = offsets(np.array([len(chunk.spans) for chunk in chunks])).tolist()
        first = np.concatenate(
            [chunks[0].first, *(chunk.first[1:] + row for chunk, row in zip(chunks[1:], rows[1:], strict=False))]
        )
        if native.kernel is not None:
            spans = np.empty((rows[-1], COLUMNS), np.int64)
            parts = [chunk.spans for chunk in chunks]
            return Chunk(native.kernel.join(parts, [chunk.buffers for chunk in chunks], spans), spans, first)
        places: dict[Buffer, int] = {}
        spans = np.concatenate([chunk.spans for chunk in chunks])
        last: list[Buffer] | None = None
        moved: list[int] = []
        for chunk, (row, behind) in zip(chunks, pairwise(rows), strict=True):
            if chunk.buffers is not last:  # parts of one chunk share their buffers
                last = chunk.buffers
                moved = [places.setdefault(buffer, len(places)) for buffer in last]
            if moved != list(range(len(moved))):
                spans[row:behind, BUFFER] = np.array(moved).take(chunk.spans[:, BUFFER])
        return Chunk(list(places), spans, first)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type that the tokens are stored in, or the narrowest integer type that holds all of them."""
        used = np.flatnonzero(np.bincount(self.spans[:, BUFFER])).tolist()
        types = {self.buffers[buffer].tokens.dtype for buffer in used}
        tail = int(self.spans[:, TAIL].max())
        if len(types) == 1 and (stored := next(iter(types))).kind in "iu" and tail <= np.iinfo(stored).max + 1:
            return stored
        common = np.result_type(*types, *([np.min_scalar_type(tail - 1)] if tail else []))
        return common if common.kind in "iu" else np.dtype(np.int64)

    @cached_property
    def copies(self) -> TokenCopies:
        """Copies of the tokens of each item, in `dtype`."""
        return TokenCopies(self.buffers, self.spans, self.first, self.dtype)

    @cached_property
    def at_once(self) -> tuple[int, np.dtype[Any] | None, MemoryTable | None, list[int] | None]:
        """How to copy items together with those of other chunks.

        Their length, the type that all are stored in, where they are, and their padding, if there is any.
        """
        if native.kernel is not None and system_copy() is not None:
            found = native.kernel.table(self.buffers, MappedTokens, self.spans, self.first)
            if found is not None:  # without padding, which is not mapped
                return *found[:2], MemoryTable(*found[2]), None
        padding = self.padding if (self.spans[:, DOCUMENT] == PADDING).any() else None
        copies = self.copies
        return self.line_length, copies.stored_as, None if copies.stored_as is None else copies.table, padding


Row: TypeAlias = tuple[Chunk, int]  # a line, and the chunk that it is in


class Item:
    """One document or one line: its tokens, and where they come from.

    Iterating over a stage yields items, and a stage of your own works on them.

    >>> for document in fmsdata.ShardReader("corpus/web"):     # doctest: +SKIP
    ...     print(document.source, document.shard, document.document, document.tokens[:5])
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    def __len__(self) -> int:
        return int(self.chunk.spans[:, LENGTH].sum())

    def __repr__(self) -> str:
        names = list(dict.fromkeys(f"{span.source}/{span.shard}#{span.document}" for span in self.spans))
        return f"Item({counted(len(self), 'token')} of {few(names, MOST_NAMES) if names else 'no document'})"

    def __reduce__(self) -> tuple[type["Item"], tuple[Chunk]]:
        """Pickled with its own tokens, not with those of its shards."""
        spans = self.chunk.spans.copy()
        spans[:, START] = offsets(spans[:, LENGTH])[:-1]
        buffers = [replace(buffer, tokens=self.tokens) for buffer in self.chunk.buffers]
        return Item, (Chunk(buffers, spans, self.chunk.first),)

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens, read-only: copy them before you write to them."""
        unchecked: set[Source] = set()
        chunk = self.chunk  # copies of its own: those of the chunk may be overwritten when its lines were read
        tokens = TokenCopies(chunk.buffers, chunk.spans, chunk.first, chunk.dtype).read(0, unchecked)
        for source in unchecked:
            source.check()
        tokens.flags.writeable = False
        return tokens

    @property
    def spans(self) -> list[Span]:
        """The stored tokens of the item. Inserted tokens (BOS, padding) have no entry."""
        return provenance(self.chunk)[0]

    @property
    def epochs(self) -> list[int]:
        """For each span, the epoch of its source."""
        return epochs(self.chunk)[0]

    @property
    def source(self) -> str:
        return self._origin.source

    @property
    def shard(self) -> str:
        return self._origin.shard

    @property
    def document(self) -> int:
        """The number of the document in its shard; for a line, of its first document."""
        return int(self.chunk.spans[self._stored, DOCUMENT])

    @property
    def key(self) -> int:
        """A 64-bit key, unique in the run, to draw random choices from."""
        span = self.chunk.spans[self._stored].tolist()
        return mix(mix(self._origin.key(span[DOCUMENT]) ^ span[DOCUMENT]) ^ span[POSITION])

    def replace(self, tokens: npt.ArrayLike) -> "Item":
        """The item with new tokens.

        A line must keep its length, so that every token keeps its provenance. A document may become
        longer or shorter; the offsets of its spans then count in the new tokens.
        """
        new = np.array(tokens)  # a copy: the caller may write to the array again
        if not new.size:
            new = np.empty(0, np.int64)
        if new.ndim != 1 or new.dtype.kind not in "iu":
            raise StageError(f"the tokens of an item must be a list of integers, got {new.dtype} of shape {new.shape}")
        if len(new) == len(self):
            return Item(self._with_tokens(new))
        if len({span[:3] for span in self.spans}) > 1:
            raise StageError(f"a line must keep its length of {counted(len(self), 'token')}, got {len(new)}")
        begins = int(self.chunk.spans[:, BEGINS].max())
        spans = np.array([[0, 0, len(new), self.document, 0, begins, 0]], np.int64)
        return Item(Chunk([_renewed(self._origin, new)], spans, np.array([0, 1], np.int64)))

    def _with_tokens(self, new: Tokens) -> Chunk:
        """The same spans with new tokens; a tail becomes an inserted span."""
        spans: list[list[int]] = []
        buffers: list[Buffer] = []
        place = 0
        for buffer, _, length, document, position, begins, tail in self.chunk.spans.tolist():
            stored = length - (tail > 0)
            if stored:
                spans.append([len(buffers), place, stored, document, position, begins, 0])
                buffers.append(_renewed(self.chunk.buffers[buffer], new))
            if tail:
                spans.append([len(buffers), place + stored, 1, INSERTED, 0, 0 if stored else begins, 0])
                buffers.append(Buffer(new, self.chunk.buffers[buffer].source))
            place += length
        return Chunk(buffers, np.array(spans, np.int64), np.array([0, len(spans)], np.int64))

    def numbered(self, number: int) -> "Item":
        """The item as an output of a transform. From the second on, it gets its own key."""
        if number == 0:
            return self
        buffers = [buffer.with_key(number) for buffer in self.chunk.buffers]
        return Item(Chunk(buffers, self.chunk.spans, self.chunk.first))

    @property
    def _stored(self) -> int:
        stored = np.flatnonzero(self.chunk.spans[:, DOCUMENT] >= 0)
        return int(stored[0]) if len(stored) else 0

    @property
    def _origin(self) -> Buffer:
        return self.chunk.buffers[int(self.chunk.spans[self._stored, BUFFER])]


def check_lengths(lengths: Iterable[int]) -> None:
    """Raise unless all lines of a batch have the same length."""
    if len(different := set(lengths)) > 1:
        raise StageError(
            f"lines of {' and '.join(map(str, sorted(different)))} tokens can't be in one batch; put a Pack below"
        )


def _renewed(buffer: Buffer, tokens: Tokens) -> Buffer:
    """New tokens of the same origin, with their own key."""
    return replace(buffer.with_key(), tokens=tokens)


def stored_tokens(spans: Ints) -> Ints:
    """The number of stored tokens in each span: not delimiters, not padding."""
    stored: Ints = (spans[:, LENGTH] - (spans[:, TAIL] > 0)) * (spans[:, DOCUMENT] >= 0)
    return stored


def provenance(chunk: Chunk) -> list[list[Span]]:
    """For each item, the stored tokens that it consists of."""
    return [[span for span, _ in row] for row in _stored_spans(chunk)]


def epochs(chunk: Chunk) -> list[list[int]]:
    """For each item, the epoch of each span that `provenance` returns."""
    return [[epoch for _, epoch in row] for row in _stored_spans(chunk)]


def _stored_spans(chunk: Chunk) -> list[list[tuple[Span, int]]]:
    rows = chunk.spans.tolist()
    first = chunk.first.tolist()
    out: list[list[tuple[Span, int]]] = []
    for low, high in pairwise(first):
        item: list[tuple[Span, int]] = []
        for buffer, _, length, document, position, _, tail in rows[low:high]:
            stored = length - (tail > 0)
            if document >= 0 and stored:
                origin = chunk.buffers[buffer]
                span = Span(origin.source, origin.shard, document, position, position + stored)
                item.append((span, origin.epoch))
        out.append(item)
    return out
