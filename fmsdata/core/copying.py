"""The only place where tokens are copied: the spans of an item become one array.

Most tokens are in mapped files, which another process may change. Each file that tokens were copied
from is checked after the copy. So the copy is of the file as it was when it was opened, or there is
an error. A check costs more than the copy of a line, so several lines are copied at once: those of
some batches (`copy_pieces`), or some neighbours (`TokenCopies.read`).
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

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
SPAN_BYTES = 32  # of the pieces of a span: two, each with an address and a size
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

    def add_sources(self, item: int, unchecked: set[Source]) -> None:
        """Add what the tokens of an item are mapped from."""
        if len(self._places.sources) <= FEW_SOURCES:
            unchecked |= self._places.sources
        else:
            used = self._spans[self._first[item] : self._first[item + 1], BUFFER].tolist()
            unchecked.update(filter(None, map(self._places.source_of.get, used)))

    def pieces(self, item: int) -> bytearray:
        """The tokens of an item as pieces of memory, if they are stored in the type of the copies."""
        first = self._first
        return self._pieces[SPAN_BYTES * first[item] : SPAN_BYTES * first[item + 1]]

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
            pieces = self._pieces[SPAN_BYTES * low : SPAN_BYTES * high]
            copy_pieces([pieces], self._memory[:count], self._places.sources)
        else:
            self._copy_by_span(low, high)

    @cached_property
    def _pieces(self) -> bytearray:
        """Of each span the stored tokens and the tail, as pieces of memory: address and bytes of each."""
        width, spans = self._dtype.itemsize, self._spans
        data = bytearray(len(spans) * SPAN_BYTES)
        pieces = np.frombuffer(data, np.int64).reshape(-1, 2, 2)
        self._fill_stored(pieces[:, 0], spans, _stored(spans), width)
        tails = address_of(self._tails)
        pieces[:, 1, 0] = np.arange(tails, tails + len(spans) * width, width)
        pieces[:, 1, 1] = (spans[:, TAIL] > 0) * width
        return data

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


def copy_pieces(pieces: Sequence[bytearray], out: Tokens, sources: Collection[Source]) -> None:
    """Copy the pieces of several items, one after the other. `out` must be contiguous and of their type.

    The copies must not be used before the sources have been checked.
    """
    joined = np.frombuffer(bytearray().join(pieces), np.int64).reshape(-1, 2)
    copy_memory(joined, out.reshape(-1).view(np.uint8), sources)
