"""Ranges of a remote file that were fetched, so that nothing is requested twice."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.formats.base import Blocks, Data, Layout, Read, Reading
from fmsdata.formats.damage import Truncated

Known: TypeAlias = tuple[int, Data]  # the first byte and the bytes


class Fetched:
    """Bytes of a file, by range.

    >>> fetched = Fetched()
    >>> fetched.add([Range(10, 14)], [b"abcd"])
    >>> bytes(fetched.get(Range(11, 13)))
    b'bc'
    """

    def __init__(self) -> None:
        self._steps: list[tuple[list[int], list[memoryview]]] = []
        self._arrays: dict[tuple[int, int], Tokens] = {}

    def add(self, ranges: Sequence[Range], data: Sequence[Data]) -> None:
        """Add ranges that are in order and do not overlap."""
        self._steps.append(([start for start, _ in ranges], [memoryview(each) for each in data]))

    def missing(self, ranges: Sequence[Range]) -> list[Range]:
        """Those of the ranges that were not fetched yet."""
        return [each for each in ranges if self._find(each) is None] if self._steps else list(ranges)

    def read(self, ranges: Sequence[Range]) -> Reading[list[memoryview]]:
        """The bytes of these ranges. Missing ranges are requested, and not added."""
        missing = self.missing(ranges)
        new = dict(zip(missing, (yield missing), strict=True)) if missing else {}
        return [memoryview(new[each]) if each in new else self.get(each) for each in ranges]

    def get(self, part: Range) -> memoryview:
        step, index = self._require(part)
        starts, data = self._steps[step]
        return data[index][part.start - starts[index] : part.stop - starts[index]]

    def array(self, part: Range, dtype: np.dtype[Any]) -> tuple[Tokens, int]:
        """The whole range that a part is in, as one array, and its first byte in the file."""
        step, index = found = self._require(part)
        starts, data = self._steps[step]
        if found not in self._arrays:
            self._arrays[found] = np.frombuffer(data[index], dtype, len(data[index]) // dtype.itemsize)
        return self._arrays[found], starts[index]

    def _require(self, part: Range) -> tuple[int, int]:
        found = self._find(part)
        if found is None:
            raise Truncated(f"bytes {part.start} to {part.stop} are missing")
        return found

    def _find(self, part: Range) -> tuple[int, int] | None:
        for step, (starts, data) in enumerate(self._steps):
            index = bisect_right(starts, part.start) - 1
            if index >= 0 and part.stop - starts[index] <= len(data[index]):
                return step, index
        return None


def reuse(reading: Reading[Read], parts: Sequence[Known]) -> Reading[Read]:
    """The same reading, without requests for bytes that are known, at either end of a range."""
    for first, data in parts:
        reading = _reuse(reading, first, memoryview(data))
    return reading


def _reuse(reading: Reading[Read], first: int, data: memoryview) -> Reading[Read]:
    end = first + len(data)
    try:
        ranges = next(reading)
        while True:
            asked = [_unknown(start, stop, first, end) for start, stop in ranges]
            missing = [each for each in asked if each.start < each.stop]
            found = iter((yield missing) if missing else [])
            answers: list[Data] = []
            for (start, stop), (low, high) in zip(ranges, asked, strict=True):
                if (low, high) == (start, stop):
                    answers.append(next(found) if start < stop else b"")
                elif low < high:
                    before, behind = (
                        data[max(0, start - first) : max(0, low - first)],
                        data[high - first : stop - first],
                    )
                    answers.append(b"".join([before, next(found), behind]))
                else:
                    answers.append(data[start - first : stop - first])
            ranges = reading.send(answers)
    except StopIteration as done:
        result: Read = done.value
        return result


def _unknown(start: int, stop: int, first: int, end: int) -> Range:
    """The part of a range that is not between two places. All of it, if it would be in two parts."""
    if first <= start < end:
        return Range(min(stop, end), stop)
    return Range(start, first if start < first < stop <= end else stop)


class PartlyKnown:
    """A layout that was fetched with other bytes of its file, which blocks don't fetch again.

    `forget` gives up these bytes.
    """

    def __init__(self, layout: Layout, parts: Sequence[Known]) -> None:
        self.text, self.documents, self.known_tokens = layout.text, layout.documents, layout.known_tokens
        self.nbytes = layout.nbytes
        self._layout = layout
        # Copies, which keep nothing else in memory.
        self._parts: list[Known] = [(first, bytes(data)) for first, data in parts if data]

    @property
    def known(self) -> int:
        """Bytes."""
        return sum(len(data) for _, data in self._parts)

    @property
    def blocks(self) -> Blocks | None:
        return self._layout.blocks

    def forget(self) -> None:
        self._parts = []

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        return (yield from reuse(self._layout.block(first, stop), self._parts))

    def tokens(self) -> Reading[int]:
        return (yield from reuse(self._layout.tokens(), self._parts))


def in_parts(reading: Reading[Read], most: int) -> Reading[Read]:
    """The same reading, but no range that it asks for is longer than `most` bytes."""
    try:
        ranges = next(reading)
        while True:
            parts = [[Range(at, min(at + most, stop)) for at in range(start, stop, most)] for start, stop in ranges]
            fetched = iter((yield [part for cut in parts for part in cut]))
            ranges = reading.send([b"".join(next(fetched) for _ in cut) for cut in parts])
    except StopIteration as done:
        result: Read = done.value
        return result
