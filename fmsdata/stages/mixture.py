"""Mixture: documents of several sources, each source getting its share of the tokens at every moment.

There is one virtual time, in tokens of all sources together. A document of a source that has given `given` tokens
is due at `(given + offset * length) / weight`. The offset is a number between 0 and 1 that each lane draws for
each source: so, whatever the documents' lengths are, a source is on average over the lanes exactly at its share at
every moment. As arrays, that is a merge of the sources' documents by the time at which each is due.

What a source has given is counted against its share as `lead`. When a phase ends, every lead becomes the surplus over
the share so far: what follows is held against the new weights, and nobody catches up for the past.
"""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.core.checks import whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.keys import Ints, key_of, offsets
from fmsdata.core.lane import Lane, Pace, full_name
from fmsdata.core.permutation import Permutation
from fmsdata.core.stage import Exhausted, Stage, StageIterator
from fmsdata.core.state import State
from fmsdata.errors import ConfigError, FmsdataWarning, StateError
from fmsdata.stages.leftovers import Rest, SourceState, WithRest, pack_sources, unpack_sources

LARGEST_WEIGHT = 1e30


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run with weights of its own: until the run has taken so many tokens, or (None) to its end.

    Sources that it does not name are not read meanwhile.

    >>> phase = Phase(until_tokens=10**12, weights={"web": 0.9, "wiki": 0.1})
    """

    weights: Mapping[str, float]
    until_tokens: int | None = None


class Mixture(Stage):
    """Several sources, mixed by token weights. Sources go by their names: their order means nothing.

    A source with weight 0 is not read, and keeps its place. `phases` come one after the other; after the last, unless
    it has no end, `weights` hold. Tokens are those of the documents, before any BOS or EOS; each lane goes
    over to the next phase when it has taken its part of them. `find` is asked for a source that was removed from
    a run, by name and description, when that goes on (see `fmsdata.edits`).

    >>> mix = Mixture({"web": web, "wiki": wiki}, weights={"web": 0.7, "wiki": 0.3})    # doctest: +SKIP
    """

    def __init__(
        self,
        sources: Mapping[str, Stage],
        weights: Mapping[str, float],
        *,
        phases: Sequence[Phase] = (),
        find: Callable[[str, State], Stage] | None = None,
    ) -> None:
        check_weights(sources, weights)
        if not sources:
            raise ConfigError("a mixture needs at least one source")
        for name, stage in sources.items():
            if not isinstance(name, str) or not isinstance(stage, Stage):
                raise ConfigError(f"source {name!r} is {stage!r}; sources are stages by their names")
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.find = find
        self.set_weights(_shares(self.sources, weights), self._checked(phases))
        for phase in self.course:
            if all(self.sources[name].ends() for name, weight in phase.weights.items() if weight):
                raise ConfigError(
                    "every source that is read has max_epochs: the stream would end, at another step on every rank; "
                    "leave max_epochs away for one of them, and stop after as many steps as you want"
                )

    def set_weights(self, weights: Mapping[str, float], phases: Sequence[Phase]) -> None:
        """Have these weights, each a part of 1 for every source. `course` is all phases, with what follows the last."""
        self.weights, self.phases = dict(weights), tuple(phases)
        endless = bool(phases) and phases[-1].until_tokens is None
        self.course = self.phases if endless else (*self.phases, Phase(weights=self.weights))

    def _checked(self, phases: Sequence[Phase]) -> list[Phase]:
        checked: list[Phase] = []
        for i, phase in enumerate(phases):
            if not isinstance(phase, Phase):
                raise ConfigError(f"phases are Phase(until_tokens=, weights=), not {phase!r}")
            until = phase.until_tokens
            if until is None and i < len(phases) - 1:
                raise ConfigError(f"phase {i} has no until_tokens, so phase {i + 1} would never come")
            if until is not None:
                whole("until_tokens", until, least=1)
                if checked and until <= (checked[-1].until_tokens or 0):
                    raise ConfigError(f"until_tokens must grow: phase {i} has {until}, not more than the one before")
            check_weights(self.sources, {**dict.fromkeys(self.sources, 0), **phase.weights})
            checked.append(Phase(weights=_shares(self.sources, phase.weights), until_tokens=until))
        return checked

    def phase_at(self, tokens: int, lanes: int = 1) -> Phase:
        """The weights after a lane of so many has taken so many tokens, and until when they hold."""
        over = bisect_right(self.course[:-1], tokens * lanes, key=lambda phase: phase.until_tokens or 0)
        return self.course[over]

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _MixtureIterator(self, lane, state)

    def children(self) -> Mapping[str, Stage]:
        return self.sources

    def describe(self, source: str = "") -> State:
        described = {name: stage.describe(full_name(source, name)) for name, stage in self.sources.items()}
        return {"stage": type(self).__name__, **self.parameters(), "children": described}

    def parameters(self) -> State:
        phases = [{"until_tokens": phase.until_tokens, "weights": dict(phase.weights)} for phase in self.phases]
        return {"weights": dict(self.weights), "phases": phases}

    def ends(self) -> bool:
        return False


def down_to_mixture(lines: Stage) -> list[Stage]:
    """The stages from the top down to the outermost mixture, or to where there is none below."""
    stages = [lines]
    while not isinstance(stages[-1], Mixture) and "below" in stages[-1].children():
        stages.append(stages[-1].children()["below"])
    return stages


def check_weights(sources: Mapping[str, object], weights: Mapping[str, Any]) -> None:
    """Raise unless every source has a weight, at least one of them above zero, and nothing else has one."""
    if not isinstance(sources, Mapping) or not isinstance(weights, Mapping):
        raise ConfigError("sources and weights are dicts by the sources' names")
    for name, weight in weights.items():
        if name not in sources:
            raise ConfigError(f"weight for unknown source {name!r}; the sources are {', '.join(sorted(sources))}")
        if not 0 <= _as_float(weight) <= LARGEST_WEIGHT:
            raise ConfigError(
                f"source {name!r}: weight {weight!r} must be a number, zero or above (and below 1e30); "
                "a source with weight 0 is not read"
            )
    if missing := sorted(set(sources) - set(weights)):
        raise ConfigError(f"no weight for source {', '.join(map(repr, missing))}")
    if sources and not any(weights.values()):
        raise ConfigError(f"every source has weight 0 ({', '.join(sorted(sources))}); at least one must be read")


def _as_float(weight: Any) -> float:
    if isinstance(weight, int | float | np.number) and not isinstance(weight, bool):
        try:
            return float(weight)
        except OverflowError:
            pass
    return math.nan


def _shares(sources: Mapping[str, object], weights: Mapping[str, float]) -> dict[str, float]:
    """The weights as parts of 1."""
    total = math.fsum(weights.values())
    return {name: float(weights.get(name, 0)) / total for name in sources}


def surplus(leads: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """What each source has given above its share of what all have given. One that is not read keeps what it has.

    >>> surplus({"web": 90, "wiki": 10, "code": 7}, {"web": 0.8, "wiki": 0.2, "code": 0.0})
    {'web': 10, 'wiki': -10, 'code': 7}
    """
    time = sum(leads[name] for name, weight in weights.items() if weight)
    return {name: lead - round(time * weights[name]) for name, lead in leads.items()}


def expected_tokens(mixture: Mixture, tokens: float) -> dict[str, float]:
    """How much of so many tokens each source will have given: phase by phase, until one has had its `max_epochs`."""
    taken = dict.fromkeys(mixture.sources, 0.0)
    epochs = {name: getattr(stage, "max_epochs", None) for name, stage in mixture.sources.items()}
    most = {
        name: math.inf if epochs[name] is None else stage.size().tokens * float(epochs[name] or 0)
        for name, stage in mixture.sources.items()
    }
    done = 0.0
    while done < tokens:
        phase = mixture.phase_at(math.floor(done))
        active = {name: share for name, share in phase.weights.items() if share and taken[name] < most[name]}
        total = math.fsum(active.values())
        until = min(tokens, phase.until_tokens or tokens)
        used_up = {name: done + (most[name] - taken[name]) * total / share for name, share in active.items()}
        now = min([until, *used_up.values()])
        for name, share in active.items():
            taken[name] = most[name] if used_up[name] <= now else taken[name] + (now - done) * share / total
        done = now
    return taken


class _Feed:
    """One source of the mixture at work."""

    def __init__(self, iterator: WithRest, *, offset: tuple[int, int], taken: int, shift: int, pace: Pace) -> None:
        self.iterator = iterator
        self._offset = offset  # as a part of so many
        self._before = taken  # tokens taken before the chunk
        self._shift = shift
        self._pace = pace
        self._chunk: Chunk | None = None
        self._ends: Ints = np.zeros(1, np.int64)  # tokens of the chunk before each document
        self._begin = self._cursor = 0
        self._due: npt.NDArray[np.float64] = np.zeros(0)
        self.ended = self.was_last = False

    def fill(self) -> float:
        """Have documents at hand; a virtual time before which no others are due."""
        if not self.ended and (self._chunk is None or self._cursor == len(self._chunk)):
            try:
                chunk = self.iterator.read()
            except Exhausted as end:
                self.ended, self.was_last, chunk = True, end.last, None
            self._before += int(self._ends[-1])
            self._chunk, self._begin, self._cursor = chunk, 0, 0
            self._ends = np.zeros(1, np.int64) if chunk is None else offsets(chunk.lengths())
            self._tell_due()
        return math.inf if self.ended else self._time(self._before + self._shift + int(self._ends[-1]), 0)

    def _tell_due(self) -> None:
        if self.weight:
            self._due = self._time(self._ends[:-1] + (self._before + self._shift), np.diff(self._ends))

    def _time(self, given: Any, length: Any) -> Any:
        """When documents are due. Whole numbers up to the division, so that it does not matter where chunks begin."""
        part, parts = self._offset
        return (given * parts + length * part) / (self.weight * parts)

    @property
    def weight(self) -> float:
        return self._pace.share

    def take_until(self, time: float) -> tuple[Chunk, npt.NDArray[np.float64]]:
        """The documents due before a moment, and when each is due."""
        chunk = self._chunk
        if chunk is None:
            raise RuntimeError("fill() comes first")
        self._begin, self._cursor = self._cursor, int(np.searchsorted(self._due, time))
        return chunk.slice(self._begin, self._cursor), self._due[self._begin : self._cursor]

    def settle(self, count: int) -> None:
        """Of the documents that were taken last, so many are wanted; the others are taken again."""
        self._begin = self._cursor = self._begin + count

    def taken(self, count: int) -> int:
        """The tokens taken, if of the last documents only so many count."""
        return self._before + int(self._ends[self._begin + count])

    def lead(self, count: int) -> int:
        return self.taken(count) + self._shift

    def change(self, weight: float, lead: int) -> None:
        """Go on with another weight."""
        self._shift += lead - self.lead(0)
        self._pace.share = weight
        self._tell_due()

    def below(self, count: int) -> tuple[Rest | None, State | None]:
        return self.iterator.place(self._begin + count)


class _MixtureIterator(StageIterator):
    """The state is, for each source, the tokens taken from it, its own state, and what edits left behind."""

    def __init__(self, mixture: Mixture, lane: Lane, state: State | None) -> None:
        self._mixture, self._lane = mixture, lane
        saved = {name: SourceState() for name in mixture.sources} if state is None else unpack_sources(state)
        self._feeds: dict[str, _Feed] = {}
        # Of sources that are not in the mixture now: kept for their return.
        self._away = {name: one for name, one in saved.items() if name not in mixture.sources}
        self._taken_away = sum(one.taken for one in self._away.values())
        self._phase = mixture.phase_at(sum(one.taken for one in saved.values()), lane.count)
        for name, stage in mixture.sources.items():
            if name not in saved:
                raise StateError(f"there is no state of source {name!r}: the state is torn or was edited")
            mine = saved[name]
            below = lane.named(name)
            below.pace.share = self._phase.weights[name]
            order = Permutation(lane.count, key_of(lane.seed, "offset", below.source))
            self._feeds[name] = _Feed(
                WithRest(stage, below, mine.rest, mine.below),
                offset=(2 * order(lane.index) + 1, 2 * lane.count),
                taken=mine.taken,
                shift=mine.shift,
                pace=below.pace,
            )
        self._from: Ints = np.empty(0, np.int64)  # which source each document of the chunk came from

    def read(self) -> Chunk:
        self._settle()
        active = [
            (i, feed) for i, (name, feed) in enumerate(self._feeds.items()) if feed.weight and self._has_more(name)
        ]
        if not active:
            raise Exhausted
        horizon = min([feed.fill() for _, feed in active])
        tokens = self._tokens([0] * len(self._feeds))
        taken = [feed.take_until(horizon) for _, feed in active]
        order = np.argsort(np.concatenate([due for _, due in taken]), kind="stable")
        self._from = np.repeat([i for i, _ in active], [len(due) for _, due in taken])[order]
        chunk = Chunk.join([some for some, _ in taken]).compact().take(order)
        return self._until_phase_ends(chunk, tokens)

    def state(self, taken: int) -> State:
        counts = self._counts(taken)
        leads = self._leads(counts, self._phase_after(counts))
        sources = {}
        for (name, feed), count in zip(self._feeds.items(), counts, strict=True):
            given = feed.taken(count)
            rest, below = feed.below(count)
            sources[name] = SourceState(taken=given, shift=leads[name] - given, rest=rest, below=below)
        return pack_sources({**sources, **self._away})

    def _settle(self) -> None:
        """Leave the chunk behind, and go over to the next phase if it is time."""
        counts = self._counts(len(self._from))
        phase = self._phase_after(counts)
        leads = self._leads(counts, phase) if phase is not self._phase else {}
        for feed, count in zip(self._feeds.values(), counts, strict=True):
            feed.settle(count)
        for name, lead in leads.items():
            self._feeds[name].change(phase.weights[name], lead)
        self._phase = phase
        self._from = self._from[:0]

    def _has_more(self, name: str) -> bool:
        feed = self._feeds[name]
        had_ended = feed.ended
        has_more = feed.fill() < math.inf
        if not has_more and not had_ended and feed.was_last and not self._lane.marks:
            warnings.warn(
                f"source {self._lane.named(name).source!r} has been read max_epochs times: "
                "from now on its share goes to the others",
                FmsdataWarning,
                stacklevel=2,
            )
        return has_more

    def _until_phase_ends(self, chunk: Chunk, tokens: int) -> Chunk:
        """The documents that begin before the phase ends."""
        until = self._phase.until_tokens
        if until is None:
            return chunk
        before = (tokens + offsets(chunk.lengths())) * self._lane.count
        kept = int(np.searchsorted(before[:-1], until))
        self._from = self._from[:kept]
        return chunk.slice(0, kept)

    def _counts(self, taken: int) -> list[int]:
        """How many documents of each source are among the first so many of the chunk."""
        counts: list[int] = np.bincount(self._from[:taken], minlength=len(self._feeds)).tolist()
        return counts

    def _tokens(self, counts: Sequence[int]) -> int:
        return self._taken_away + sum(map(_Feed.taken, self._feeds.values(), counts))

    def _phase_after(self, counts: Sequence[int]) -> Phase:
        phases = self._mixture.phases
        return self._mixture.phase_at(self._tokens(counts), self._lane.count) if phases else self._phase

    def _leads(self, counts: Sequence[int], phase: Phase) -> dict[str, int]:
        """Each source's lead: of one that has ended, as if it had gone on with its share."""
        weights = self._phase.weights
        leads = {name: feed.lead(count) for (name, feed), count in zip(self._feeds.items(), counts, strict=True)}
        ended = [name for name, feed in self._feeds.items() if feed.ended]
        if ended:
            others = [name for name in leads if weights[name] and name not in ended]
            time = sum(leads[name] for name in others) / math.fsum(weights[name] for name in others)
            leads |= {name: round(time * weights[name]) for name in ended if weights[name]}
        return leads if phase is self._phase else surplus(leads, weights)
