"""Positions: where the lanes of a rank are after a step, as data.

A lane passes milestones as it reads: anchors, from which it can resume, and tallies, which count
its tokens. Positions never change. A step makes new ones, so whatever interrupts a step, a loader
has the positions from before it or those from after it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from fmsdata.core.keys import Ints
from fmsdata.core.stage import Stage
from fmsdata.core.state import EDITED, State, number, part
from fmsdata.errors import StateError
from fmsdata.planning.schedule import Turns
from fmsdata.run.tally import Tallies, Tally
from fmsdata.stages.mixture import stages_down_to_mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.shuffle import Shuffle

STEPS = 32  # whose samples are kept before they are counted
CHUNK_TOKENS = 1 << 32  # a lane plans at most this many tokens at once, or a window


class Anchor(NamedTuple):
    """A point that a lane can return to: lines taken, and the state of its pipeline as JSON."""

    lane: int
    lines: int
    state: str


Milestone: TypeAlias = Anchor | Tally


def lines_taken(state: State | None, lines: Stage, lanes: int) -> tuple[int, int]:
    """The lines taken of a lane, and how many of them are behind its anchor: part of one chunk.

    Raises if there can't be that many, because finding the position would take forever.
    """
    taken, skip = number(state, "lines"), number(state, "skip")
    if isinstance(lines, Shuffle):
        most = lines.most_at_once - number(part(state, "anchor"), "taken")
    else:
        length = next((stage.seq_len for stage in stages_down_to_mixture(lines) if isinstance(stage, Pack)), 64)
        most = max(CHUNK_TOKENS, lines.window_tokens()) // length
    if taken * lanes >= 1 << 62:
        raise StateError(f"'lines' is {taken}, more than there can be: {EDITED}")
    if skip > min(taken, max(0, most)):
        raise StateError(f"'skip' is {skip} of {taken} lines, but the anchor is at most {most} lines back: {EDITED}")
    return taken, skip


class Positions:
    """The lines taken of some lanes after a step, the last anchor of each, and the tallies."""

    def __init__(
        self,
        step: int,
        lines: Mapping[int, int],
        anchors: Mapping[int, Anchor],
        tallies: Tallies,
        lanes: int,
        taken: tuple[Sequence[int], ...] = (),
    ) -> None:
        self.step, self.tallies = step, tallies
        self._anchors, self._lanes = anchors, lanes
        self._lines, self._taken = lines, taken  # samples that were taken after these lines, step by step

    @property
    def lines(self) -> Mapping[int, int]:
        """The lines taken of each lane."""
        if taken := self._taken:
            counts = {sample % self._lanes: sample // self._lanes + 1 for samples in taken for sample in samples}
            self._lines = {**self._lines, **counts}
            self._taken = ()  # last: to count them twice changes nothing
        return self._lines

    def after(self, samples: Sequence[int], passed: Sequence[Milestone]) -> "Positions":
        """The positions one step later, with these samples taken and these milestones passed."""
        anchors, tallies = self._anchors, self.tallies
        if passed:  # rare: only when a window ends
            anchors = {**anchors, **{anchor.lane: anchor for anchor in passed if isinstance(anchor, Anchor)}}
            tallies = tallies.after([tally for tally in passed if isinstance(tally, Tally)], self.lines)
        taken = self._taken  # first, and then the lines: another thread may call `lines` meanwhile
        lines = self._lines
        if len(taken) >= STEPS:
            lines, taken = self.lines, ()
        return Positions(self.step + 1, lines, anchors, tallies, self._lanes, (*taken, samples))

    def tokens(self) -> Ints:
        """The tokens taken of each source, by the columns of tallies."""
        return self.tallies.tokens(self.lines)

    def turns(self, limits: Ints | None = None) -> Turns:
        """The order in which the lanes are served from here on. `limits` are the lines of a finite pass."""
        return Turns(self.lines, self._lanes, limits)

    def state(self) -> dict[str, str]:
        """Per lane, as JSON: the step, the lines taken, an anchor, the lines to skip after it."""
        anchors = self._anchors
        return {
            str(lane): f'{{"step":{self.step},"lines":{lines},"skip":{lines - anchors[lane].lines},'
            f'"anchor":{anchors[lane].state}}}'
            for lane, lines in self.lines.items()
        }

    def states(self, lanes: Iterable[int]) -> dict[int, State]:
        """The state of some of the lanes, as data."""
        texts = self.state()
        return {lane: json.loads(texts[str(lane)]) for lane in lanes}
