"""A remote Arrow file: the record batches that its footer lists, and their metadata, as ranges."""

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range, join
from fmsdata.formats.arrow.column import TokenColumn
from fmsdata.formats.arrow.framing import BLOCK, Walker, listed_messages, moved, no_record_batch, require_inside
from fmsdata.formats.arrow.metadata import Metadata, Shape
from fmsdata.formats.base import Reading
from fmsdata.formats.damage import Guarded
from fmsdata.formats.fetched import Fetched

BRIDGED = 1 << 12  # bytes of a gap between the metadata of two record batches that are read along
WINDOW = 8 << 20  # bytes of the longest range
STEP = 32 << 20  # bytes requested at once
LISTED = WINDOW // BLOCK.itemsize  # entries of a footer's list that are read at once
# Called with the numbers of record batches, their nodes, their buffers (as places in the file) and
# their shape.
Visit: TypeAlias = Callable[[Ints, Ints, Ints, Shape], None]


class Scan:
    """Reads the metadata of one file's record batches, which all have the shape of the first."""

    def __init__(self, size: int, column: TokenColumn) -> None:
        self.size = size
        self.column = column
        self.metadata = Metadata()
        self.walker = Walker()
        self._shape: Shape | None = None

    def read(self, messages: Ints, which: Ints, visit: Visit, fetched: Fetched | None = None) -> Reading[None]:
        """Read the metadata of the record batches in `which`, all at once or in large steps."""
        if not len(which):
            return
        with Guarded(self.column.name):
            if (large := messages[which, 1] > WINDOW // 2).any():
                raise no_record_batch(messages[which[large][0], 0])
        fetched = Fetched() if fetched is None else fetched
        which = which[np.argsort(messages[which, 0], kind="stable")]
        start, stop = messages[which, 0] & -8, messages[which, :2].sum(axis=1)
        apart = (start[1:] - stop[:-1] > BRIDGED) | (np.diff(stop // (WINDOW // 2)) != 0)
        ranges, first = join(start, stop, apart)
        groups = np.split(which, first[1:])
        step = offsets(np.array([stop - start for start, stop in ranges]))[:-1] // STEP
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), len(ranges)]):
            data = yield from fetched.read(ranges[begin:end])
            for group, asked, part in zip(groups[begin:end], ranges[begin:end], data, strict=True):
                self.parse(messages, group, part, asked.start, visit)

    def parse(self, messages: Ints, which: Ints, data: memoryview, base: int, visit: Visit) -> None:
        """Parse metadata that was fetched. `base` is the data's first byte in the file."""
        here = moved(messages[which], -base)
        with Guarded(self.column.name):
            if self._shape is None:
                self._shape = self.metadata.shape(data, here, base)
                self.column.require(self._shape)
            nodes, buffers = self.metadata.read(data, here, self._shape, base)
            buffers[:, :, 0] += base
            visit(which, nodes, buffers, self._shape)


class FooterList:
    """The footer's list of record batches, of which parts are read when they are needed."""

    def __init__(self, scan: Scan, offset: int, count: int) -> None:
        self._scan, self._offset, self.count = scan, offset, count

    def read(self, first: int, stop: int) -> Reading[Ints]:
        """The record batches `first` to `stop - 1`."""
        parts = [np.empty((0, 3), np.int64)]
        for begin, end in pairwise([*range(first, stop, LISTED), stop]):
            (data,) = yield [Range(*(self._offset + entry * BLOCK.itemsize for entry in (begin, end)))]
            with Guarded(self._scan.column.name):
                parts.append(listed_messages(memoryview(data), end - begin))
                require_inside(parts[-1], self._scan.size)
        return np.concatenate(parts)

    def lengths(self) -> Reading[Ints]:
        """The tokens of each record batch, where each is a document."""
        column, lengths = self._scan.column, np.zeros(self.count, np.int64)

        def count(which: Ints, nodes: Ints, buffers: Ints, shape: Shape) -> None:
            if nodes[:, column.node, 1].any():
                raise column.null_tokens()
            if column.are_plain(nodes, shape).all():
                column.documents(nodes, buffers)  # raises if they are shorter than they say
            lengths[begin + which] = column.rows_of(nodes)

        for begin in range(0, self.count, LISTED):
            messages = yield from self.read(begin, min(begin + LISTED, self.count))
            yield from self._scan.read(messages, np.arange(len(messages)), count)
        return lengths
