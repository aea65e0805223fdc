"""Blocks of a remote Arrow file that are whole record batches: documents, or small ones of lists.

Where the record batches of a block directly follow each other, the block is one range of the file,
and is walked from message to message: the layout keeps the places of the blocks, not of every
record batch. Where there are gaps between them, or the list of all record batches is longer than a
block, the block's part of that list is read first.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range, join, worth_bridging
from fmsdata.core.tokens import Tokens
from fmsdata.formats.arrow.framing import moved
from fmsdata.formats.arrow.scan import FooterList, Scan
from fmsdata.formats.arrow.shard import Batches
from fmsdata.formats.base import Blocks, InMemory, Reading
from fmsdata.formats.damage import Guarded, Truncated

OWN = 4096  # bytes that a layout takes besides its numbers, roughly
# The columns of a table of bounds. For the block that begins there: its first record batch, the
# first byte and the first document of that, and the number of gaps before it. For the block that
# ends there: the record batch after its last, the end of its last, and the number of gaps before
# its last.
DOCUMENT, BEGIN, START, ROW, GAPS, END, STOP, LAST_GAPS = range(8)


class Runs:
    """Blocks that are whole record batches.

    `footer` lists the record batches. `bounds` is a table that `find_bounds` made; without it, or
    where there are gaps, each record batch must be a document. `tokens` is the number of tokens, if
    known.
    """

    text = False

    def __init__(
        self, scan: Scan, footer: FooterList, documents: int, tokens: int | None = None, bounds: Ints | None = None
    ) -> None:
        self.documents, self.known_tokens = documents, tokens
        self.nbytes = OWN + (0 if bounds is None else bounds.nbytes)
        self._scan, self._footer, self._bounds = scan, footer, bounds
        self.blocks: Blocks | None = None

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        if self._bounds is None:
            return (yield from self._from_list(first, stop))
        begins, ends = (_row(self._bounds, document) for document in (first, stop))
        if begins[GAPS] != ends[LAST_GAPS]:
            return (yield from self._from_list(begins[BEGIN], ends[END]))
        count, start, row = ends[END] - begins[BEGIN], begins[START], begins[ROW]
        asked = Range(start & -8, ends[STOP])
        (data,) = yield [asked]
        view = memoryview(data)
        with Guarded(self._scan.column.name):
            walked = self._scan.walker.walk(view, start - asked.start, asked.start)
            if len(walked.messages) != count or walked.position != len(view):
                raise Truncated(f"expected {count} record batches from byte {start} on, got {len(walked.messages)}")
        return read_batches(self._scan, asked.start, view, walked.messages, first=first - row, stop=stop - row)

    def tokens(self) -> Reading[int]:
        if self.known_tokens is not None:
            return self.known_tokens
        lengths = yield from self._footer.lengths()
        self.blocks = np.ones(len(lengths), np.int64), lengths
        return int(lengths.sum())

    def _from_list(self, begin: int, end: int) -> Reading[Block[Tokens]]:
        """The documents of record batches that may have gaps between them or be in any order."""
        messages = yield from self._footer.read(begin, end)
        start, stop = messages[:, 0], messages.sum(axis=1)
        gap = start[1:] - stop[:-1]
        ranges, first = join(start & -8, stop, (gap < 0) | ~worth_bridging(gap, messages[:-1, 2]))
        with Guarded(self._scan.column.name):
            if sum(stop - start for start, stop in ranges) > self._scan.size:
                raise Truncated("record batches overlap")
        fetched = yield ranges
        runs = [messages[begin:end] for begin, end in pairwise([*first.tolist(), len(messages)])]
        return concatenate(
            read_batches(self._scan, asked.start, memoryview(data), moved(run, -asked.start), first=0, stop=len(run))
            for asked, data, run in zip(ranges, fetched, runs, strict=True)
        )


def _row(bounds: Ints, document: int) -> list[int]:
    found: list[int] = bounds[np.searchsorted(bounds[:-1, DOCUMENT], document)].tolist()
    if found[DOCUMENT] != document:
        raise ValueError(f"document {document} is not one of the bounds that the layout was read for")
    return found


def find_bounds(messages: Ints, first_row: Ints, bounds: Ints) -> Ints:
    """A table with a row for each bound, and for the first and the last document."""
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


def read_batches(scan: Scan, base: int, data: memoryview, messages: Ints, *, first: int, stop: int) -> Block[Tokens]:
    """Documents of fetched record batches. `base` is the data's first byte in the file."""
    batches = Batches(scan.column, scan.metadata, InMemory(pa.py_buffer(data)), messages, base)
    with Guarded(scan.column.name):
        if batches.documents < stop:
            raise Truncated("record batches have fewer rows than before")
    block = batches.read(first, stop)
    return block._replace(offsets=[base if tokens is batches.whole else None for tokens in block.arrays])


def concatenate(blocks: Iterable[Block[Tokens]]) -> Block[Tokens]:
    """One block with all documents of several, in which no array is listed twice."""
    parts = list(blocks)
    if len(parts) == 1:
        return parts[0]
    arrays = {
        id(array): (array, offset) for part in parts for array, offset in zip(part.arrays, part.offsets, strict=True)
    }
    index = {key: i for i, key in enumerate(arrays)}
    return Block(
        [array for array, _ in arrays.values()],
        np.concatenate([np.array([index[id(array)] for array in part.arrays]).take(part.array) for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.length for part in parts]),
        [offset for _, offset in arrays.values()],
    )
