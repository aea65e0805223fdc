"""The schedule of samples: which rank gets which sample in which step.

Pure arithmetic on the world sizes and batch sizes of a run. Nothing is read.
"""

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError, StateError

NO_LIMIT = 1 << 61  # lines of a lane that never ends


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
    With `limits`, the number of lines that each lane has, lanes that have ended are skipped.
    """

    def __init__(self, lines: Mapping[int, int], lanes: int, limits: Ints | None = None) -> None:
        self._lanes = lanes
        self._limits = None if limits is None else limits.tolist()
        going = lines.keys() if limits is None else [lane for lane in lines if lines[lane] < limits[lane]]
        self._next = sorted(lines[lane] * lanes + lane for lane in going)
        # Whether no lane is a line ahead of another: then all lanes are served in turn, round after round.
        self._in_rounds = limits is None and bool(self._next) and self._next[-1] - self._next[0] < lanes
        self._taken = 0  # samples of this round

    def take(self, count: int) -> list[int]:
        """The next samples; fewer when all lanes have ended."""
        limits, lanes, following = self._limits, self._lanes, self._next
        taken: list[int] = []
        if self._in_rounds:
            while True:
                first, self._taken = self._taken, self._taken + count - len(taken)
                taken += following[first : self._taken]
                if self._taken < len(following):
                    return taken
                self._taken, following[:] = 0, [sample + lanes for sample in following]
        if limits is None:
            return [heapq.heapreplace(following, following[0] + lanes) for _ in range(count if following else 0)]
        while len(taken) < count and following:
            sample = following[0]
            taken.append(sample)
            if sample // lanes + 1 >= limits[sample % lanes]:
                heapq.heappop(following)
            else:
                heapq.heapreplace(following, sample + lanes)
        return taken


class Schedule:
    """Which samples are in which step of a run with this history. Steps count from 0.

    `limits` are the numbers of lines that the lanes of a finite pass have.

    >>> schedule = Schedule([Segment(0, 2, 3)], lanes=4)
    >>> schedule.samples(0)
    [[0, 2, 4], [1, 3, 5]]
    >>> schedule.when(5)
    (0, 1, 2)
    """

    def __init__(self, history: Sequence[Segment], lanes: int, limits: Ints | None = None) -> None:
        steps = [segment.step for segment in history]
        if steps[:1] != [0] or any(later <= earlier for earlier, later in pairwise(steps)):
            raise StateError(
                f"the history of the run is {[list(segment) for segment in history]}: it does not begin at step 0, so "
                "the run was started from another one, and the content of its steps is unknown"
            )
        if (most := max(segment.world_size for segment in history)) > lanes:
            raise ConfigError(f"world size {most} is more than the {counted(lanes, 'lane')} of this run")
        self._lanes = lanes
        self._limits = np.full(lanes, NO_LIMIT) if limits is None else limits
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
        return [
            Turns({lane: lines[lane] for lane in mine}, self._lanes, self._limits).take(batch_size) for mine in lanes
        ]

    def end(self, now: Segment) -> int:
        """The step at which a finite pass ends if it goes on like this: when no rank has a line left."""
        left = self._limits - self.lines(now.step)
        ranks = [int(left[rank :: now.world_size].sum()) for rank in range(now.world_size)]
        return now.step - (-max(ranks) // now.batch_size)

    def when(self, sample: int) -> tuple[int, int, int]:
        """The step, the rank and the row in which a sample was handed out."""
        line, lane = divmod(sample, self._lanes)
        index = max(index for index, before in enumerate(self._before) if before[lane] <= line)
        begin, world_size, batch_size = self._history[index]
        lanes = np.arange(lane % world_size, self._lanes, world_size)
        before = self._before[index][lanes]
        earlier = (np.clip(line + (lanes < lane), before, self._limits[lanes]) - before).sum()
        step, row = divmod(int(earlier), batch_size)
        return begin + step, lane % world_size, row

    def _index(self, step: int) -> int:
        return max(0, bisect_right(self._history, step, key=lambda segment: segment.step) - 1)

    def _after(self, segment: Segment, before: Ints, step: int) -> Ints:
        """The lines taken of each lane at a step, given those at the start of its segment."""
        lines = before.copy()
        for rank in range(segment.world_size):
            mine, limits = before[rank :: segment.world_size], self._limits[rank :: segment.world_size]
            lines[rank :: segment.world_size] = after_samples(mine, limits, (step - segment.step) * segment.batch_size)
        return lines


def after_samples(lines: Ints, limits: Ints, taken: int) -> Ints:
    """The lines taken of some lanes after `taken` more samples, each from the lane with the fewest lines.

    A lane with as many lines as its limit has ended.

    >>> after_samples(np.array([0, 0, 0]), np.array([4, 1, 4]), 6).tolist()
    [3, 1, 2]
    """
    lanes, place = len(lines), np.arange(len(lines))

    def before(sample: int) -> Ints:
        """The lines of each lane before a sample: line `n` of the lane at place `p` is sample `n * lanes + p`."""
        counts: Ints = np.clip(-((place - sample) // lanes), lines, limits)
        return counts

    total = int(lines.sum()) + taken
    low, high = 0, lanes * (int(lines.max(initial=0)) + taken)  # no lane is further than that
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if before(middle).sum() >= total else (middle + 1, high)
    return before(low)
