"""Blocks of a remote Arrow file that are many record batches: each is a document, or they are small.

A block is one range of the file, which is walked from message to message. What is kept of the file is where the
blocks are, not where every record batch is.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.formats.arrow.framing import BLOCK, Guarded, Shape, Truncated, listed_messages, moved, require_inside
from fmsdata.formats.arrow.scan import WINDOW, Scan
from fmsdata.formats.arrow.shard import Batches
from fmsdata.formats.base import Reading

WASTE = 32  # at most one in so many bytes is fetched without need
LISTED = WINDOW // BLOCK.itemsize  # record batches of a footer's list that are read at once
OWN = 4096  # bytes that a layout takes apart from its numbers, roughly
# What is kept of a bound. Of the block that begins there: its first record batch, that one's first byte and first
# document, and the gaps in front of it. Of the block that ends there: the record batch behind its last, where
# its last ends, and the gaps in front of that.
DOCUMENT, BEGIN, START, ROW, GAPS, END, STOP, LAST_GAPS = range(8)


class Runs:
    """Blocks that are whole record batches, one behind the other.

    `footer` is the file's list of its record batches; a stream has none.
    """

    def __init__(
        self, scan: Scan, messages: Ints, first_row: Ints, bounds: Ints, footer: "FooterList | None", tokens: int | None
    ) -> None:
        self.documents = int(first_row[-1])
        self.known_tokens: int | None = (tokens if scan.column.listed else None) if len(messages) else 0
        self._scan = scan
        self._footer = footer
        self._tokens = tokens
        self._bounds = find_bounds(messages, first_row, bounds)
        self.nbytes = OWN + self._bounds.nbytes

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        begins, ends = (self._bound(document) for document in (first, stop))
        begin, end, start, row = begins[BEGIN], ends[END], begins[START], begins[ROW]
        if self._footer is not None and begins[GAPS] != ends[LAST_GAPS]:
            return (yield from self._with_gaps(self._footer, begin, end))
        asked = Range(start & -8, ends[STOP])
        (data,) = yield [asked]
        view = memoryview(data)
        with Guarded(self._scan.column.name):
            walked = self._scan.walker.walk(view, start - asked.start, asked.start)
            if len(walked.messages) != end - begin or walked.position != len(view):
                raise Truncated(f"from byte {start} on are not the {end - begin} record batches that should be there")
        return read_batches(self._scan, asked.start, view, walked.messages, first - row, stop - row)

    def tokens(self) -> Reading[int]:
        if self._tokens is not None:
            return self._tokens
        if self._footer is None:
            raise self._scan.column.null_tokens()  # else they were counted with the documents
        return (yield from self._footer.tokens())

    def _bound(self, document: int) -> list[int]:
        found: list[int] = self._bounds[np.searchsorted(self._bounds[:-1, DOCUMENT], document)].tolist()
        if found[DOCUMENT] != document:
            raise ValueError(f"document {document} is not one of the bounds that the layout was read for")
        return found

    def _with_gaps(self, footer: "FooterList", begin: int, end: int) -> Reading[Block[Tokens]]:
        """Record batches between which something else lies, or which are in another order, as the footer lists them."""
        messages = yield from footer.read(begin, end)
        gap = messages[1:, 0] - messages[:-1].sum(axis=1)
        runs = np.split(messages, np.flatnonzero((gap < 0) | (gap * WASTE > messages[:-1, 2])) + 1)
        asked = [Range(int(run[0, 0]) & -8, int(run[-1].sum())) for run in runs]
        with Guarded(self._scan.column.name):
            if sum(stop - start for start, stop in asked) > self._scan.size:
                raise Truncated("record batches lie on top of each other")
        fetched = yield asked
        return together(
            read_batches(self._scan, one.start, memoryview(data), moved(run, -one.start), 0, len(run))
            for one, data, run in zip(asked, fetched, runs, strict=True)
        )


class FooterList:
    """The list of record batches in a footer, of which parts are read when they are needed."""

    def __init__(self, scan: Scan, place: int, count: int) -> None:
        self._scan, self._place, self.count = scan, place, count

    def read(self, first: int, stop: int) -> Reading[Ints]:
        parts = [np.empty((0, 3), np.int64)]
        for begin, end in pairwise([*range(first, stop, LISTED), stop]):
            (data,) = yield [Range(*(self._place + one * BLOCK.itemsize for one in (begin, end)))]
            with Guarded(self._scan.column.name):
                parts.append(listed_messages(memoryview(data), end - begin))
                require_inside(parts[-1], self._scan.size)
        return np.concatenate(parts)

    def tokens(self) -> Reading[int]:
        """All tokens, where each record batch is a document."""
        count = TokenCount(self._scan)
        for begin in range(0, self.count, LISTED):
            messages = yield from self.read(begin, min(begin + LISTED, self.count))
            yield from self._scan.listed(messages, count.add)
        if count.nulls:
            raise self._scan.column.null_tokens()
        return count.tokens


def find_bounds(messages: Ints, first_row: Ints, bounds: Ints) -> Ints:
    """The numbers that `Runs` keeps, a row for each bound."""
    documents, batches = int(first_row[-1]), len(messages)
    bounds = np.unique(np.concatenate([[0], bounds[(bounds >= 0) & (bounds <= documents)], [documents]]))
    if not documents:
        return np.zeros((1, 8), np.int64)
    begin = np.minimum(np.searchsorted(first_row, bounds, "right") - 1, batches - 1)
    end = np.maximum(np.searchsorted(first_row, bounds, "left"), 1)
    start, stop = messages[:, 0], messages.sum(axis=1)
    gaps = offsets(start[1:] != stop[:-1])
    columns = [bounds, begin, start[begin], first_row[begin], gaps[begin], end, stop[end - 1], gaps[end - 1]]
    return np.stack(columns, axis=1)


class TokenCount:
    """Counts the tokens of record batches that are one document each."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self.tokens = 0
        self.nulls = False

    def add(self, _: Ints, __: Ints, nodes: Ints, buffers: Ints, shape: Shape) -> None:
        column = self._scan.column
        self.nulls |= bool(nodes[:, column.node, 1].any())
        if column.are_plain(nodes, shape).all():
            column.documents(nodes, buffers)  # raises if they are shorter than they say
        self.tokens += int(nodes[:, column.node, 0].sum())


def read_batches(
    scan: Scan, base: int, data: memoryview, messages: Ints, first: int, stop: int, documents: int | None = None
) -> Block[Tokens]:
    """Documents of record batches that were fetched, and must have so many. `base` is where the data begins."""
    batches = Batches(scan.column, scan.metadata, pa.py_buffer(data), messages, base)
    with Guarded(scan.column.name):
        if documents not in (None, batches.documents):
            raise Truncated(f"it has {batches.documents} documents where there should be {documents}")
        if batches.documents < stop:
            raise Truncated("record batches have fewer rows than they had")
    block = batches.read(first, stop)
    return block._replace(offsets=[base if tokens is batches.whole else None for tokens in block.arrays])


def together(blocks: Iterable[Block[Tokens]]) -> Block[Tokens]:
    """One block with all documents of several, in which no array is listed twice."""
    some = list(blocks)
    if len(some) == 1:
        return some[0]
    pieces = {id(one): (one, where) for block in some for one, where in zip(block.arrays, block.offsets, strict=True)}
    place = {key: i for i, key in enumerate(pieces)}
    return Block(
        [one for one, _ in pieces.values()],
        np.concatenate([np.array([place[id(one)] for one in block.arrays]).take(block.array) for block in some]),
        np.concatenate([block.start for block in some]),
        np.concatenate([block.length for block in some]),
        [where for _, where in pieces.values()],
    )
