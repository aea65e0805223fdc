"""Ranges of a remote file that were fetched, so that nothing is requested twice."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.formats.base import Data, Read, Reading
from fmsdata.formats.damage import Truncated


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
