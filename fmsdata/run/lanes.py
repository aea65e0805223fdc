"""Lanes at work: reads lines, and reports each anchor and tally when a lane passes it.

A lane drops an anchor whenever it leaves a chunk of lines behind. So the state of a lane is always its
last anchor and a number of lines to skip. Saving it asks no iterator.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from fmsdata.core.chunk import Chunk, Row
from fmsdata.core.collecting import no_collection
from fmsdata.core.iterator import Exhausted
from fmsdata.core.lane import Lane
from fmsdata.core.state import Restoring, State, part
from fmsdata.errors import DataError, StageError
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.finite import PassPlan
from fmsdata.run.positions import Anchor, Milestone, Positions, lines_taken
from fmsdata.run.tally import Tallies, Tally, count_tokens

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable

ADVANCE = 64  # lines that are taken before as many of the next chunk are planned


class Lanes:
    """Some lanes of a run, opened at their start or at saved states."""

    def __init__(
        self,
        data: "Rescalable",
        lanes: Sequence[int],
        states: Mapping[int, State] | None,
        host: OpenFiles | None = None,
    ) -> None:
        self.files = host or OpenFiles(len(lanes) / data.lanes, versions=data.versions)
        self._data, self._count = data, data.lanes
        with no_collection():
            self._running = {
                lane: _RunningLane(data, data.lane(lane, self.files), None if states is None else states[lane])
                for lane in lanes
            }

    def take(self, samples: Iterable[int]) -> tuple[list[Row], list[Milestone]]:
        """The lines of these samples, the next of their lanes, and the milestones passed."""
        rows: list[Row] = []
        passed: list[Milestone] = []
        self.take_into(rows, passed, samples)
        return rows, passed

    def take_into(self, rows: list[Row], passed: list[Milestone], samples: Iterable[int]) -> None:
        """The same, added to lists. After an error they have what came before it."""
        running, count = self._running, self._count
        for sample in samples:
            lane = running[sample % count]
            if (row := lane.row) < lane.easy and lane.chunk is not None:
                lane.row = row + 1
                rows.append((lane.chunk, row))
                continue
            rows.append(lane.take())
            if lane.passed:
                passed += lane.passed
                lane.passed = []

    def expect(self, plan: PassPlan | None) -> None:
        """Check, when a lane of a finite pass ends, that it ends as planned."""
        for lane, running in self._running.items():
            running.planned = int(plan.lines[lane]) if plan is not None and plan.is_whole else None

    def positions(self, step: int) -> Positions:
        """Where these lanes were opened."""
        lines = {lane: running.lines for lane, running in self._running.items()}
        anchors = {lane: running.anchor for lane, running in self._running.items()}
        tallies = Tallies.at(self._data, (anchor.state for anchor in anchors.values()))
        return Positions(step, lines, anchors, tallies, self._count)


class _RunningLane:
    """A lane at work. Its next line is line `row` of `chunk`, if it has a chunk and that is not used up."""

    def __init__(self, data: "Rescalable", lane: Lane, state: State | None) -> None:
        self.lane, self._columns = lane.index, data.columns
        self._ahead, self._to_do = lane.ahead, 0.0  # tokens to work for, ahead of the next chunk
        self._turn = int(lane.spread * ADVANCE)
        self.passed: list[Milestone] = []  # that were not reported yet
        self.planned: int | None = None  # the lines that it has in a finite pass
        with nullcontext() if state is None else restoring(lane.index):
            lines, self.row = lines_taken(state, data.lines, data.lanes)
            self._iterator = data.lines.open(lane, part(state, "anchor"))
        self.chunk: Chunk | None = None
        self._first = lines - self.row  # the number of its first line
        self._rows = 0  # of the chunk
        self.easy = 0  # rows of the chunk below this can be taken without anything else to do
        self._drop_anchor(0)
        self.passed = []

    @property
    def lines(self) -> int:
        """How many lines were taken."""
        return self._first + self.row

    def take(self) -> Row:
        while self.chunk is None or self.row >= self._rows:
            if self.chunk is not None:
                self._leave()
            try:
                self.chunk = self._iterator.read()
            except Exhausted:
                raise other_than_planned(self.lane, self._first) from None
            self._rows = len(self.chunk)
            tokens = count_tokens(self.chunk, self._columns)
            self.passed.append(Tally(self.lane, self._first, tokens))
            if self._ahead:
                items = self._iterator.next_items() or self._rows
                self._to_do = items * float(self.chunk.lengths().mean())
        chunk, row = self.chunk, self.row
        self.row += 1
        if self._to_do:  # what the next chunk needs, in as many parts as this one has lines
            part = self._to_do / (self._rows - row)
            self._to_do -= part
            self._ahead.advance(part)
        if self.lines % ADVANCE == self._turn:
            self._iterator.advance(ADVANCE)
        if self.row == self._rows:
            self._leave()
        elif not self._to_do and self.planned is None:
            to_turn = (self._turn - self.lines - 1) % ADVANCE
            self.easy = min(self._rows - 1, self.row + to_turn)
        if self.lines == self.planned:
            self._require_end()
        return chunk, row

    def _require_end(self) -> None:
        """Raise if a lane has more lines than were planned, which would be lost."""
        with suppress(Exhausted):
            if self.chunk is None:
                self._iterator.read()
            raise other_than_planned(self.lane, f"more than {self.lines}")

    def _leave(self) -> None:
        self.chunk, self.easy = None, 0
        self.row, self._first = self.row - self._rows, self._first + self._rows
        self._drop_anchor(self._rows)

    def _drop_anchor(self, taken: int) -> None:
        state = self._iterator.state(taken)
        try:
            text = json.dumps(state, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise StageError(
                f"the state of a stage must be plain data (numbers, strings, lists, dicts): {error}"
            ) from None
        self.anchor = Anchor(self.lane, self._first, text)
        self.passed.append(self.anchor)


def other_than_planned(lane: int, lines: object) -> DataError:
    """The error that a lane of a finite pass ends at another line than its plan says."""
    return DataError(
        f"lane {lane} has {lines} lines in this pass, which is not what was planned: documents have other lengths than "
        "when the plan was made, or a stage of your own does not always return the same items; if shards were "
        "replaced, remove the plan (pass-*.json beside the checkpoints, or in ~/.cache/fmsdata) and start again; if "
        "text was replaced, count its tokens again first, with `fmsdata index --tokenizer`"
    )


def restoring(lane: int) -> Restoring:
    """The context in which the saved state of a lane is read."""
    return Restoring(f"the state of lane {lane}")
