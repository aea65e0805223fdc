"""TODO."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fmsdata.core.chunk import Chunk, Row
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane
from fmsdata.core.state import State, number, part
from fmsdata.errors import StageError, StateError
from fmsdata.planning.schedule import Turns
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.tally import Tallies, Tally, count_tokens

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable


class Anchor(NamedTuple):
    """A moment that a lane can return to: the lines it had given, and the state of its pipeline then, as JSON."""

    lane: int
    lines: int
    state: str


Passed: TypeAlias = Anchor | Tally  # what lanes come by on their way, at some number of lines


class Places:
    """Where some lanes stand after a step: the lines taken of each, the last anchor before there, and the tallies.

    Never changed, but replaced: whatever interrupts a step, the places are those before it or those after it.
    """

    def __init__(
        self, step: int, lines: Mapping[int, int], anchors: Mapping[int, Anchor], tallies: Tallies, lanes: int
    ) -> None:
        self.step, self.lines, self.tallies = step, lines, tallies
        self._anchors, self._lanes = anchors, lanes

    def after(self, samples: Iterable[int], passed: Sequence[Passed]) -> "Places":
        """The places one step on, in which these samples were taken and these anchors and tallies passed."""
        taken = {sample % self._lanes: sample // self._lanes + 1 for sample in samples}
        anchors, tallies = self._anchors, self.tallies
        if passed:  # seldom: when windows turn over
            anchors = {**anchors, **{one.lane: one for one in passed if isinstance(one, Anchor)}}
            tallies = tallies.after([one for one in passed if isinstance(one, Tally)], self.lines)
        return Places(self.step + 1, {**self.lines, **taken}, anchors, tallies, self._lanes)

    def tokens(self) -> Ints:
        """What was taken of each source, by the columns of tallies."""
        return self.tallies.tokens(self.lines)

    def turns(self) -> Turns:
        return Turns(self.lines, self._lanes)

    def state(self) -> dict[str, str]:
        """Per lane, as JSON: the step, the lines taken, an anchor, and how many lines to drop after it."""
        anchors = self._anchors
        return {
            str(lane): f'{{"step":{self.step},"lines":{lines},"skip":{lines - anchors[lane].lines},'
            f'"anchor":{anchors[lane].state}}}'
            for lane, lines in self.lines.items()
        }

    def states(self, lanes: Iterable[int]) -> dict[int, State]:
        """The same of some of the lanes, as data."""
        told = self.state()
        return {lane: json.loads(told[str(lane)]) for lane in lanes}


class Lanes:
    """Some lanes at work."""

    def __init__(
        self,
        data: "Rescalable",
        lanes: Sequence[int],
        states: Mapping[int, State] | None,
        host: OpenFiles | None = None,
    ) -> None:
        self.files = host or OpenFiles(len(lanes) / data.lanes)
        self._data, self._count = data, data.lanes
        self._running = {
            lane: _RunningLane(
                data,
                data.lane(lane, self.files),
                None if states is None else states[lane],
            )
            for lane in lanes
        }
        self._told = {lane: running.anchor for lane, running in self._running.items()}

    def take(self, samples: Iterable[int]) -> tuple[list[Row], list[Passed]]:
        """The next lines of the lanes of these samples, and what was passed."""
        rows: list[Row] = []
        passed: list[Passed] = []
        for sample in samples:
            running = self._running[sample % self._count]
            rows.append(running.take())
            if running.tallies:
                passed += running.tallies
                running.tallies = []
            if running.anchor is not self._told[running.lane]:
                self._told[running.lane] = running.anchor
                passed.append(running.anchor)
        return rows, passed

    def places(self, step: int) -> Places:
        """Where these lanes were opened."""
        lines = {lane: running.lines for lane, running in self._running.items()}
        tallies = Tallies.at(self._data, (anchor.state for anchor in self._told.values()))
        return Places(step, lines, dict(self._told), tallies, self._count)


class _RunningLane:
    def __init__(self, data: "Rescalable", lane: Lane, state: State | None) -> None:
        self.lane, self._columns = lane.index, data.columns
        self.tallies: list[Tally] = []  # of chunks that were begun, until somebody takes them
        try:
            self.lines = number(state, "lines")
            self._row = number(state, "skip")
            if self._row > self.lines:
                raise StateError(f"'skip' is {self._row}, more than the {self.lines} lines taken")
            self._iterator = data.lines.open(lane, part(state, "anchor"))
        except (StateError, KeyError, TypeError, IndexError, ValueError) as error:
            raise StateError(f"the state of lane {lane.index} can't be used: {error}") from None
        self._chunk: Chunk | None = None
        self._drop_anchor(0)

    def take(self) -> Row:
        while self._chunk is None or self._row >= len(self._chunk):
            if self._chunk is not None:
                self._leave(self._chunk)
            self._chunk = self._iterator.read()
            self.tallies.append(Tally(self.lane, self.lines - self._row, count_tokens(self._chunk, self._columns)))
        chunk, row = self._chunk, self._row
        self._row += 1
        self.lines += 1
        if self._row == len(chunk):
            self._leave(chunk)
        return chunk, row

    def _leave(self, chunk: Chunk) -> None:
        self._chunk, self._row = None, self._row - len(chunk)
        self._drop_anchor(len(chunk))

    def _drop_anchor(self, taken: int) -> None:
        state = self._iterator.state(taken)
        try:
            text = json.dumps(state, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise StageError(f"a stage's state must be plain data (numbers, strings, lists, dicts): {error}") from None
        self.anchor = Anchor(self.lane, self.lines - self._row, text)
