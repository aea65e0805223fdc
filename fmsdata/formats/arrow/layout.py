"""Arrow IPC shards, file or stream format, read as byte ranges: how a shard's layout is found.

Of a file the last bytes tell where the record batches are. Where each of them is a document, no more is needed; where
they have rows that are documents, their metadata tells how many. A stream has no such list and is walked once.
"""

import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.core.ranges import Range
from fmsdata.formats.arrow.column import TokenColumn
from fmsdata.formats.arrow.framing import (
    MAGIC,
    NO_END,
    NOT_WHOLE,
    PREFIX,
    Guarded,
    Shape,
    Truncated,
    footer_size,
    read_footer,
    require_inside,
    require_stream,
)
from fmsdata.formats.arrow.large import documents_layout, rows_layout
from fmsdata.formats.arrow.runs import LAST_GAPS, START, STOP, WASTE, FooterList, Runs, TokenCount, find_bounds
from fmsdata.formats.arrow.scan import SMALL, WINDOW, Held, Scan
from fmsdata.formats.arrow.slices import BODY, NULLS, ROWS, TOKENS, BatchTable, Slices, stored
from fmsdata.formats.base import Layout, Reading

TAIL = 1 << 14  # bytes to read first, at the end
MANY = 8  # record batches, of which not each is asked how many rows it has


def read_arrow_layout(
    name: str, size: int, column: str | None, bounds: Sequence[int], dense: bool = False
) -> Reading[Layout]:
    """The layout of an Arrow file of `size` bytes. (`fmsdata.readers.ranges.read_layout` says more.)"""
    with Guarded(name, NOT_WHOLE):
        if size <= 0:
            raise Truncated("it is empty")
    tail = Range(max(0, size - TAIL) & -8, size)
    (data,) = yield [tail]
    held = Held(tail.start, memoryview(data))
    wanted = np.array(bounds, np.int64)
    if held.data[-len(MAGIC) :] == MAGIC and size >= 18:
        return (yield from _from_footer(name, size, column, wanted, dense, held))
    return (yield from _from_stream(name, size, column, wanted, dense, held))


def _from_footer(name: str, size: int, column: str | None, bounds: Ints, dense: bool, held: Held) -> Reading[Layout]:
    with Guarded(name, NOT_WHOLE):
        length = footer_size(held.data, size)
        if length > max(size // 2, WINDOW):  # record batches are longer than what the footer has of them
            raise Truncated(f"its footer can't have {length} bytes")
    if length > len(held.data):
        if not dense or length * WASTE > size:
            large = yield from documents_layout(name, size, column, length)
            if large is not None:
                return large
        start = size - length & -8
        (more,) = yield [Range(start, held.base)]
        held = Held(start, memoryview(b"".join([more, held.data])))
    with Guarded(name, NOT_WHOLE):
        footer = held.data[len(held.data) - length :]
        messages, place = read_footer(footer)
        require_inside(messages, size)
        schema = pa.ipc.open_file(pa.py_buffer(b"".join([MAGIC, b"\0\0", footer]))).schema
    scan = Scan(size, TokenColumn(schema, column, name))
    if scan.column.listed:
        if MANY < len(messages) < 2 * len(bounds):  # else blocks are many record batches
            large = yield from rows_layout(scan, messages, int(bounds[-1]), dense)
            if large is not None:
                return large
        table = BatchTable(scan)
        yield from scan.listed(messages, table.add, held)
        return _of_lists(scan, table.rows(), bounds, dense)
    footer_list = FooterList(scan, size - length + place, len(messages))
    return Runs(scan, messages, np.arange(len(messages) + 1), bounds, footer_list, None)


def _from_stream(name: str, size: int, column: str | None, bounds: Ints, dense: bool, held: Held) -> Reading[Layout]:
    (data,) = yield from held.read([Range(0, min(TAIL, size))])
    with Guarded(name, NOT_WHOLE):
        if data[: len(MAGIC)] == MAGIC:
            raise Truncated("the end is missing")
        require_stream(data)
        length = PREFIX + struct.unpack_from("<i", data, 4)[0]
        if length > size:
            raise Truncated(NO_END)
        if not PREFIX < length <= WINDOW:
            raise Truncated("no message at byte 0")
    if length > len(data):
        (more,) = yield [Range(0, length)]
        data = memoryview(more)
    with Guarded(name, NOT_WHOLE):
        schema = pa.ipc.open_stream(pa.py_buffer(data[:length])).schema
    scan = Scan(size, TokenColumn(schema, column, name))
    if scan.column.listed:
        table = BatchTable(scan)
        yield from scan.stream(length, table.add, Held(0, data))
        return _of_lists(scan, table.rows(), bounds, dense)
    count = TokenCount(scan)
    found = [np.empty((0, 3), np.int64)]

    def visit(which: Ints, messages: Ints, nodes: Ints, buffers: Ints, shape: Shape) -> None:
        found.append(messages)
        count.add(which, messages, nodes, buffers, shape)

    yield from scan.stream(length, visit, Held(0, data))
    messages = np.concatenate(found)
    tokens = None if count.nulls else count.tokens
    return Runs(scan, messages, np.arange(len(messages) + 1), bounds, None, tokens)


def _of_lists(scan: Scan, rows: Ints, bounds: Ints, dense: bool) -> Layout:
    """Runs where they fetch little in vain, or where slices would be so small that requests cost more; else slices."""
    with Guarded(scan.column.name):
        first_row = scan.column.first_rows(rows[:, ROWS])
    tokens = None if rows[:, NULLS].any() else int(rows[:, TOKENS].sum())  # a null row may hide values
    messages = rows[:, : BODY + 1]
    blocks = find_bounds(messages, first_row, bounds)
    in_runs = int((blocks[1:, STOP] - blocks[:-1, START]).sum())
    whole, needed = int(messages[:, 1:].sum()), int(stored(rows).sum())
    in_order = not blocks[-1, LAST_GAPS]
    if tokens is not None and in_order and (in_runs - whole) * WASTE <= whole and in_runs - needed <= len(rows) * SMALL:
        return Runs(scan, messages, first_row, bounds, None, tokens)
    return Slices(scan, rows, first_row, tokens, dense)
