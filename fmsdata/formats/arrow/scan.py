"""The metadata of a remote Arrow file's record batches, read as ranges.

A footer tells where every record batch is, so their metadata is asked for at once. A stream has none and is walked
from message to message, in windows: large ones where messages are small, small ones where bodies can be jumped over.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range
from fmsdata.formats.arrow.column import TokenColumn
from fmsdata.formats.arrow.framing import NO_END, NOT_WHOLE, PREFIX, Guarded, Metadata, Shape, Truncated, Walker, moved
from fmsdata.formats.base import Reading

SMALL = 1 << 16  # bytes that are worth less than another request
BRIDGED = 1 << 12  # bytes between what is read of a file that are read along
WINDOW = 8 << 20  # no range of a scan is longer
STEP = 32 << 20  # bytes asked for at once
JUMP = 1 << 20  # bytes that are worth more than waiting for another request
# Is given which record batches these are, where they lie, their nodes, their buffers (places in the file) and shape.
Visit: TypeAlias = Callable[[Ints, Ints, Ints, Ints, Shape], None]


class Held(NamedTuple):
    """Bytes of the file that are there already."""

    base: int = 0
    data: memoryview = memoryview(b"")

    def read(self, ranges: list[Range]) -> Reading[list[memoryview]]:
        """Like asking for these ranges, but only for what is not there."""
        behind = self.base + len(self.data)
        missing = [one for one in ranges if one.start < self.base or one.stop > behind]
        fetched = iter((yield missing) if missing else [])
        return [
            memoryview(next(fetched))
            if start < self.base or stop > behind
            else self.data[start - self.base :][: stop - start]
            for start, stop in ranges
        ]


NOTHING = Held()


class Scan:
    """Reads the metadata of one file's record batches, which all have the shape of the first."""

    def __init__(self, size: int, column: TokenColumn) -> None:
        self.size = size
        self.column = column
        self.metadata = Metadata()
        self.walker = Walker()
        self._shape: Shape | None = None

    def listed(self, messages: Ints, visit: Visit, held: Held = NOTHING) -> Reading[None]:
        """Visit record batches whose places are known."""
        if not len(messages):
            return
        with Guarded(self.column.name):
            if (large := messages[:, 1] > WINDOW // 2).any():
                raise Truncated(f"no record batch at byte {messages[large][0, 0]}")
        order = np.argsort(messages[:, 0], kind="stable")
        start, stop = messages[order, 0] & -8, messages[order, :2].sum(axis=1)
        apart = (start[1:] - stop[:-1] > BRIDGED) | (stop[1:] // (WINDOW // 2) != stop[:-1] // (WINDOW // 2))
        first = np.concatenate([[0], np.flatnonzero(apart) + 1])
        starts, stops = start[first], np.maximum.reduceat(stop, first)
        ranges = list(map(Range, starts.tolist(), stops.tolist()))
        groups = np.split(order, first[1:])
        step = offsets(stops - starts)[:-1] // STEP
        for some in np.split(np.arange(len(ranges)), np.flatnonzero(np.diff(step)) + 1):
            begin, end = int(some[0]), int(some[-1]) + 1
            fetched = yield from held.read(ranges[begin:end])
            for which, asked, data in zip(groups[begin:end], ranges[begin:end], fetched, strict=True):
                self._visit(which, data, asked.start, moved(messages[which], -asked.start), visit)

    def stream(self, position: int, visit: Visit, held: Held) -> Reading[None]:
        """Visit all record batches of a stream from a message on, of which some bytes are there."""
        count, window = 0, SMALL
        base, data = held
        while True:
            with Guarded(self.column.name, NOT_WHOLE):
                walked = self.walker.walk(data, position - base, base)
                behind = base + walked.position
                if not walked.ended and (
                    behind + PREFIX > self.size or (behind == position and base + len(data) == self.size)
                ):
                    raise Truncated(NO_END)
                if behind == position and not walked.ended and window == WINDOW:
                    raise Truncated(f"no message at byte {position}")
            self._visit(np.arange(count, count + len(walked.messages)), data, base, walked.messages, visit)
            if walked.ended:
                return
            count += len(walked.messages)
            window = SMALL if behind - base - len(data) >= JUMP else min(2 * window, WINDOW)
            position, base = behind, behind & -8
            (data,) = yield from held.read([Range(base, min(base + window, self.size))])

    def _visit(self, which: Ints, data: memoryview, base: int, messages: Ints, visit: Visit) -> None:
        if not len(messages):
            return
        with Guarded(self.column.name):
            if self._shape is None:
                self._shape = self.metadata.shape(data, messages, base)
                self.column.require(self._shape)
            nodes, buffers = self.metadata.read(data, messages, self._shape, base)
            buffers[:, :, 0] += base
            visit(which, moved(messages, base), nodes, buffers, self._shape)
