"""TODO."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fmsdata.core.chunk import BUFFER, DOCUMENT, LENGTH, TAIL, Chunk
from fmsdata.core.keys import Ints
from fmsdata.core.lane import full_name
from fmsdata.core.stage import Stage
from fmsdata.core.state import State, number
from fmsdata.stages.mixture import Mixture

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable


class Tally(NamedTuple):
    """The stored tokens per source in the first 0, 1, 2, ... lines of a chunk that a lane began after `lines` lines.

    The columns are the sources of the pipeline in the order of their names, and one for all others.
    """

    lane: int
    lines: int
    tokens: Ints


def count_tokens(chunk: Chunk, columns: Mapping[str, int]) -> Ints:
    """The table of a tally: (lines + 1, sources + 1)."""
    width, spans = len(columns) + 1, chunk.spans
    column = np.array([columns.get(buffer.source, width - 1) for buffer in chunk.buffers], np.int64)
    stored = (spans[:, LENGTH] - (spans[:, TAIL] > 0)) * (spans[:, DOCUMENT] >= 0)
    row = np.repeat(np.arange(width, width * len(chunk.first), width), np.diff(chunk.first))
    cells = np.bincount(row + column.take(spans[:, BUFFER]), stored, width * len(chunk.first))
    return np.cumsum(cells.reshape(-1, width), axis=0).astype(np.int64)


class Tallies:
    """What was taken of some lanes. Never changed, but replaced, as places are."""

    def __init__(self, before: Ints, current: Mapping[int, Tally], refilled: Ints) -> None:
        self._before = before  # tokens of all lanes in front of their tallies
        self._current = current
        self.refilled = refilled  # tokens of lines that were taken before the lanes were opened, in their tallies

    @classmethod
    def at(cls, data: "Rescalable", anchors: Iterable[str]) -> "Tallies":
        """Of lanes that stand at these states and have read nothing yet."""
        before = np.zeros(len(data.columns) + 1, np.int64)
        for anchor in anchors:
            for name, tokens in _taken(data.lines, json.loads(anchor)):
                before[data.columns.get(name, -1)] += tokens
        return cls(before, {}, np.zeros_like(before))

    def after(self, passed: Sequence[Tally], lines: Mapping[int, int]) -> "Tallies":
        """These tallies one step on, in which chunks were begun. `lines` are those taken before the step."""
        if not passed:
            return self
        before, current, refilled = self._before.copy(), dict(self._current), self.refilled
        for tally in passed:
            last = current.get(tally.lane)
            if last is not None:  # the lane got as far as here, or was opened here again
                before += last.tokens[tally.lines - last.lines]
            if tally.lane not in self._current:
                taken = min(max(0, lines[tally.lane] - tally.lines), len(tally.tokens) - 1)
                refilled = refilled + tally.tokens[taken]
            current[tally.lane] = tally
        return Tallies(before, current, refilled)

    def tokens(self, lines: Mapping[int, int]) -> Ints:
        """Per column, the tokens of all lanes when this many lines of each are taken."""
        rows = [tally.tokens[lines[lane] - tally.lines] for lane, tally in self._current.items()]
        total: Ints = np.concatenate([self._before, *rows]).reshape(len(rows) + 1, -1).sum(axis=0)
        return total


def _taken(stage: Stage, state: State, source: str = "") -> Iterator[tuple[str, int]]:
    """What mixtures have taken of each source, according to a state of this stage."""
    if isinstance(stage, Mixture):
        for name, mine in state["sources"].items():  # also those that were removed from the mix
            full = full_name(source, name)
            inner = list(_taken(stage.sources[name], mine["below"], full)) if name in stage.sources else []
            yield from inner or [(full, number(mine, "taken"))]
        return
    for child in stage.children().values():
        below = state.get("below")  # a stage that keeps no state of its own tells that of the one below
        yield from _taken(child, below if isinstance(below, dict) else state, source)
