"""The schedule of samples: which rank gets which sample in which step.

Pure arithmetic on the world sizes and batch sizes of a run. Nothing is read.
"""

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fmsdata.core.keys import Ints, offsets
from fmsdata.errors import ConfigError, StateError


class Segment(NamedTuple):
    """The world size and batch size of a run from a step on."""

    step: int
    world_size: int
    batch_size: int


def continued(history: Sequence[Segment], now: Segment) -> list[Segment]:
    """The history of a run that continues with this segment.

    >>> continued([Segment(0, 2, 8)], Segment(500, 4, 4))
    [Segment(step=0, world_size=2, batch_size=8), Segment(step=500, world_size=4, batch_size=4)]
    >>> continued([Segment(0, 2, 8)], Segment(500, 2, 8))
    [Segment(step=0, world_size=2, batch_size=8)]
    """
    past = [segment for segment in history if segment.step < now.step]
    return past if past and past[-1][1:] == now[1:] else [*past, now]


class Turns:
    """Which lane a rank serves next: the one with the fewest lines taken, ties by lane number.

    Line `n` of lane `l` is sample `n * L + l`, so this is the lowest sample that was not taken yet.
    """

    def __init__(self, lines: Mapping[int, int], lanes: int) -> None:
        self._lanes = lanes
        self._next = sorted(taken * lanes + lane for lane, taken in lines.items())

    def take(self, count: int) -> list[int]:
        """The next samples."""
        taken = []
        for _ in range(count):
            taken.append(self._next[0])
            heapq.heapreplace(self._next, self._next[0] + self._lanes)
        return taken


class Schedule:
    """Which samples are in which step of a run with this history. Steps count from 0.

    >>> schedule = Schedule([Segment(0, 2, 3)], lanes=4)
    >>> schedule.samples(0)
    [[0, 2, 4], [1, 3, 5]]
    >>> schedule.when(5)
    (0, 1, 2)
    """

    def __init__(self, history: Sequence[Segment], lanes: int) -> None:
        steps = [segment.step for segment in history]
        if steps[:1] != [0] or any(later <= earlier for earlier, later in pairwise(steps)):
            raise StateError(
                f"the history of the run is {[list(segment) for segment in history]}: it does not begin at step 0, so "
                "the run was started from another one, and the content of its steps is unknown"
            )
        if (most := max(segment.world_size for segment in history)) > lanes:
            raise ConfigError(f"world size {most} is more than the {lanes} lanes of this run")
        self._lanes = lanes
        self._history = list(history)
        self._known: dict[int, Ints] = {}
        self._before = [np.zeros(lanes, np.int64)]  # for each segment, the lines taken of each lane at its start
        for segment, following in pairwise(history):
            self._before.append(self._after(segment, self._before[-1], following.step))

    def segment(self, step: int) -> Segment:
        """The segment that a step belongs to."""
        return self._history[self._index(step)]

    def lines(self, step: int) -> Ints:
        """How many lines of each lane were taken before a step."""
        if step not in self._known:
            index = self._index(step - 1)
            self._known[step] = self._after(self._history[index], self._before[index], step)
        return self._known[step]

    def samples(self, step: int) -> list[list[int]]:
        """The samples of a step: for each rank, row by row."""
        _, world_size, batch_size = self.segment(step)
        lines = self.lines(step).tolist()
        lanes = [range(rank, self._lanes, world_size) for rank in range(world_size)]
        return [Turns({lane: lines[lane] for lane in mine}, self._lanes).take(batch_size) for mine in lanes]

    def when(self, sample: int) -> tuple[int, int, int]:
        """The step, the rank and the row in which a sample was handed out."""
        line, lane = divmod(sample, self._lanes)
        index = max(index for index, before in enumerate(self._before) if before[lane] <= line)
        begin, world_size, batch_size = self._history[index]
        lanes = np.arange(lane % world_size, self._lanes, world_size)
        earlier = np.maximum(0, line + (lanes < lane) - self._before[index][lanes]).sum()
        step, row = divmod(int(earlier), batch_size)
        return begin + step, lane % world_size, row

    def _index(self, step: int) -> int:
        return max(0, bisect_right(self._history, step, key=lambda segment: segment.step) - 1)

    def _after(self, segment: Segment, before: Ints, step: int) -> Ints:
        """The lines taken of each lane at a step, given those at the start of its segment."""
        lines = before.copy()
        for rank in range(segment.world_size):
            mine = before[rank :: segment.world_size]
            lines[rank :: segment.world_size] = _filled(mine, (step - segment.step) * segment.batch_size)
        return lines


def _filled(lines: Ints, taken: int) -> Ints:
    """The lines of a rank's lanes after `taken` more samples, each from the lane with the fewest lines."""
    order = np.argsort(lines, kind="stable")
    low = lines[order]
    until_level = low * np.arange(len(low)) - offsets(low)[:-1]  # samples until all lanes before it have as many lines
    sharing = np.sort(order[: np.searchsorted(until_level, taken, side="right")])
    level, rest = divmod(taken + int(lines[sharing].sum()), len(sharing))
    out = lines.copy()
    out[sharing] = level
    out[sharing[:rest]] += 1
    return out
