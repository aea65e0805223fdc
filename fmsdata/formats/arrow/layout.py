"""How the layout of a remote Arrow file is found.

The last bytes of a file say where its record batches are. Where each is a document, nothing else is
needed; where their rows are documents, their metadata says how many they have. In a run on a
thousand ranks, each rank reads one or two blocks of a file. So where the footer is long, or there
are many record batches, only the parts that a block needs are read, with that block.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.core.ranges import Range, worth_bridging
from fmsdata.errors import DataError
from fmsdata.formats.arrow.column import TokenColumn
from fmsdata.formats.arrow.flatbuffers import Table
from fmsdata.formats.arrow.framing import (
    BLOCK,
    MAGIC,
    NOT_WHOLE,
    PREFIX,
    footer_size,
    footer_too_large,
    not_arrow,
    read_footer,
    require_inside,
    require_stream,
)
from fmsdata.formats.arrow.runs import LAST_GAPS, START, STOP, Runs, find_bounds
from fmsdata.formats.arrow.scan import WINDOW, FooterList, Scan
from fmsdata.formats.arrow.slices import NULLS, ROWS, SMALL, TOKENS, BatchTable, Slices
from fmsdata.formats.base import Layout, Reading
from fmsdata.formats.damage import Guarded, Truncated
from fmsdata.formats.fetched import Fetched, Known, PartlyKnown, reuse

TAIL = 1 << 14  # bytes at the end of a file that are read first
HEAD = 1 << 12  # bytes at the start of a file that are read for its schema
ROOT = 1 << 9  # bytes at the start of a footer that say where its parts are
FEW = 8  # record batches whose metadata is always read with the layout


def read_arrow_layout(
    name: str, size: int, column: str | None, bounds: Sequence[int], dense: bool = False
) -> Reading[Layout]:
    """The layout of an Arrow file of `size` bytes, see `fmsdata.formats.read_layout`."""
    if size <= 0:
        _refuse_stream(name, memoryview(b""))
    tail = Range(max(0, size - TAIL) & -8, size)
    fetched = Fetched()
    known: list[Known] = []  # what was fetched besides
    fetched.add([tail], (yield [tail]))
    data = fetched.get(tail)
    if size < 18 or data[-len(MAGIC) :] != MAGIC:
        (head,) = yield from fetched.read([Range(0, min(PREFIX, size))])
        _refuse_stream(name, head)
    with Guarded(name, NOT_WHOLE):
        length = footer_size(data, size)
        if length > max(size // 2, WINDOW):  # record batches are longer than their entries in the footer
            raise footer_too_large(length)
    if length > len(data):
        if not (dense and worth_bridging(length, size)):
            known.append((tail.start, data))
            documents = yield from reuse(_read_documents(name, size, column, length, known), known)
            if documents is not None:
                return PartlyKnown(documents, known)
        tail = Range(size - length & -8, size)
        (more,) = yield from reuse(fetched.read([Range(tail.start, size - len(data))]), known)
        data = memoryview(b"".join([more, data]))
        fetched = Fetched()
        fetched.add([tail], [data])
    with Guarded(name, NOT_WHOLE):
        footer = data[len(data) - length :]
        messages, place = read_footer(footer)
        require_inside(messages, size)
        schema = pa.ipc.open_file(pa.py_buffer(b"".join([MAGIC, b"\0\0", footer]))).schema
    scan = Scan(size, TokenColumn(schema, column, name))
    footer_list = FooterList(scan, size - length + place, len(messages))
    needed = np.array(bounds, np.int64)
    known = [*(part for part in known if part[0] == 0), (tail.start, data[: len(data) - length])]
    layout: Layout
    if scan.column.listed:
        batches = BatchTable(scan, messages)
        reading = _read_lists(scan, footer_list, batches, needed, dense=dense, fetched=fetched)
        layout = yield from reuse(reading, known)
    else:
        table = find_bounds(messages, np.arange(len(messages) + 1), needed)
        layout = Runs(scan, footer_list, len(messages), None if len(messages) else 0, table)
    return PartlyKnown(layout, known)


def refuse_remote_stream(name: str, data: pa.Buffer) -> None:
    """Raise if a file that was fetched whole is one that can't be read by ranges."""
    _refuse_stream(name, memoryview(data)[:PREFIX])


def _refuse_stream(name: str, head: memoryview) -> None:
    """Raise if a remote file does not start as an Arrow file: it is damaged, or a stream."""
    if head[: len(MAGIC)] == MAGIC:
        return
    with Guarded(name, NOT_WHOLE):
        require_stream(head)
    raise DataError(
        f"{name}: this is an Arrow stream, which has no index, so it can only be read from a local disk; rewrite it "
        "in the Arrow file format (with `fmsdata.prepare.write_shard`, or with `pyarrow.ipc.new_file` instead of "
        "`new_stream`), or copy the corpus to a local disk"
    )


def _read_documents(
    name: str, size: int, column: str | None, footer: int, known: list[Known]
) -> Reading[Layout | None]:
    """The layout of a file whose record batches are documents, without reading its long footer.

    None if it is another kind of file. `footer` is the number of bytes from the footer to the end.
    What was fetched besides is added to `known`.
    """
    begin = size - footer
    root, head = yield [Range(begin, min(begin + ROOT, size)), Range(0, min(size, HEAD))]
    with Guarded(name, NOT_WHOLE):
        if bytes(head[: len(MAGIC)]) != MAGIC:
            raise not_arrow()
        place, count = Table.root(memoryview(root), 0).vector(3)
        if not 0 < place <= footer - count * BLOCK.itemsize:
            raise Truncated("its footer is damaged")
        schema_size = PREFIX + int(np.frombuffer(head[12:16], "<i4")[0])
        if not PREFIX < schema_size <= size - 8:
            raise Truncated("its schema is missing")
    if 8 + schema_size > len(head):
        (head,) = yield [Range(0, 8 + schema_size)]
    with Guarded(name, NOT_WHOLE):
        known += (0, head), (begin, root)
        schema = pa.ipc.read_schema(pa.py_buffer(bytes(head[8 : 8 + schema_size])))
    scan = Scan(size, TokenColumn(schema, column, name))
    return None if scan.column.listed else Runs(scan, FooterList(scan, begin + place, count), count)


def _read_lists(
    scan: Scan, footer: FooterList, table: BatchTable, bounds: Ints, *, dense: bool, fetched: Fetched
) -> Reading[Layout]:
    """The layout of a file whose rows are documents."""
    batches = footer.count
    regular = FEW < batches < 2 * len(bounds) and (yield from table.guess_rows(int(bounds[-1]), fetched))
    if not regular:
        yield from table.read_all(fetched)
    with Guarded(scan.column.name):
        first_row = scan.column.first_rows(table.rows[:, ROWS])
    if regular:
        return Slices(table, first_row, None, dense=dense)
    tokens = None if table.rows[:, NULLS].any() else int(table.rows[:, TOKENS].sum())  # a null row may hide values
    # Whole record batches, if they are so small that the requests for slices would cost more than
    # the bytes that are fetched without need.
    blocks = find_bounds(table.messages, first_row, bounds)
    in_runs = int((blocks[1:, STOP] - blocks[:-1, START]).sum())
    whole, in_order = int(table.messages[:, 1:].sum()), not blocks[-1, LAST_GAPS]
    small = in_runs - table.stored() <= batches * SMALL
    if tokens is not None and in_order and small and worth_bridging(in_runs - whole, whole):
        runs = Runs(scan, footer, int(first_row[-1]), tokens, blocks)
        if not len(bounds):  # it is counted, and no block is read: else a layout is kept, and must be small
            runs.blocks = table.rows[:, ROWS], table.rows[:, TOKENS]
        return runs
    return Slices(table, first_row, tokens, dense=dense)
