"""The only place where tokens are copied: the spans of an item become one array.

Most tokens are in mapped files, which another process may change. Each file that tokens were copied
from is checked after the copy. So the copy is of the file as it was when it was opened, or there is
an error. A check costs more than the copy of a line, so several lines are copied at once: those of
some batches (`MemoryTable`), or some neighbours (`TokenCopies.read`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.memory import MappedTokens, Source, address_of, copy_memory, copy_numbers
from fmsdata.core.ranges import inside
from fmsdata.core.spans import BUFFER, LENGTH, START, TAIL, Buffer
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError

AT_ONCE = 1 << 18  # about how many bytes of items are copied at once
GROUP = 128  # items whose tokens are located at once
ELSEWHERE = 0  # the address of tokens that are not in memory
FEW_SOURCES = 16  # that are checked faster than it is found out which of them an item needs
SHORT = 1 << 16  # tokens of an array that is converted as a whole
SOMEWHERE = np.iinfo(np.int64).max  # and their number


class _Places:
    """Where the tokens of buffers are in memory, and what they are mapped from.

    Short arrays, such as inserted tokens, are converted to `dtype`.
    """

    def __init__(self, buffers: Sequence[Buffer], used: Ints, dtype: np.dtype[Any] | None = None) -> None:
        self._buffers = buffers
        self._converted: list[Tokens] = []  # keeps their memory
        self.source_of: dict[int, Source] = {}
        self.dtypes: dict[int, np.dtype[Any]] = {}
        address, size = [ELSEWHERE] * len(buffers), [SOMEWHERE] * len(buffers)
        self.used: list[int] = np.flatnonzero(np.bincount(used)).tolist()
        for which in self.used:
            tokens = buffers[which].tokens
            if type(tokens) is MappedTokens:
                address[which], size[which] = tokens.address, tokens.length
                self.source_of[which] = tokens.source
            elif isinstance(tokens, np.ndarray):
                if dtype is not None and tokens.dtype != dtype and len(tokens) <= SHORT:
                    tokens = tokens.astype(dtype)
                    self._converted.append(tokens)
                if tokens.flags.c_contiguous and tokens.dtype.isnative:
                    address[which], size[which] = tokens.ctypes.data, len(tokens)
            self.dtypes[which] = tokens.dtype
        self.sources = set(self.source_of.values())
        self.address, self._size = np.array(address, np.int64), np.array(size, np.int64)
        # The type of all tokens, if they have the same and all are in memory.
        self.in_memory = all(address[which] for which in self.used)
        self.dtype = self.dtypes[self.used[0]] if self.in_memory and len(set(self.dtypes.values())) == 1 else None

    def require(self, buffer: Ints, start: Ints, count: Ints) -> None:
        """Raise if there are no such tokens: addresses know no bounds."""
        size = self._size.take(buffer)
        if not inside(start, count, size):
            origin = self._buffers[int(buffer[(start + count > size).argmax()])]
            raise DataError(
                f"source {origin.source!r}, {origin.shard}: the file is damaged (documents reach beyond its end); "
                "write it again or remove it"
            )


def take_tokens(buffers: Sequence[Buffer], which: Ints, place: Ints) -> Ints:
    """One token of each of these buffers."""
    places = _Places(buffers, which)
    places.require(which, place, np.ones_like(place))
    if places.dtype is not None:
        address = places.address.take(which) + place * places.dtype.itemsize
        return copy_numbers(address, places.dtype, places.sources).astype(np.int64)
    out = np.empty(len(which), np.int64)
    for buffer in places.used:
        here = which == buffer
        out[here] = buffers[buffer].tokens.take(place[here])
    return out


class MemoryTable(NamedTuple):
    """Where items are in memory: item `i` is the spans `first[i]` to `first[i + 1] - 1`."""

    pieces: bytes  # of integers, four of each span: address and size of the stored tokens, and of the tail
    first: bytes  # of integers
    source: bytes  # of each span, what it is mapped from, as a place in `sources`; -1 for nothing
    sources: tuple[Source, ...]
    tails: object  # keeps their memory

    def add(self, item: int, pieces: bytearray, unchecked: set[Source]) -> None:
        """Add the pieces of an item, and what they are mapped from."""
        first, stop = np.frombuffer(self.first, np.int64)[item : item + 2].tolist()
        pieces += self.pieces[32 * first : 32 * stop]
        if len(self.sources) <= FEW_SOURCES:
            unchecked.update(self.sources)
        else:
            source = np.frombuffer(self.source, np.int64)[first:stop].tolist()
            unchecked.update([self.sources[number] for number in source if number >= 0])


class TokenCopies:
    """Copies of the tokens of items, in a type that holds all of them.

    Item `i` is the spans `first[i]` to `first[i + 1] - 1`.
    """

    def __init__(self, buffers: Sequence[Buffer], spans: Ints, first: Ints, dtype: np.dtype[Any]) -> None:
        self._buffers, self._spans, self._dtype = buffers, spans, dtype
        self._places = _Places(buffers, spans[:, BUFFER], dtype)
        self._places.require(spans[:, BUFFER], spans[:, START], _stored(spans))
        # The type that all tokens are stored in, if that is also the type of the copies.
        self.stored_as = dtype if self._places.dtype == dtype else None
        self._first: list[int] = first.tolist()
        self._copied = 0, 0  # the first of the items that were copied last, and the one after their last
        self._memory: Tokens = np.empty(0, dtype)
        self._rows: Any = ()  # the items that were copied last
        self._group, self._located = -1, list[tuple[int, int, int, bytes]]()

    def read(self, item: int, unchecked: set[Source]) -> Tokens:
        """The tokens of an item, which are valid until the next one is read.

        They must not be used before the sources that this adds to `unchecked` have been checked.
        """
        first, stop = self._copied
        if not first <= item < stop:
            if not self._places.in_memory:
                return self._join(item)
            self._copied, ends = (0, 0), self._ends
            left = ends[-1] - ends[item]
            most = -(-left // max(1, round(left * self._dtype.itemsize / AT_ONCE)))  # in parts of equal size
            first, stop = item, max(item + 1, bisect_right(ends, ends[item] + most) - 1)
            self._copy(first, stop)
            self._rows = self._memory_by_item(first, stop)
            self._copied = first, stop
            unchecked |= self._places.sources
        tokens: Tokens = self._rows[item - first]
        return tokens

    def forget(self) -> None:
        """Drop what was copied: a check of its sources failed."""
        self._copied = 0, 0

    @cached_property
    def table(self) -> "MemoryTable":
        """Where the items are in memory, if they are stored in the type of the copies."""
        sources = list(dict.fromkeys(self._places.source_of.values()))
        numbers = {source: number for number, source in enumerate(sources)}
        of_buffer = np.full(len(self._buffers), -1, np.int64)
        for buffer, source in self._places.source_of.items():
            of_buffer[buffer] = numbers[source]
        first = np.array(self._first, np.int64)
        which = of_buffer.take(self._spans[:, BUFFER])
        return MemoryTable(self._pieces.tobytes(), first.tobytes(), which.tobytes(), tuple(sources), self._tails)

    @cached_property
    def _ends(self) -> list[int]:
        """The tokens before each item, and all of them."""
        ends: list[int] = offsets(self._spans[:, LENGTH]).take(self._first).tolist()
        return ends

    @cached_property
    def _same_length(self) -> bool:
        return len({stop - start for start, stop in pairwise(self._ends)}) == 1

    def _memory_by_item(self, first: int, stop: int) -> Any:
        """What was copied: the rows of a table, if all items have the same length, else a list."""
        begin = self._ends[first]
        if self._same_length:
            return self._memory[: self._ends[stop] - begin].reshape(stop - first, -1)
        return [self._memory[start - begin : end - begin] for start, end in pairwise(self._ends[first : stop + 1])]

    def _copy(self, first: int, stop: int) -> None:
        low, high, count = self._first[first], self._first[stop], self._ends[stop] - self._ends[first]
        if len(self._memory) < count:
            self._memory = np.empty(count, self._dtype)
        if self.stored_as is not None:
            copy_memory(self._pieces[2 * low : 2 * high], self._memory[:count].view(np.uint8), self._places.sources)
        else:
            self._copy_by_span(low, high)

    @cached_property
    def _pieces(self) -> Ints:
        """Of each span the stored tokens and the tail, as pieces of memory: address and bytes of each."""
        width, spans = self._dtype.itemsize, self._spans
        pieces = np.empty((len(spans), 2, 2), np.int64)
        self._fill_stored(pieces[:, 0], spans, _stored(spans), width)
        tails = address_of(self._tails)
        pieces[:, 1, 0] = np.arange(tails, tails + len(spans) * width, width)
        pieces[:, 1, 1] = (spans[:, TAIL] > 0) * width
        return pieces.reshape(-1, 2)

    @cached_property
    def _tails(self) -> Tokens:
        tails: Tokens = (self._spans[:, TAIL] - 1).astype(self._dtype)
        return tails

    def _fill_stored(self, pieces: Ints, spans: Ints, stored: Ints, width: int) -> None:
        """Fill in the stored tokens of spans, as pieces of memory."""
        np.multiply(spans[:, START], width, out=pieces[:, 0])
        pieces[:, 0] += self._places.address.take(spans[:, BUFFER])
        np.multiply(stored, width, out=pieces[:, 1])

    def _copy_by_span(self, low: int, high: int) -> None:
        """Copy tokens of different types."""
        spans, out = self._spans[low:high], self._memory
        stored = _stored(spans)
        ends = offsets(spans[:, LENGTH])
        tail = spans[:, TAIL]
        out[ends[1:][tail > 0] - 1] = tail[tail > 0] - 1
        kinds: dict[np.dtype[Any], list[int]] = {}  # spans by the type of their tokens
        for row, buffer in enumerate(spans[:, BUFFER].tolist()):
            kinds.setdefault(self._places.dtypes[buffer], []).append(row)
        for kind, rows in kinds.items():
            targets, counts = ends[rows].tolist(), stored[rows].tolist()
            copied = np.empty(sum(counts), kind)
            pieces = np.empty((len(rows), 2), np.int64)
            self._fill_stored(pieces, spans[rows], stored[rows], kind.itemsize)
            copy_memory(pieces, copied.view(np.uint8), self._places.sources)
            for target, count, end in zip(targets, counts, accumulate(counts), strict=True):
                out[target : target + count] = copied[end - count : end]

    def _join(self, item: int) -> Tokens:
        """The tokens of an item that are not all in memory.

        Only its own are fetched: the budget does not count others.
        """
        group = item // GROUP * GROUP
        if group != self._group:
            self._group, self._located = group, self._locate(group, min(group + GROUP, len(self._first) - 1))
        base, pieces = self._first[group], []
        for buffer, start, stop, tail in self._located[self._first[item] - base : self._first[item + 1] - base]:
            if start < stop:
                tokens: Any = self._buffers[buffer].tokens[start:stop]  # before Python 3.12 the stubs know no buffers
                pieces.append(tokens if tokens.dtype == self._dtype else tokens.astype(self._dtype))
            pieces.append(tail)
        return np.frombuffer(b"".join(pieces), self._dtype)

    def _locate(self, first: int, stop: int) -> list[tuple[int, int, int, bytes]]:
        """For each span of some items where its stored tokens are, and its tail.

        Keeps no view of tokens: those of remote shards may be revoked.
        """
        rows = slice(self._first[first], self._first[stop])
        spans, start = self._spans[rows], self._spans[rows, START]
        tail = spans[:, TAIL].tolist()
        tails = {value: np.array(value - 1, self._dtype).tobytes() if value else b"" for value in set(tail)}
        places = spans[:, BUFFER].tolist(), start.tolist(), (start + _stored(spans)).tolist()
        return list(zip(*places, [tails[value] for value in tail], strict=True))


def _stored(spans: Ints) -> Ints:
    """The tokens of spans that are in their buffers: all but tails."""
    return spans[:, LENGTH] - (spans[:, TAIL] > 0)
