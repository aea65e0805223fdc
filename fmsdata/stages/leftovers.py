"""The rest of a source: tokens that were planned into lines which no trainer took, because the mix was edited.

When a run goes on with another mix, the lines in progress are given up, and the tokens in them go back to where they
came from: each source first gives its rest, and then goes on. A rest is a place that the source can return to, and
which runs of tokens from there on are still to be given: no tokens, and nothing that depends on the old mix.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from fmsdata.core.chunk import BEGINS, CONTINUED, DOCUMENT, LENGTH, POSITION, TAIL, UNFINISHED, Buffer, Chunk
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage
from fmsdata.core.state import State, number, part, signed_number
from fmsdata.errors import StateError
from fmsdata.stages.token_run import Run

Runs: TypeAlias = list[tuple[int, int]]  # from which token up to which, in order, apart from each other


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Which tokens of a source are still to be given before it goes on, counted from a place of it."""

    start: State
    runs: Runs
    length: int  # tokens from there to where the source goes on

    @staticmethod
    def read(told: Any) -> "Rest | None":
        """The rest that a state tells of, if there is one."""
        if told is None:
            return None
        try:
            runs = [(int(begin), int(end)) for begin, end in told["runs"]]
            places = [place for run in runs for place in run]
            if not runs or places != sorted(set(places)) or not 0 <= places[0] < places[-1] <= told["length"]:
                raise ValueError
            return Rest(start=dict(told["start"]), runs=runs, length=int(told["length"]))
        except (TypeError, ValueError, KeyError):
            raise StateError(f"'rest' is {told!r} where the rest of a source belongs: the state was edited") from None

    def plain(self) -> State:
        return {"start": self.start, "runs": self.runs, "length": self.length}

    @property
    def tokens(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    def after(self, place: int) -> "Rest | None":
        """What is left of it behind a place."""
        runs = [(max(begin, place), end) for begin, end in self.runs if end > place]
        return replace(self, runs=runs) if runs else None


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """Where a source of a mixture stands in a lane."""

    taken: int = 0  # tokens
    shift: int = 0  # its lead is that much more than it has given: less, after weights changed
    rest: Rest | None = None
    below: State | None = None


def pack_sources(sources: Mapping[str, SourceState]) -> State:
    """The state of a mixture. What few lanes have, after an edit, is one text, so that it costs the others nothing."""
    edited = {
        name: {"shift": one.shift, "rest": None if one.rest is None else one.rest.plain()}
        for name, one in sources.items()
        if one.shift or one.rest
    }
    return {
        "sources": {name: {"taken": one.taken, "below": one.below} for name, one in sources.items()},
        "edited": json.dumps(edited, separators=(",", ":")) if edited else "",
    }


def unpack_sources(state: State) -> dict[str, SourceState]:
    """The reverse."""
    try:
        edited = dict(json.loads(state["edited"])) if state["edited"] else {}
    except (KeyError, TypeError, ValueError):
        raise StateError(f"'edited' is {state.get('edited')!r}: the state is torn or was edited by hand") from None
    sources = {}
    for name in part(state, "sources") or {}:
        mine = part(part(state, "sources"), name)
        more = part(edited, name) if name in edited else None
        sources[name] = SourceState(
            taken=number(mine, "taken"),
            shift=signed_number(more, "shift"),
            rest=Rest.read(more["rest"]) if more else None,
            below=part(mine, "below"),
        )
    return sources


class WithRest:
    """A source that first gives its rest. In the marks of a lane that wants them, tokens count from where that starts.

    It has a place where other iterators have a state: the rest, and the source's state behind it.
    """

    def __init__(self, stage: Stage, lane: Lane, rest: Rest | None, below: State | None) -> None:
        self._marks = lane.source if lane.marks else None
        self._rest = rest
        self._behind = below  # where the source goes on behind the rest
        self._stage, self._lane = stage, lane
        self._iterator = stage.open(lane, below if rest is None else rest.start)
        self._place = 0  # tokens from where it starts to the end of the chunk that was read last
        self._ends: Ints = np.zeros(1, np.int64)  # of the rest's items, where each ends; and before that, the place

    def read(self) -> Chunk:
        while self._rest is not None:
            self._ends = self._ends[-1:]
            if self._place < self._rest.runs[-1][1]:
                chunk = self._rest_of(self._rest, self._marked(self._iterator.read()))
                if len(chunk):
                    return chunk
            else:
                self._place, self._rest = self._rest.length, None
                self._iterator = self._stage.open(self._lane, self._behind)
        return self._marked(self._iterator.read())

    def place(self, taken: int) -> tuple[Rest | None, State | None]:
        """The place after the first `taken` items of the chunk that was read last."""
        if self._rest is None:
            return None, self._iterator.state(taken)
        return self._rest.after(int(self._ends[taken])), self._behind

    def _rest_of(self, rest: Rest, chunk: Chunk) -> Chunk:
        """The parts of these documents that are in the rest."""
        run = Run(chunk)
        first = self._place - int(run.document_ends[-1])
        begins, ends = np.array(rest.runs).T - first
        inner = np.concatenate([begins, ends])
        edges = np.unique(
            np.concatenate([[0], run.document_ends, inner[(inner > 0) & (inner < run.document_ends[-1])]])
        )
        which = np.searchsorted(begins, edges[:-1], side="right") - 1
        kept = np.flatnonzero((which >= 0) & (edges[:-1] < ends[which]))
        if not len(kept):
            return chunk.slice(0, 0)
        parts = run.cut(edges).take(kept)
        spans = parts.spans.copy()
        spans[parts.first[:-1][~np.isin(edges[:-1][kept], [0, *run.document_ends])], BEGINS] = 1 | CONTINUED
        spans[parts.first[1:][~np.isin(edges[1:][kept], run.document_ends)] - 1, BEGINS] |= UNFINISHED
        self._ends = np.append(self._ends[-1], edges[1:][kept] + first)
        return Chunk(parts.buffers, spans, parts.first)

    def _marked(self, chunk: Chunk) -> Chunk:
        """Count the tokens, and, where marks are wanted, tell of each which it is."""
        before = self._place
        lengths = chunk.lengths()
        self._place += int(lengths.sum())
        if self._marks is None:
            return chunk
        if len(chunk.spans) > len(chunk) or chunk.spans[:, TAIL].any():
            tokens = np.concatenate([item.tokens for item in chunk])
            spans = np.zeros((len(chunk), chunk.spans.shape[1]), np.int64)
            spans[:, 1], spans[:, LENGTH], spans[:, BEGINS] = offsets(lengths)[:-1], lengths, 1
            chunk = Chunk([Buffer(tokens)], spans, np.arange(len(chunk) + 1))
        spans = chunk.spans.copy()
        spans[:, DOCUMENT] = 0
        spans[:, POSITION] = before + offsets(lengths)[:-1]
        buffers = [Buffer(one.tokens, self._marks) for one in chunk.buffers]
        return Chunk(buffers, spans, chunk.first)


def marked_runs(lines: Chunk) -> dict[str, Runs]:
    """Which tokens of each source are in lines that were read with marks."""
    spans = lines.spans[lines.spans[:, DOCUMENT] >= 0]
    stored = spans[:, LENGTH] - (spans[:, TAIL] > 0)
    runs: dict[str, Runs] = {}
    for (buffer, begin), length in zip(spans[:, [0, POSITION]].tolist(), stored.tolist(), strict=True):
        if length:
            runs.setdefault(lines.buffers[buffer].source, []).append((begin, begin + length))
    return {source: merged(some) for source, some in runs.items()}


def merged(runs: Runs) -> Runs:
    """The same runs, those that touch as one.

    >>> merged([(7, 9), (0, 3), (3, 5)])
    [(0, 5), (7, 9)]
    """
    out: Runs = []
    for begin, end in sorted(runs):
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        else:
            out.append((begin, end))
    return out
