"""Large Arrow files as byte ranges: layouts of which only the part is read that a block needs.

In a run on a thousand ranks each of them reads a block or two of a file, but would read the whole layout of it. The
footer lists the record batches, 24 bytes each: where each is a document, that is more than a block has. So only its
part of that list is read with a block. Where record batches have many documents, their metadata tells how many,
each its own. Writers give all but the last the same number; if that agrees with the counts, it is taken to
be so, and every record batch is held against it when it is read.
"""

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats.arrow.column import TokenColumn
from fmsdata.formats.arrow.framing import BLOCK, MAGIC, NOT_WHOLE, PREFIX, Guarded, Table, Truncated, moved
from fmsdata.formats.arrow.runs import WASTE, FooterList, read_batches
from fmsdata.formats.arrow.scan import Scan
from fmsdata.formats.base import Data, Layout, Reading

HEAD = 1 << 12  # bytes read at the start of a file
ROOT = 1 << 9  # bytes of a footer that tell where in it things are


def _schema(name: str, size: int, head: memoryview, place: int) -> Reading[pa.Schema]:
    """The schema, from the message that a file or stream starts with."""
    with Guarded(name, NOT_WHOLE):
        length = PREFIX + int(np.frombuffer(head[4:8], "<i4")[0])
        if not PREFIX < length <= size - place:
            raise Truncated("its schema is missing")
    if length > len(head):
        (more,) = yield [Range(place, place + length)]
        head = memoryview(more)
    with Guarded(name, NOT_WHOLE):
        return pa.ipc.read_schema(pa.py_buffer(bytes(head[:length])))


def documents_layout(name: str, size: int, column: str | None, footer: int) -> Reading[Layout | None]:
    """The layout of a file whose record batches are documents, with so many bytes from the footer to the end."""
    begin = size - footer
    root, head = yield [Range(begin, min(begin + ROOT, size)), Range(0, min(size, HEAD))]
    with Guarded(name, NOT_WHOLE):
        if bytes(head[: len(MAGIC)]) != MAGIC:
            raise Truncated("it does not start as an Arrow file does")
        place, count = Table.root(memoryview(root), 0).vector(3)
        if not 0 < place <= footer - count * BLOCK.itemsize:
            raise Truncated("its footer is damaged")
    schema = yield from _schema(name, size, memoryview(head)[8:], 8)
    scan = Scan(size, TokenColumn(schema, column, name))
    return None if scan.column.listed else _Documents(scan, FooterList(scan, begin + place, count))


class _Documents:
    """The layout of a file in which each record batch is a document."""

    known_tokens: int | None = None
    nbytes = 2000

    def __init__(self, scan: Scan, batches: FooterList) -> None:
        self._scan, self._batches = scan, batches
        self.documents = batches.count

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        messages = yield from self._batches.read(first, stop)
        return (yield from _whole(self._scan, messages, 0, stop - first, stop - first))

    def tokens(self) -> Reading[int]:
        return self._batches.tokens()


def _whole(scan: Scan, messages: Ints, first: int, stop: int, documents: int) -> Reading[Block[Tokens]]:
    """Some documents of whole record batches, which have so many and must lie in order."""
    ends = messages.sum(axis=1)
    with Guarded(scan.column.name):
        if (messages[1:, 0] < ends[:-1]).any():
            raise Truncated("its record batches are not in order")
    start = int(messages[0, 0]) & -8
    (data,) = yield [Range(start, int(ends[-1]))]
    return read_batches(scan, start, memoryview(data), moved(messages, -start), first, stop, documents)


class _Batch(NamedTuple):
    """A record batch with many documents, as its metadata tells."""

    rows: int
    plain: bool
    table: tuple[int, int]  # where in the file the list offsets are, and how many bytes
    values: tuple[int, int]


def _batch(scan: Scan, data: memoryview, message: Ints) -> _Batch:
    """Of a record batch whose metadata, at least, is at hand."""
    column, metadata = scan.column, scan.metadata
    base, size, body = message.tolist()
    head = np.array([[0, size, body]])
    with Guarded(column.name):
        shape = metadata.shape(data, head, base)
        column.require(shape)
        nodes, buffers = metadata.read(data, head, shape, base)
        plain = bool(column.are_plain(nodes, shape)[0])
        column.row_tokens(nodes, buffers, np.array([plain]))
        rows = int(nodes[0, column.node, 0])
        buffers[:, :, 0] += base
        places = buffers[0].tolist()
        table = values = (0, 0)
        if plain:
            values = tuple(places[column.values])
            if column.fixed_size is None and rows:
                table = tuple(places[column.table])
                column.require_table(*table, rows)
    return _Batch(rows, plain, table, values)


def rows_layout(scan: Scan, messages: Ints, documents: int, dense: bool) -> Reading[Layout | None]:
    """The layout of a file of lists, if its record batches seem to have the same number of rows, all but the last."""
    ends = messages[[0, -1]]
    data = yield [Range(offset, offset + size) for offset, size, _ in ends.tolist()]
    first, last = (_batch(scan, memoryview(one), message) for one, message in zip(data, ends, strict=True))
    if documents != (len(messages) - 1) * first.rows + last.rows or not 0 < last.rows <= first.rows:
        return None
    rows = np.full(len(messages), first.rows)
    rows[-1] = last.rows
    return _Rows(scan, messages, rows, dense)


class _Rows:
    """The layout of a file whose record batches have many documents each.

    `dense`: the list offsets of a record batch are asked for all at once, and kept for its other blocks.
    """

    def __init__(self, scan: Scan, messages: Ints, rows: Ints, dense: bool) -> None:
        self._scan, self._column, self._messages = scan, scan.column, messages
        self._batches: dict[int, _Batch] = {}  # those that were asked so far
        self._dense = dense and scan.column.fixed_size is None
        self._kept: dict[int, Ints] = {}  # list offsets
        self._first_row: list[int] = offsets(rows).tolist()
        self.documents = self._first_row[-1]
        self.known_tokens: int | None = None
        self.nbytes = messages.nbytes + (8 + 300) * len(rows) + 2000
        if self._dense:
            self.nbytes += 8 * self.documents

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        begin, end = bisect_right(self._first_row, first) - 1, bisect_left(self._first_row, stop)
        parts = [(batch, *self._rows_of(batch, first, stop)) for batch in range(begin, end)]
        parts = [one for one in parts if one[1] < one[2]]
        if self._are_needed(begin, end, stop - first):
            return (yield from self._read_whole(begin, end, first, stop))
        batches, tables = yield from self._tables(parts)
        if not all(batch.plain for batch in batches):
            return (yield from self._read_whole(begin, end, first, stop))
        column, item = self._column, self._column.dtype.itemsize
        wanted: list[Range] = []
        starts: list[Ints] = []
        lengths: list[Ints] = []
        with Guarded(column.name):
            for ends, batch in zip(tables, batches, strict=True):
                place, size = batch.values
                _, length = column.rows(ends, place, size)
                wanted.append(Range(place + ends.item(0) * item, place + ends.item(-1) * item))
                starts.append(ends[:-1] - ends[0])
                lengths.append(length)
        data = yield wanted
        arrays = [np.frombuffer(one, column.dtype) for one in data]
        array = np.repeat(np.arange(len(arrays)), [len(one) for one in starts])
        offsets = [where.start for where in wanted]
        return Block(arrays, array, np.concatenate(starts), np.concatenate(lengths), offsets)

    def _rows_of(self, batch: int, first: int, stop: int) -> tuple[int, int]:
        """Which of some documents are in a record batch, counted from its first."""
        low, high = self._first_row[batch], self._first_row[batch + 1]
        return max(first, low) - low, min(stop, high) - low

    def _are_needed(self, begin: int, end: int, count: int) -> bool:
        """Whether (nearly) all of some record batches is needed for so many of their rows."""
        rows = self._first_row[end] - self._first_row[begin]
        return (rows - count) * WASTE <= rows and len(self._column.schema.names) == 1

    def _read_whole(self, begin: int, end: int, first: int, stop: int) -> Reading[Block[Tokens]]:
        low, high = self._first_row[begin], self._first_row[end]
        return (yield from _whole(self._scan, self._messages[begin:end], first - low, stop - low, high - low))

    def _tables(self, parts: list[tuple[int, int, int]]) -> Reading[tuple[list[_Batch], list[Ints]]]:
        """The record batches, and of each the list offsets of some rows and behind the last."""
        if not self._dense:
            tables = yield from self._read_tables(parts)
        else:
            missing = [batch for batch, _, _ in parts if batch not in self._kept]
            rows = self._first_row
            found = yield from self._read_tables([(one, 0, rows[one + 1] - rows[one]) for one in missing])
            self._kept.update(zip(missing, found, strict=True))
            tables = [self._kept[batch][row : behind + 1] for batch, row, behind in parts]
        return [self._batches[batch] for batch, _, _ in parts], tables

    def _read_tables(self, parts: list[tuple[int, int, int]]) -> Reading[list[Ints]]:
        guesses = {part: self._guess(*part) for part in parts if part[0] not in self._batches}
        known = {part: self._table_range(*part) for part in parts if part[0] in self._batches}
        asked = [one for guess in guesses.values() for one in guess] + list(known.values())
        data = iter((yield asked) if asked else ())
        found: dict[tuple[int, int, int], Data] = {}
        for part, guess in guesses.items():
            got = [next(data) for _ in guess]
            self._learn(part[0], memoryview(got[0]))
            where = known[part] = self._table_range(*part)
            if guess[-1].start <= where.start and where.stop <= guess[-1].stop:
                found[part] = got[-1][where.start - guess[-1].start : where.stop - guess[-1].start]
        found |= {part: next(data) for part in known if part not in guesses}
        missing = [part for part in parts if part not in found]  # seldom: they are not right behind the metadata
        if missing:
            found |= dict(zip(missing, (yield [known[part] for part in missing]), strict=True))
        return [self._ends(found[part], part) for part in parts]

    def _learn(self, batch: int, data: memoryview) -> None:
        """What the metadata of a record batch tells, which was not asked before."""
        found = _batch(self._scan, data, self._messages[batch])
        rows = self._first_row[batch + 1] - self._first_row[batch]
        if found.rows != rows:
            raise DataError(
                f"{self._column.name}: a record batch has {found.rows} rows where the first and the last "
                f"let expect {rows}; write the file again, with the same number of rows in all but the last"
            )
        self._batches[batch] = found

    def _guess(self, batch: int, row: int, behind: int) -> list[Range]:
        """The metadata of a record batch, and the list offsets of some rows where they most often are: behind it."""
        offset, metadata, body = self._messages[batch].tolist()
        item, rows = self._column.ends.itemsize, self._first_row[batch + 1] - self._first_row[batch]
        head = offset + metadata
        if self._column.fixed_size is not None or (rows + 1) * item > body:
            return [Range(offset, head)]
        table = Range(head + row * item, head + (behind + 1) * item)
        near = row * item * WASTE <= body * (behind - row) // rows
        return [Range(offset, table.stop)] if near else [Range(offset, head), table]

    def _table_range(self, batch: int, row: int, behind: int) -> Range:
        found, item = self._batches[batch], self._column.ends.itemsize
        if not found.plain or self._column.fixed_size is not None:
            return Range(0, 0)
        return Range(found.table[0] + row * item, found.table[0] + (behind + 1) * item)

    def _ends(self, table: Data, part: tuple[int, int, int]) -> Ints:
        if self._column.fixed_size is not None:
            return np.arange(part[1], part[2] + 1) * self._column.fixed_size
        return np.frombuffer(table, self._column.ends).astype(np.int64)

    def tokens(self) -> Reading[int]:
        total = 0
        for first, stop in pairwise(self._first_row):
            if first < stop:
                block = yield from self.block(first, stop)
                total += int(block.length.sum())
        return total
