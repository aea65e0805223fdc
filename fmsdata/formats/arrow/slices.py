"""Blocks of a remote Arrow file that are parts of record batches of lists.

A block is slices of their list offsets and values. First the list offsets are asked for, where a batch is cut, because
they tell which values to ask for; other columns are left where they are. What is kept of the file is where these
things are in each record batch.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.formats.arrow.framing import Guarded, Shape
from fmsdata.formats.arrow.runs import OWN, WASTE, read_batches, together
from fmsdata.formats.arrow.scan import SMALL, WINDOW, Scan
from fmsdata.formats.base import Data, Read, Reading

# What is kept of a record batch: where it is; how many rows, null rows and tokens it has; whether the tokens lie there
# as they are, and if so, where the list offsets and the values are, and their sizes.
OFFSET, METADATA, BODY, ROWS, NULLS, TOKENS, PLAIN, TABLE, TABLE_SIZE, VALUES, VALUES_SIZE = range(11)
MANY = 8  # ranges of a block from which on small gaps between them are bridged too


class BatchTable:
    """Gathers what is kept of record batches, as they are scanned."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._found: list[tuple[Ints, Ints]] = []

    def add(self, which: Ints, messages: Ints, nodes: Ints, buffers: Ints, shape: Shape) -> None:
        column = self._scan.column
        rows = np.zeros((len(which), VALUES_SIZE + 1), np.int64)
        rows[:, : BODY + 1] = messages
        rows[:, ROWS : NULLS + 1] = nodes[:, column.node]
        plain = column.are_plain(nodes, shape)
        rows[:, PLAIN] = plain
        rows[:, TOKENS] = column.row_tokens(nodes, buffers, plain)
        if plain.any():
            if column.fixed_size is None:
                rows[:, TABLE : TABLE_SIZE + 1] = buffers[:, column.table]
            rows[:, VALUES : VALUES_SIZE + 1] = buffers[:, column.values]
        self._found.append((which, rows))

    def rows(self) -> Ints:
        """One for each record batch, in the order that the file says."""
        if not self._found:
            return np.zeros((0, VALUES_SIZE + 1), np.int64)
        which, rows = map(np.concatenate, zip(*self._found, strict=True))
        return rows[np.argsort(which)]


def stored(rows: Ints) -> Ints:
    """How many bytes of record batches hold their tokens."""
    plain = rows[:, TABLE_SIZE] + rows[:, VALUES_SIZE]
    return np.where(rows[:, PLAIN], plain, rows[:, METADATA] + rows[:, BODY])


class Slices:
    """Blocks that are parts of record batches of lists.

    `dense`: the list offsets of a record batch are asked for all at once, and kept for its other blocks.
    """

    def __init__(self, scan: Scan, table: Ints, first_row: Ints, tokens: int | None, dense: bool) -> None:
        self.documents = int(first_row[-1])
        self.known_tokens = tokens
        self.nbytes = OWN + table.nbytes + first_row.nbytes
        self._scan = scan
        self._column = scan.column
        self._table = table
        self._first_row = first_row
        self._kept: dict[int, Data] | None = {} if dense else None  # lists of offsets, by where they are
        if dense:
            self.nbytes += scan.column.ends.itemsize * self.documents

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        parts = list(self._parts(first, stop))
        cut = [part for part in parts if not part.whole]
        wanted = [] if self._column.fixed_size is not None else cut
        if self._kept is None:
            tables = yield from fetch([self._table_of(part) for part in wanted])
        else:
            whole = sorted(self._table_of(_Part(part.batch, 0, part.batch[ROWS])) for part in wanted)
            missing = [one for one in whole if one.start not in self._kept]
            found = (yield missing) if missing else []
            self._kept.update(zip((one.start for one in missing), found, strict=True))
            tables = _Fetched(whole, [self._kept[one.start] for one in whole])
        for part in cut:
            self._locate(part, tables)
        fetched = yield from fetch([one for part in parts for one in self._ranges(part)])
        for part in parts:
            if part.whole and part.plain:
                self._locate(part, fetched)
        return together(self._read(part, fetched) for part in parts)

    def tokens(self) -> Reading[int]:
        if self.known_tokens is not None:
            return self.known_tokens
        total = 0
        rows, sizes = self._first_row.tolist(), offsets(self._table[:, METADATA] + self._table[:, BODY])
        batch = 0
        while batch < len(self._table):
            behind = max(batch + 1, int(np.searchsorted(sizes, sizes[batch] + WINDOW, "right")) - 1)
            if rows[batch] < rows[behind]:
                block = yield from in_parts(self.block(rows[batch], rows[behind]), WINDOW)
                total += int(block.length.sum())
            batch = behind
        return total

    def _parts(self, first: int, stop: int) -> Iterator["_Part"]:
        begin = int(np.searchsorted(self._first_row, first, "right")) - 1
        end = int(np.searchsorted(self._first_row, stop, "left"))
        for batch, low in zip(self._table[begin:end].tolist(), self._first_row[begin:end].tolist(), strict=True):
            row, behind = max(first - low, 0), min(stop - low, batch[ROWS])
            if row < behind:
                yield _Part(batch, row, behind - row)

    def _table_of(self, part: "_Part") -> Range:
        """Where the list offsets of these rows are."""
        place, width = part.batch[TABLE], self._column.ends.itemsize
        with Guarded(self._column.name):
            self._column.require_table(place, part.batch[TABLE_SIZE], part.batch[ROWS])
        return Range(place + part.row * width, place + (part.row + part.count + 1) * width)

    def _locate(self, part: "_Part", fetched: "_Fetched") -> None:
        """Where each of these rows starts, in tokens from the start of the file, and how long it is."""
        if self._column.fixed_size is not None:
            ends = np.arange(part.row, part.row + part.count + 1) * self._column.fixed_size
        else:
            with Guarded(self._column.name):
                table = fetched.get(self._table_of(part))
                ends = np.frombuffer(table, self._column.ends, part.count + 1).astype(np.int64)
        with Guarded(self._column.name):
            part.start, part.length = self._column.rows(ends, part.batch[VALUES], part.batch[VALUES_SIZE])

    def _ranges(self, part: "_Part") -> list[Range]:
        if not part.plain:
            return [Range(part.batch[OFFSET], sum(part.batch[: BODY + 1]))]
        if part.whole:
            values = Range(part.batch[VALUES], part.batch[VALUES] + part.batch[VALUES_SIZE])
            return [values] if self._column.fixed_size is not None else [self._table_of(part), values]
        width = self._column.dtype.itemsize
        return [Range(part.start.item(0) * width, (part.start.item(-1) + part.length.item(-1)) * width)]

    def _read(self, part: "_Part", fetched: "_Fetched") -> Block[Tokens]:
        if not part.plain:
            asked = Range(part.batch[OFFSET], sum(part.batch[: BODY + 1]))
            message = np.array([[0, part.batch[METADATA], part.batch[BODY]]])
            return read_batches(self._scan, asked.start, fetched.get(asked), message, part.row, part.row + part.count)
        array, width = np.zeros(part.count, np.int64), self._column.dtype.itemsize
        if not part.length.any():
            return Block([np.empty(0, self._column.dtype)], array, array, part.length, [None])
        tokens, base = fetched.tokens(part.start.item(0) * width, self._column.dtype)
        return Block([tokens], array, part.start - base // width, part.length, [base])


@dataclass
class _Part:
    """Rows of a record batch that a block has."""

    batch: list[int]  # its row of the table
    row: int
    count: int
    start: Ints = field(init=False)
    length: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.plain = bool(self.batch[PLAIN])
        self.whole = not self.plain or self.count == self.batch[ROWS]  # no list offsets need be known to ask for it


class _Fetched:
    """Ranges of the file that were fetched."""

    def __init__(self, ranges: list[Range], data: Sequence[Data]) -> None:
        self._starts = [one.start for one in ranges]
        self._data = [memoryview(one) for one in data]
        self._arrays: dict[int, Tokens] = {}

    def get(self, part: Range) -> memoryview:
        index = bisect_right(self._starts, part.start) - 1
        return self._data[index][part.start - self._starts[index] : part.stop - self._starts[index]]

    def tokens(self, place: int, dtype: np.dtype[Any]) -> tuple[Tokens, int]:
        """The range that a byte lies in, as tokens, and where in the file it begins."""
        index = bisect_right(self._starts, place) - 1
        data = self._data[index]
        if index not in self._arrays:
            self._arrays[index] = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
        return self._arrays[index], self._starts[index]


def fetch(ranges: list[Range]) -> Reading[_Fetched]:
    """Ask for ranges, of which some may be empty, with those that are close to each other in one."""
    asked = merged(ranges)
    if len(asked) > MANY:
        asked = merged(ranges, SMALL)
    return _Fetched(asked, (yield asked) if asked else [])


def merged(ranges: Iterable[Range], small: int = 0) -> list[Range]:
    """The ranges without overlaps, from multiples of 8 on; gaps are bridged if they are a small part of it all.

    Gaps of up to `small` bytes are bridged in any case.

    >>> merged([Range(1000, 3000), Range(16, 999), Range(5000, 5001)])
    [Range(start=16, stop=3000), Range(start=5000, stop=5001)]
    """
    out: list[Range] = []
    needed = gaps = 0
    for start, stop in sorted(Range(start & -8, stop) for start, stop in ranges if start < stop):
        gap = max(0, start - out[-1].stop) if out else 0
        if out and (gap <= small or (gaps + gap) * WASTE <= needed + stop - start):
            needed += max(0, stop - max(start, out[-1].stop))
            gaps += gap
            out[-1] = Range(out[-1].start, max(stop, out[-1].stop))
        else:
            out.append(Range(start, stop))
            needed, gaps = stop - start, 0
    return out


def in_parts(reading: Reading[Read], most: int) -> Reading[Read]:
    """The same reading, which asks for no more than so many bytes in one range."""
    try:
        ranges = next(reading)
        while True:
            parts = [[Range(at, min(at + most, stop)) for at in range(start, stop, most)] for start, stop in ranges]
            fetched = iter((yield [part for some in parts for part in some]))
            ranges = reading.send([b"".join(next(fetched) for _ in some) for some in parts])
    except StopIteration as done:
        result: Read = done.value
        return result
