"""Ranges: from a first byte (or token) up to a stop, and when to read neighbours together.

A request costs as much as some thousand bytes, so ranges with a small gap between them become one.
`worth_bridging` is the rule, for numbers and for arrays. `merge` applies it to a list of ranges in
any order. `join` builds the ranges of long arrays whose caller decides where to cut. `inside`
checks ranges that come from a file against its bounds.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints

WASTE = 32  # at most one in this many bytes is read without need


class Range(NamedTuple):
    """From `start` up to, but not including, `stop`."""

    start: int
    stop: int


def inside(start: Ints, length: Ints, size: int | Ints) -> bool:
    """Whether all ranges lie in something of this size, or of these sizes.

    The one way to check numbers of a file before they are used. They are compared as unsigned
    numbers, and no sum of two is formed: a negative one is too large, and nothing wraps around.

    >>> inside(np.array([0, 3]), np.array([3, 5]), 8), inside(np.array([0, 3]), np.array([3, 6]), 8)
    (True, False)
    >>> inside(np.array([1 << 62]), np.array([-(1 << 62)]), 8)
    False
    """
    whole: Any = size if isinstance(size, int) else size.view(np.uint64)
    first = start.view(np.uint64)
    return not np.count_nonzero((first > whole) | (length.view(np.uint64) > whole - first))


@overload
def worth_bridging(gap: int, useful: int) -> bool: ...
@overload
def worth_bridging(gap: Ints, useful: Ints) -> npt.NDArray[np.bool_]: ...
def worth_bridging(gap: Any, useful: Any) -> Any:
    """Whether to read a gap along with this many useful bytes, instead of making another request.

    >>> worth_bridging(100, 4000), worth_bridging(1000, 4000)
    (True, False)
    """
    return gap * WASTE <= useful


def merge(ranges: Iterable[tuple[int, int]], *, bridge: bool = False, small: int = 0) -> list[Range]:
    """The ranges in order, with those that overlap or touch as one. Empty ranges are left out.

    With `bridge`, gaps are included if it is worth to bridge all gaps of a range together. Gaps of
    up to `small` are included in any case.

    >>> merge([(7, 9), (0, 3), (3, 5)])
    [Range(start=0, stop=5), Range(start=7, stop=9)]
    >>> merge([(1000, 3000), (16, 999), (5000, 5001)], bridge=True)
    [Range(start=16, stop=3000), Range(start=5000, stop=5001)]
    """
    merged: list[Range] = []
    useful = gaps = 0
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged:
            last = merged[-1]
            gap = max(0, start - last.stop)
            if gap <= small or (bridge and worth_bridging(gaps + gap, useful + stop - start)):
                useful += max(0, stop - max(start, last.stop))
                gaps += gap
                merged[-1] = Range(last.start, max(stop, last.stop))
                continue
        merged.append(Range(start, stop))
        useful, gaps = stop - start, 0
    return merged


def join(start: Ints, stop: Ints, apart: npt.NDArray[np.bool_]) -> tuple[list[Range], Ints]:
    """Join ranges with the next ones, except where `apart` is true between two of them.

    Returns the joined ranges, and the index of the first range in each of them.

    >>> join(np.array([0, 3, 9]), np.array([3, 5, 12]), np.array([False, True]))
    ([Range(start=0, stop=5), Range(start=9, stop=12)], array([0, 2]))
    """
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    return list(map(Range, start[first].tolist(), np.maximum.reduceat(stop, first).tolist())), first
