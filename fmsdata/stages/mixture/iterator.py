"""The merge of a mixture: the documents of all sources, in the order in which they are due."""

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fmsdata.core import native
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints, key_of, offsets
from fmsdata.core.lane import Lane, Pace
from fmsdata.core.permutation import Permutation
from fmsdata.core.spans import COLUMNS
from fmsdata.core.state import EDITED, State
from fmsdata.errors import FmsdataWarning, StateError
from fmsdata.stages.mixture.leftovers import NO_ENDS, Leftover, LeftoverFirst
from fmsdata.stages.mixture.source_state import SourceState, pack_sources, unpack_sources
from fmsdata.stages.mixture.weights import Phase, surplus

if TYPE_CHECKING:
    from fmsdata.stages.mixture.mixture import Mixture

UNREAD = SourceState()
NONE: npt.NDArray[np.float64] = np.zeros(0)


class MixtureIterator(StageIterator):
    """The state is, for each source: the tokens taken, its own state, and what edits left over."""

    def __init__(self, mixture: "Mixture", lane: Lane, state: State | None) -> None:
        self._mixture, self._lane = mixture, lane
        saved = dict.fromkeys(mixture.sources, UNREAD) if state is None else unpack_sources(state)
        for name, source in saved.items():
            if (source.taken + abs(source.shift)) * 2 * lane.count >= 1 << 62:  # `_MixedSource` computes with 64 bits
                raise StateError(f"{source.taken} tokens taken of source {name!r} are more than there can be: {EDITED}")
        self._sources: dict[str, _MixedSource] = {}
        # The states of sources that are not in the mixture now, kept in case they return.
        self._removed = {name: source for name, source in saved.items() if name not in mixture.sources}
        self._taken_of_removed = sum(source.taken for source in self._removed.values())
        self._phase = mixture.phase_at(sum(source.taken for source in saved.values()), lane.count)
        for name, stage in mixture.sources.items():
            if name not in saved:
                raise StateError(f"there is no state of source {name!r}: {EDITED}")
            below = lane.named(name)
            below.pace.share = self._phase.weights[name]
            self._sources[name] = _MixedSource(
                LeftoverFirst(stage, below, saved[name].leftover, saved[name].below),
                offset=(2 * _places(lane.count, lane.seed, below.source)[lane.index] + 1, 2 * lane.count),
                taken=saved[name].taken,
                shift=saved[name].shift,
                pace=below.pace,
            )
        self._from: Ints = np.empty(0, np.int64)  # for each document of the chunk, its source

    def read(self) -> Chunk:
        self._settle()
        active = [
            (i, source)
            for i, (name, source) in enumerate(self._sources.items())
            if source.weight and self._has_more(name)
        ]
        if not active:
            raise Exhausted
        horizon = self._horizon([source for _, source in active])
        tokens = self._tokens([0] * len(self._sources))
        taken = [source.take_until(horizon) for _, source in active]
        chunk, which = _merge([documents for documents, _ in taken], [due for _, due in taken])
        self._from = np.array([i for i, _ in active]).take(which)
        return self._until_phase_ends(chunk, tokens)

    def _horizon(self, sources: "list[_MixedSource]") -> float:
        """The time before which all documents that are due are read.

        When some sources have just read, those that will soon have to read do so now, if that is only
        planning: a merge costs about the same for few documents as for many.
        """
        times = [source.time for source in sources]
        new = [time for source, time in zip(sources, times, strict=True) if source.is_new]
        if self._lane.only_plans and new and len(new) < len(sources):
            now = min([source.next_due for source in sources])
            soon = now + (min(new) - now) / 2
            for source, time in zip(sources, times, strict=True):
                if not source.is_new and time < soon:
                    source.extend()
            times = [source.time for source in sources]
        return min(times)

    def state(self, taken: int) -> State:
        counts = self._counts(taken)
        leads = self._leads(counts, self._phase_after(counts))
        sources = {}
        for (name, source), count in zip(self._sources.items(), counts, strict=True):
            given = source.taken(count)
            leftover, below = source.position(count)
            sources[name] = SourceState(taken=given, shift=leads[name] - given, leftover=leftover, below=below)
        return pack_sources({**sources, **self._removed})

    def _settle(self) -> None:
        """Leave the chunk behind, and enter the next phase if it is time."""
        counts = self._counts(len(self._from))
        phase = self._phase_after(counts)
        leads = self._leads(counts, phase) if phase is not self._phase else {}
        for source, count in zip(self._sources.values(), counts, strict=True):
            source.settle(count)
        for name, lead in leads.items():
            self._sources[name].change(phase.weights[name], lead)
        self._phase = phase
        self._from = self._from[:0]

    def _has_more(self, name: str) -> bool:
        source = self._sources[name]
        had_ended = source.ended
        has_more = source.fill()
        in_endless_run = not self._lane.marks and self._lane.epochs is None
        if not has_more and not had_ended and source.was_last and in_endless_run:
            warnings.warn(
                f"source {self._lane.named(name).source!r} has been read max_epochs times: "
                "from now on its share goes to the other sources",
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
        """The number of documents of each source among the first `taken` of the chunk."""
        if not taken:
            return [0] * len(self._sources)
        counts: list[int] = np.bincount(self._from[:taken], minlength=len(self._sources)).tolist()
        return counts

    def _tokens(self, counts: Sequence[int]) -> int:
        return self._taken_of_removed + sum(map(_MixedSource.taken, self._sources.values(), counts))

    def _phase_after(self, counts: Sequence[int]) -> Phase:
        phases = self._mixture.phases
        return self._mixture.phase_at(self._tokens(counts), self._lane.count) if phases else self._phase

    def _leads(self, counts: Sequence[int], phase: Phase) -> dict[str, int]:
        """The lead of each source. That of an ended source grows as if it still had its share."""
        weights = self._phase.weights
        leads = {name: source.lead(count) for (name, source), count in zip(self._sources.items(), counts, strict=True)}
        ended = [name for name, source in self._sources.items() if source.ended]
        others = [name for name in leads if weights[name] and name not in ended]
        if ended and others:
            time = sum(leads[name] for name in others) / math.fsum(weights[name] for name in others)
            leads |= {name: round(time * weights[name]) for name in ended if weights[name]}
        return leads if phase is self._phase else surplus(leads, weights)


def _merge(parts: list[Chunk], due: list[npt.NDArray[np.float64]]) -> tuple[Chunk, Ints]:
    """The documents of some sources in the order in which they are due, and the part that each is from."""
    kernel, counts = native.kernel, [len(part) for part in parts]
    if kernel is None or len(parts) > native.MOST_SOURCES or any(len(part.spans) > len(part) for part in parts):
        order = np.concatenate(due).argsort(kind="stable")
        return Chunk.join(parts).take(order).compact(), np.arange(len(parts)).repeat(counts).take(order)
    spans, which = np.empty((sum(counts), COLUMNS), np.int64), np.empty(sum(counts), np.int64)
    buffers = kernel.merge([part.spans for part in parts], [part.buffers for part in parts], due, spans, which)
    return Chunk(buffers, spans, np.arange(len(spans) + 1)), which


@lru_cache(maxsize=256)
def _places(lanes: int, seed: int, source: str) -> list[int]:
    """The place of each lane among the offsets of a source, which are spread evenly over the lanes."""
    places: list[int] = Permutation(lanes, key_of(seed, "offset", source)).array(np.arange(lanes)).tolist()
    return places


class _MixedSource:
    """One source of the mixture at work: its next documents, and when each is due."""

    def __init__(self, iterator: LeftoverFirst, *, offset: tuple[int, int], taken: int, shift: int, pace: Pace) -> None:
        self.iterator = iterator
        self._offset = offset  # as a fraction
        self._before = taken  # tokens taken before the chunk
        self._shift = shift
        self._pace = pace
        self._chunk: Chunk | None = None
        self._ends = NO_ENDS  # tokens of the chunk before each document, and all of them
        self._begin = self._cursor = 0
        self._due: npt.NDArray[np.float64] = NONE
        self.ended = self.was_last = False

    @property
    def weight(self) -> float:
        return self._pace.share

    def fill(self) -> bool:
        """Read documents if none are left. Returns whether there are any."""
        if not self.ended and (self._chunk is None or self._cursor == len(self._chunk)):
            try:
                chunk = self.iterator.read()
            except Exhausted as end:
                self.ended, self.was_last, chunk = True, end.last, None
            self._enter(chunk)
        return not self.ended

    def extend(self) -> None:
        """Read documents behind those that are left, if that is possible."""
        chunk = self.iterator.read_on(self._cursor)
        if chunk is not None:
            self._enter(chunk)

    def _enter(self, chunk: Chunk | None) -> None:
        """Continue with a chunk that begins where the cursor is."""
        self._before += int(self._ends[self._cursor])
        self._chunk, self._begin, self._cursor = chunk, 0, 0
        self._ends = np.zeros(1, np.int64) if chunk is None else offsets(chunk.lengths())
        self._update_due()

    @property
    def is_new(self) -> bool:
        """Whether nothing of the chunk was taken."""
        return self._cursor == 0

    @property
    def time(self) -> float:
        """The time before which no document is due that was not read."""
        time: float = self._time(self._before + self._shift + int(self._ends[-1]), 0)
        return time

    @property
    def next_due(self) -> float:
        """When the next document is due."""
        return float(self._due[self._cursor])

    def take_until(self, time: float) -> tuple[Chunk, npt.NDArray[np.float64]]:
        """The documents that are due before a time, and when each is due."""
        chunk = self._chunk
        if chunk is None:
            raise RuntimeError("call fill() first")
        self._begin, self._cursor = self._cursor, int(self._due.searchsorted(time))
        return chunk.slice(self._begin, self._cursor), self._due[self._begin : self._cursor]

    def settle(self, count: int) -> None:
        """Keep the first `count` of the documents taken last; the others are taken again."""
        self._begin = self._cursor = self._begin + count

    def taken(self, count: int) -> int:
        """The tokens taken, with the first `count` of the documents that were taken last."""
        return self._before + int(self._ends[self._begin + count])

    def lead(self, count: int) -> int:
        return self.taken(count) + self._shift

    def change(self, weight: float, lead: int) -> None:
        """Continue with a different weight and lead."""
        self._shift += lead - self.lead(0)
        self._pace.share = weight
        self._update_due()

    def position(self, count: int) -> tuple[Leftover | None, State | None]:
        return self.iterator.position(self._begin + count)

    def _update_due(self) -> None:
        if self.weight:
            ends = self._ends
            self._due = self._time(ends[:-1] + (self._before + self._shift), ends[1:] - ends[:-1])

    def _time(self, given: Any, length: Any) -> Any:
        """When documents are due.

        Integers up to the division, so that the result does not depend on where chunks begin.
        """
        part, parts = self._offset
        return (given * parts + length * part) / (self.weight * parts)
