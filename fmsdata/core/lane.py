"""Lane: what an iterator knows about the lane that it works for."""

import math
import weakref
from dataclasses import dataclass, field
from typing import Protocol

from fmsdata.core.blocks import Host

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(eq=False)
class Clock:
    """How far a lane has read, in tokens: when the block that it began last was due."""

    time: float = 0.0


@dataclass(eq=False)
class Pace:
    """The share of one source in what a lane reads. Mixtures set it."""

    share: float = 1.0
    within: "Pace | None" = None

    @property
    def of_lane(self) -> float:
        return self.share * (1.0 if self.within is None else self.within.of_lane)


class Worker(Protocol):
    """An iterator with slow work that it can do ahead of being read."""

    def work(self, tokens: float) -> None:
        """Do about this many tokens' worth of the work of the lane. Raises nothing: errors wait for `read`."""


class WorkAhead:
    """The slow work of a lane, such as tokenizing, done little by little while its lines are taken.

    A window is read in one go. What is slow in it must not wait for that moment.
    """

    def __init__(self) -> None:
        self._workers: list[weakref.ref[Worker]] = []

    def register(self, worker: Worker) -> None:
        """Let an iterator work ahead, as long as it exists."""
        self._workers = [reference for reference in self._workers if reference() is not None]
        self._workers.append(weakref.ref(worker))

    def __bool__(self) -> bool:
        return bool(self._workers)

    def advance(self, tokens: float) -> None:
        """The lane has taken tokens: work for as many of those to come."""
        for reference in self._workers:
            worker = reference()
            if worker is not None:
                worker.work(tokens)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Which lane of the run an iterator works for, and what its random choices are keyed by."""

    index: int = 0
    count: int = 1
    seed: int = 0
    source: str = ""
    # Opens files, for all lanes that are read together; None: each reader on its own.
    host: Host | None = field(default=None, repr=False)
    window_tokens: int = 0  # about how many tokens it reads at once, when a window is filled
    only_plans: bool = False  # whether reading is arithmetic alone in all of its stages
    clock: Clock = field(default_factory=Clock, repr=False)
    pace: Pace = field(default_factory=Pace, repr=False)
    epochs: int | None = None  # how often each source is read before it ends, in a finite pass
    ahead: WorkAhead = field(default_factory=WorkAhead, repr=False)
    lengths_only: bool = False  # plan lines: the host knows the tokens of each document of text, and reads none
    frugal: bool = False  # read no more at once than what is asked for needs (to see how far a lane reads)
    marks: bool = False  # replace provenance by offsets into the source of the mixture (for live edits)

    @property
    def spread(self) -> float:
        """A number from 0 to 1, evenly spread over lanes: they should not all do slow work at the same moment."""
        return self.index * GOLDEN_RATIO % 1

    def named(self, name: str) -> "Lane":
        """The same lane, for what lies below one name of a mixture."""
        lane = object.__new__(Lane)  # `replace` takes five times as long, and a start opens thousands of them
        vars(lane).update(vars(self), source=full_name(self.source, name), pace=Pace(within=self.pace))
        return lane


def full_name(source: str, name: str) -> str:
    """The name of a source of a mixture that may itself be the source of another.

    >>> full_name("", "web"), full_name("english", "web")
    ('web', 'english/web')
    """
    return f"{source}/{name}" if source else name
