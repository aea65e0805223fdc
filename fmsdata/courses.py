"""Courses: which blocks of a source a lane reads, one after the other, and when it will need the next."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fmsdata.fetch import Priority, Urgency
from fmsdata.readers.ranges import FetchedBlock
from fmsdata.remote_source import Address, RemoteSource

LOOKAHEAD = 1 / 64  # of an epoch


@dataclass(eq=False)
class Clock:
    """How many tokens a lane has read, more or less: when the last block that it began was due."""

    time: float = 0.0


@dataclass(eq=False)
class Pace:
    """Which part of what a lane reads is of one source. The mixtures above it know."""

    share: float = 1.0
    within: "Pace | None" = None

    @property
    def of_lane(self) -> float:
        return self.share * (1.0 if self.within is None else self.within.of_lane)


class Turn(NamedTuple):
    """Lanes read so many tokens at once, one lane after the other; and so many of a source in an epoch."""

    lane: int
    burst: int
    lap: float


class Step(NamedTuple):
    """A place of a course."""

    address: Address
    tokens: float  # about how many it has


@dataclass(eq=False)
class Ahead:
    """A block that is fetched, or being fetched, for a course."""

    step: Step
    bytes: int
    urgency: Urgency
    future: "Future[FetchedBlock]"
    wanted: bool = True  # it was neither read nor given up


class Course:
    """The blocks that a lane reads of a source, one after the other."""

    def __init__(
        self,
        find: Callable[[], RemoteSource],
        step: Callable[[int], Step | None],
        clock: Clock,
        pace: Pace,
        turn: Turn,
    ) -> None:
        self._find, self._step, self._turn = find, step, turn
        self._clock, self._pace = clock, pace
        self.ahead: dict[int, Ahead] = {}
        self.version = 0  # of what is told below
        self.due = math.inf  # when the next block, behind those that are fetched, is needed

    @cached_property
    def source(self) -> RemoteSource:
        """Not before it is read: whoever opens lanes need not be who reads them."""
        return self._find()

    @property
    def priority(self) -> Priority:
        """What comes first is fetched first."""
        return self.due // max(1, self._turn.burst), self._turn.lane, self.due

    def start(self, place: int) -> None:
        """Nothing was read yet, and this is the first place."""
        self._next, self._time, self._share = place, self._clock.time, 0.0
        self._tell_due()

    @property
    def lookahead(self) -> float:
        """Tokens that may be fetched ahead in any case."""
        return self._turn.lap * LOOKAHEAD

    @property
    def in_window(self) -> float:
        """Which part of what the lane reads of the source in an epoch its window has."""
        return self._turn.burst * self._pace.of_lane / self._turn.lap

    def take(self, place: int) -> Ahead | None:
        """What was fetched for a place, if it was."""
        ahead = self.ahead.pop(place, None)
        if ahead is not None:
            self._tokens_ahead -= ahead.step.tokens
        return ahead

    def passed(self, place: int) -> Step:
        """A place is read now."""
        step = self._step(place)
        if step is None:
            raise IndexError(f"place {place} is behind the last of its course")
        self._next = max(self._next, place + 1)
        self._look_at_share()
        self._clock.time = max(self._clock.time, self._time)
        self._time += step.tokens / self._share if self._share else 0.0
        self._tell_due()
        return step

    def _look_at_share(self) -> None:
        share = self._pace.of_lane
        if share != self._share:  # what was not wanted for a time is not behind for that
            self._time, self._share = max(self._time, self._clock.time), share

    def _tell_due(self) -> None:
        self._look_at_share()
        if not self.ahead:
            self._tokens_ahead = 0.0  # sums of such numbers are not exact
        self.due = self._time + self._tokens_ahead / self._share if self._share else math.inf
        self.version += 1

    def upcoming(self) -> Step | None:
        """The block to fetch next, if it is not too early for that."""
        if self.due == math.inf:
            return None
        step = self._step(self._next)
        if step is None or not self.ahead or self._tokens_ahead <= self.lookahead:
            return step
        # A window is filled to the end of a block, more or less, and not to its last line.
        burst = self._turn.burst
        behind = self.due - self._clock.time - burst
        return None if behind > min(step.tokens / self._share, burst / 2) else step

    def give_up_last(self) -> None:
        """The last block that was fetched ahead has to be fetched later."""
        self._next, ahead = self.ahead.popitem()
        self._tokens_ahead -= ahead.step.tokens
        self._tell_due()

    def fetched(self, ahead: Ahead) -> None:
        """The upcoming block is being fetched."""
        self.ahead[self._next] = ahead
        self._tokens_ahead += ahead.step.tokens
        self._next += 1
        self._tell_due()
