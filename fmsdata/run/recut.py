"""Recut: converts the saved state of a lane to an edited pipeline.

The lines in progress were planned for the old mix. They are read again, with marks that say
which tokens of which source they hold. Lines that the trainer has taken are done. The tokens of the
others become leftovers of their sources.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fmsdata.core.chunk import Chunk
from fmsdata.core.lane import Lane
from fmsdata.core.ranges import merge
from fmsdata.core.stage import Stage
from fmsdata.core.state import State, part
from fmsdata.run.positions import lines_taken
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.filter import Filter
from fmsdata.stages.mixture.leftovers import Leftover, marked_runs
from fmsdata.stages.mixture.source_state import SourceState, pack_sources, unpack_sources
from fmsdata.stages.pack import MODES, Pack
from fmsdata.stages.shuffle import Shuffle


class Recut:
    """Gives the lines that a lane has in progress back to their sources.

    `old` and `new` are the stages as they were saved and as they are now, from the top down to the
    mixture.
    """

    def __init__(self, old: Sequence[Stage], new: Sequence[Stage]) -> None:
        self._old, self._new = old, new
        self._pack = next((i for i, stage in enumerate(old) if isinstance(stage, Pack)), None)

    def __call__(self, lane: Lane, state: State) -> State:
        mixture: Any = self._old[-1]
        start, after_lines, lines = self._replay(lane, state)
        before, after = unpack_sources(self._states(start)[-1]), unpack_sources(self._states(after_lines)[-1])
        end, unfinished = self._finish(lane, after_lines)
        last = unpack_sources(end[-1])
        in_lines, in_progress = (marked_runs(chunk) if chunk else {} for chunk in (lines, unfinished))
        sources = dict(last)
        for name in mixture.sources:
            origin = _Origin(before[name])
            # What is in progress was read from the state after the lines. Its marks count from
            # there, or, with a leftover, from the start of that, which is the origin.
            shift = 0 if after[name].leftover else origin.tokens_until(after[name])
            runs = in_lines.get(name, []) + [(a + shift, b + shift) for a, b in in_progress.get(name, [])]
            sources[name] = origin.with_leftover(last[name], runs)
        for name, stage in self._new[-1].children().items():
            if name not in sources:
                sources[name] = SourceState(below=stage.open(lane.named(name)).state(0))
        return {**state, "skip": 0, "anchor": self._anchor(end, pack_sources(sources))}

    def _replay(self, lane: Lane, state: State) -> tuple[State, State, Chunk | None]:
        """The state before the lines in progress, the state after them, and the lines not taken."""
        start = part(state, "anchor") or {}
        _, row = lines_taken(state, self._old[0], lane.count)
        if row == 0:
            return start, start, None
        iterator = self._old[0].open(lane, start)
        chunk = iterator.read()
        while row >= len(chunk):
            row -= len(chunk)
            start = iterator.state(len(chunk))
            if row == 0:
                return start, start, None
            # Marks count from where the iterator was opened.
            iterator = self._old[0].open(lane, start)
            chunk = iterator.read()
        return start, iterator.state(len(chunk)), chunk.slice(row, len(chunk))

    def _finish(self, lane: Lane, end: State) -> tuple[list[State], Chunk | None]:
        """The states after the unfinished work of the packer, and the unused part of that work."""
        states = self._states(end)
        if self._pack is None:
            return states, None
        pack: Any = self._old[self._pack]
        after, unused = MODES[pack.mode].finish(pack, lane, states[self._pack])
        return states[: self._pack] + self._states(after, self._pack)[self._pack :], unused

    def _states(self, state: State, first: int = 0) -> list[State]:
        """The state of each stage down to the mixture, where `state` is that of stage `first`."""
        states = [state]
        for stage in self._old[first:-1]:
            states.append(states[-1] if isinstance(stage, Delimit) else part(states[-1], "below") or {})
        return [{}] * first + states

    def _anchor(self, end: Sequence[State], mixture: State) -> State:
        """The state of the new stages at the start of a line, above this state of the mixture."""
        anchor = mixture
        for stage, state in reversed(list(zip(self._new[:-1], end[:-1], strict=True))):
            if isinstance(stage, Shuffle):
                anchor = {"window": state["window"], "taken": 0, "below": anchor}
            elif isinstance(stage, Pack):
                anchor = MODES[stage.mode].start(anchor, state)
            elif isinstance(stage, Filter):
                anchor = {"skip": 0, "below": anchor}
        return anchor


class _Origin(NamedTuple):
    """A source at the start of the lines in progress, from where their tokens are counted."""

    state: SourceState

    def tokens_until(self, later: SourceState) -> int:
        """The number of tokens from here to a later state that has no leftover any more."""
        leftover = self.state.leftover
        since = later.taken - self.state.taken
        return since if leftover is None else leftover.length + since - leftover.tokens

    def with_leftover(self, last: SourceState, runs: list[tuple[int, int]]) -> SourceState:
        """The source at its last state, with these tokens to give first, and no lead."""
        start = self.state.below if self.state.leftover is None else self.state.leftover.start
        length = self.tokens_until(last) if last.leftover is None else last.leftover.length
        taken = last.taken - sum(end - begin for begin, end in runs)
        runs = list(merge(runs + (last.leftover.runs if last.leftover else [])))
        leftover = Leftover(start=start or {}, runs=runs, length=length) if runs else None
        return SourceState(taken=taken, shift=-taken, leftover=leftover, below=last.below)
