"""Which line each piece of a document goes into: best fit, the longest first.

Only lengths matter here. Pieces of equal length are placed together, so the work grows with the
number of different lengths and of lines, and each placement is a binary search.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heapreplace
from typing import TypeAlias

import numpy as np

from fmsdata.core.keys import Ints

LINE_BITS = 40  # a room and the number of its line are one integer, so that a list of them sorts by room
LINE_MASK = (1 << LINE_BITS) - 1


def best_fit(lengths: Ints, size: int, most: int | None = None) -> Ints:
    """The line of each piece, where lines hold `size` tokens and at most `most` pieces.

    The longest piece is placed first. Each goes into the line with the least room that it fits in, or
    into a new line.

    >>> best_fit(np.array([3, 6, 5, 7]), 10).tolist()
    [0, 1, 2, 0]
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    # No two pieces that are longer than half a line go together: each begins a line.
    lines = int(np.searchsorted(-descending, -(size // 2)))
    into = list(range(lines))  # lines, in the order in which pieces are placed,
    times = [1] * lines  # and how many pieces are placed at once
    placed = [1] * lines  # pieces in each line, if there is a limit
    left = size - descending[:lines]
    rooms: list[int] = []  # of the lines that are neither full nor at their limit, sorted
    if most != 1:
        rooms = (left << LINE_BITS | np.arange(lines))[left > 0].tolist()
    for length, count in _counted(descending[lines:]):
        need = length << LINE_BITS
        while count:
            at = bisect_left(rooms, need)
            if at < len(rooms):
                room = rooms.pop(at)
            else:
                room = size << LINE_BITS | lines
                lines += 1
                placed.append(0)
            line = room & LINE_MASK
            # What is left of this room is again the least that the next piece of this length fits in.
            now = min(count, room // need) if count > 1 else 1
            if most is not None:
                now = min(now, most - placed[line])
                placed[line] += now
            into.append(line)
            times.append(now)
            count -= now
            room -= now * need
            if room > LINE_MASK and (most is None or placed[line] < most):
                insort(rooms, room)
    line_of = np.empty(len(lengths), np.int64)
    line_of[order] = np.repeat(np.array(into, np.int64), times)
    return line_of


def overfill(lengths: Ints, size: int) -> Ints:
    """The line of each piece, where every line gets at least `size` tokens, and few more.

    Into each line goes the longest piece that fits, again and again. It ends with the piece that
    exceeds it the least. Pieces that are too few for a line of their own go where the longest piece
    can be shortened by their length. All pieces together must be long enough for one line.

    >>> overfill(np.array([3, 6, 5, 7, 2]), 10).tolist()
    [0, 1, 1, 0, 0]
    """
    full = int((lengths == size).sum())
    pool = _Pool(lengths[lengths < size])
    lines: list[_Line] = [[(size, 1)] for _ in range(full)]
    slack = [-size] * full  # of each line, negative: how much its longest piece can be shortened
    while pool.lengths:
        line, excess = _overfilled_line(pool, size)
        if excess < 0:
            _spread(lines, line, slack)
            break
        lines.append(line)
        slack.append(excess - max(line[0][0], line[-1][0]))
    # Pieces of equal length are interchangeable: the first of them goes into the first line.
    entries = np.array([(length, i, count) for i, line in enumerate(lines) for length, count in line], np.int64)
    entries = entries[np.argsort(entries[:, 0], kind="stable")]
    line_of = np.empty(len(lengths), np.int64)
    line_of[np.argsort(lengths, kind="stable")] = np.repeat(entries[:, 1], entries[:, 2])
    return line_of


_Line: TypeAlias = list[tuple[int, int]]  # lengths, and the number of pieces of each


class _Pool:
    """Pieces that are not placed yet, by length."""

    def __init__(self, lengths: Ints) -> None:
        self.counts = dict(_counted(np.sort(lengths)))
        self.lengths = list(self.counts)  # sorted

    def take(self, length: int, count: int) -> None:
        self.counts[length] -= count
        if not self.counts[length]:
            del self.lengths[bisect_left(self.lengths, length)]

    def put_back(self, length: int, count: int) -> None:
        if not self.counts[length]:
            insort(self.lengths, length)
        self.counts[length] += count


def _overfilled_line(pool: _Pool, size: int) -> tuple[_Line, int]:
    """The next line of `overfill`, and how many tokens it has too many: below 0 if the pool runs out."""
    line: _Line = []
    room = excess = size
    kept, last = 0, 0  # the line with the least excess is this many entries of `line`, and a last piece
    while room and excess and pool.lengths:
        at = bisect_left(pool.lengths, room)
        if at < len(pool.lengths) and pool.lengths[at] - room <= excess:
            last = pool.lengths[at]
            kept, excess = len(line), last - room
        if at == 0 or not excess:
            break
        length = pool.lengths[at - 1]
        count = min(pool.counts[length], room // length)
        pool.take(length, count)
        line.append((length, count))
        room -= count * length
    if not room or not last:
        return line, -room
    for length, count in line[kept:]:
        pool.put_back(length, count)
    pool.take(last, 1)
    return [*line[:kept], (last, 1)], excess


def _spread(lines: list[_Line], pieces: _Line, slack: list[int]) -> None:
    """Add pieces to lines, each where the longest piece can be shortened most."""
    heap = [(room, i) for i, room in enumerate(slack)]
    heapify(heap)
    for length, count in pieces:
        for _ in range(count):
            room, i = heap[0]
            lines[i].append((length, 1))
            heapreplace(heap, (room + length, i))


def _counted(lengths: Ints) -> Iterator[tuple[int, int]]:
    """The different lengths in a sorted array, and how often each is there."""
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    return zip(lengths[starts].tolist(), np.diff(starts, append=len(lengths)).tolist(), strict=True)
