"""Tallies: the tokens consumed of each source, counted once per chunk.

A lane that reads a chunk of lines knows in which order they will be taken. So it counts the tokens
of each source in the first 0, 1, 2, ... lines once, for the whole chunk: a tally. It travels with
the lines, and the loader looks up how many of them were taken. Nothing is counted line by line, and
lines that were only read ahead do not count.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fmsdata.core.chunk import Chunk, stored_tokens
from fmsdata.core.keys import Ints
from fmsdata.core.lane import full_name
from fmsdata.core.spans import BEGINS, BUFFER, CROPPED
from fmsdata.core.stage import Stage
from fmsdata.core.state import State, number
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.pack.bestfit import LineCounts

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable


class Tally(NamedTuple):
    """The stored tokens per source in the first 0, 1, 2, ... lines of a chunk.

    The lane began the chunk after `lines` lines. The columns are the sources of the pipeline,
    sorted by name, one more for all other sources, and the last for tokens that were thrown away.
    """

    lane: int
    lines: int
    tokens: Ints


def count_tokens(chunk: Chunk, columns: Mapping[str, int]) -> Ints:
    """The table of a tally: (lines + 1, sources + 2)."""
    width, spans = len(columns) + 2, chunk.spans
    column = np.array([columns.get(buffer.source, width - 2) for buffer in chunk.buffers], np.int64)
    row = np.repeat(np.arange(width, width * len(chunk.first), width), np.diff(chunk.first))
    cells = np.bincount(row + column.take(spans[:, BUFFER]), stored_tokens(spans), width * len(chunk.first))
    cells[2 * width - 1 :: width] = spans[chunk.first[1:] - 1, BEGINS] >> CROPPED
    return np.cumsum(cells.reshape(-1, width), axis=0).astype(np.int64)


class Tallies:
    """The current tally of each lane, and the tokens before them. Never changed, only replaced."""

    def __init__(self, before: Ints, current: Mapping[int, Tally], refilled: Ints) -> None:
        self._before = before  # tokens of all lanes before their current tallies
        self._current = current
        self.refilled = refilled  # tokens in current tallies that were taken before the lanes were opened

    @classmethod
    def at(cls, data: "Rescalable", anchors: Iterable[str]) -> "Tallies":
        """For lanes that are at these states and have read nothing yet."""
        before = np.zeros(len(data.columns) + 2, np.int64)
        for anchor in anchors:
            for name, tokens in _taken(data.lines, json.loads(anchor)):
                before[-1 if name is None else data.columns.get(name, -2)] += tokens
        return cls(before, {}, np.zeros_like(before))

    def after(self, passed: Sequence[Tally], lines: Mapping[int, int]) -> "Tallies":
        """The tallies one step later, in which these were passed.

        `lines` were taken before the step.
        """
        if not passed:
            return self
        before, current, refilled = self._before.copy(), dict(self._current), self.refilled
        for tally in passed:
            last = current.get(tally.lane)
            if last is not None:  # the lane has read up to here, or was opened here again
                before += last.tokens[tally.lines - last.lines]
            if tally.lane not in self._current:
                taken = min(max(0, lines[tally.lane] - tally.lines), len(tally.tokens) - 1)
                refilled = refilled + tally.tokens[taken]
            current[tally.lane] = tally
        return Tallies(before, current, refilled)

    def tokens(self, lines: Mapping[int, int]) -> Ints:
        """Per column, the tokens of all lanes after this many lines of each."""
        rows = [tally.tokens[lines[lane] - tally.lines] for lane, tally in self._current.items()]
        total: Ints = np.concatenate([self._before, *rows]).reshape(len(rows) + 1, -1).sum(axis=0)
        return total


def _taken(stage: Stage, state: State, source: str = "") -> Iterator[tuple[str | None, int]]:
    """The tokens taken of each source, from a state of this stage; None for those thrown away.

    A mixture counts what it has given, and best-fit packing how much of that is not in lines yet.
    """
    if isinstance(stage, Pack) and stage.mode == "bestfit":
        counts = LineCounts.of(state)
        yield from counts.extra.items()
        yield None, counts.cropped
    if isinstance(stage, Mixture):
        for name, saved in state["sources"].items():  # also sources that were removed from the mix
            full = full_name(source, name)
            inner = list(_taken(stage.sources[name], saved["below"], full)) if name in stage.sources else []
            yield from inner or [(full, number(saved, "taken"))]
        return
    for child in stage.children().values():
        below = state.get("below")  # a stage without a state of its own has the state of the stage below
        yield from _taken(child, below if isinstance(below, dict) else state, source)
