"""Mixture: documents of several sources, each source getting its share of the tokens at every moment.

The source that is furthest below its share comes next: the one with the least
`(tokens taken + phase) / weight`. As arrays, that is a merge of the sources' documents by the virtual time
at which each is due.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.chunk import Chunk
from fmsdata.errors import ConfigError
from fmsdata.keys import Ints, key_of, offsets
from fmsdata.stage import Lane, Stage, StageIterator, State, below_name, number, part

LARGEST_WEIGHT = 1e30


class Mixture(Stage):
    """Several sources, mixed by token weights. Sources go by their names: their order means nothing.

    >>> mix = Mixture({"web": web, "wiki": wiki}, weights={"web": 0.7, "wiki": 0.3})    # doctest: +SKIP
    """

    def __init__(self, sources: Mapping[str, Stage], weights: Mapping[str, float]) -> None:
        check_weights(sources, weights)
        if not sources:
            raise ConfigError("a mixture needs at least one source")
        for name, stage in sources.items():
            if not isinstance(name, str) or not isinstance(stage, Stage):
                raise ConfigError(f"source {name!r} is {stage!r}; sources are stages by their names")
        total = math.fsum(weights.values())
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.weights = {name: float(weights[name]) / total for name in self.sources}

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _MixtureIterator(self, lane, state)

    def children(self) -> Mapping[str, Stage]:
        return self.sources

    def describe(self, source: str = "") -> State:
        described = {name: stage.describe(below_name(source, name)) for name, stage in self.sources.items()}
        return {"stage": type(self).__name__, **self.parameters(), "children": described}

    def parameters(self) -> State:
        return {"weights": dict(self.weights)}


def check_weights(sources: Mapping[str, object], weights: Mapping[str, Any]) -> None:
    """Raise unless every source has a positive weight, and nothing else has one."""
    if not isinstance(sources, Mapping) or not isinstance(weights, Mapping):
        raise ConfigError("sources and weights are dicts by the sources' names")
    for name, weight in weights.items():
        if name not in sources:
            raise ConfigError(f"weight for unknown source {name!r}; the sources are {', '.join(sorted(sources))}")
        if not 0 < _as_float(weight) <= LARGEST_WEIGHT:
            raise ConfigError(
                f"source {name!r}: weight {weight!r} must be a number above zero (and below 1e30); "
                "remove the source to leave it out"
            )
    if missing := sorted(set(sources) - set(weights)):
        raise ConfigError(f"no weight for source {', '.join(map(repr, missing))}")


def _as_float(weight: Any) -> float:
    if isinstance(weight, int | float | np.number) and not isinstance(weight, bool):
        try:
            return float(weight)
        except OverflowError:
            pass
    return math.nan


class _Feed:
    """One source of the mixture at work."""

    def __init__(self, iterator: StageIterator, *, weight: float, phase: int, taken: int) -> None:
        self.iterator = iterator
        self._weight = weight
        self._phase = phase
        self._before = taken  # tokens taken before the chunk
        self._chunk: Chunk | None = None
        self._ends: Ints = np.zeros(1, np.int64)  # tokens of the chunk before each document
        self._begin = self._cursor = 0
        self._due: npt.NDArray[np.float64] = np.zeros(1)

    def fill(self) -> float:
        """Have documents at hand; the virtual time at which they are used up."""
        if self._chunk is None or self._cursor == len(self._chunk):
            self._chunk = self.iterator.read()
            self._before += int(self._ends[-1])
            self._ends = offsets(self._chunk.lengths())
            self._due = (self._ends + (self._before + self._phase)) / self._weight
            self._cursor = 0
        return float(self._due[-1])

    def take_until(self, time: float) -> tuple[Chunk, npt.NDArray[np.float64]]:
        """The documents due before a moment, and when each is due."""
        chunk = self._chunk
        if chunk is None:
            raise RuntimeError("fill() comes first")
        self._begin, self._cursor = self._cursor, int(np.searchsorted(self._due[:-1], time))
        return chunk.slice(self._begin, self._cursor), self._due[self._begin : self._cursor]

    def state(self, taken: int) -> State:
        at = self._begin + taken
        return {"taken": self._before + int(self._ends[at]), "below": self.iterator.state(at)}


class _MixtureIterator(StageIterator):
    """The state is, for each source, the tokens taken from it and its own state."""

    def __init__(self, mixture: Mixture, lane: Lane, state: State | None) -> None:
        self._feeds: dict[str, _Feed] = {}
        for name, stage in mixture.sources.items():
            below = lane.named(name)
            size = stage.size()
            mean = max(1, size.tokens // max(1, size.documents))
            mine = part(part(state, "sources"), name)
            self._feeds[name] = _Feed(
                stage.open(below, part(mine, "below")),
                weight=mixture.weights[name],
                phase=key_of(lane.seed, "phase", below.source, lane.index) % mean,
                taken=number(mine, "taken"),
            )
        self._from: Ints = np.empty(0, np.int64)  # which feed each document of the chunk came from

    def read(self) -> Chunk:
        feeds = self._feeds.values()
        horizon = min([feed.fill() for feed in feeds])
        taken = [feed.take_until(horizon) for feed in feeds]
        order = np.argsort(np.concatenate([due for _, due in taken]), kind="stable")
        self._from = np.repeat(np.arange(len(taken)), [len(due) for _, due in taken])[order]
        return Chunk.join([chunk for chunk, _ in taken]).compact().take(order)

    def state(self, taken: int) -> State:
        counts = np.bincount(self._from[:taken], minlength=len(self._feeds)).tolist()
        return {
            "sources": {
                name: feed.state(count) for (name, feed), count in zip(self._feeds.items(), counts, strict=True)
            }
        }
