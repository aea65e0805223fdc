"""Leftovers: tokens that were planned into lines which no trainer took, because the mix was edited.

When a run resumes with a different mix, the lines in progress are given up and the tokens in them
go back to their sources: each source first gives its leftover, and then continues. A leftover is a
position that the source can return to, and the ranges of tokens from there on that it still has to
give. It holds no tokens, and nothing that depends on the old mix.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from fmsdata.core.chunk import Chunk
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.lane import Lane
from fmsdata.core.ranges import merge
from fmsdata.core.spans import (
    BEGINS,
    BUFFER,
    CONTINUED,
    DOCUMENT,
    LENGTH,
    POSITION,
    START,
    TAIL,
    UNFINISHED,
    Buffer,
)
from fmsdata.core.stage import Stage
from fmsdata.core.state import EDITED, State, is_count
from fmsdata.core.wording import shown
from fmsdata.errors import StateError
from fmsdata.stages.pack.token_run import TokenRun

TokenRanges: TypeAlias = list[tuple[int, int]]  # ranges of tokens: in order, with gaps between them


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """The tokens that a source gives before it continues, as offsets from a position in it."""

    start: State
    runs: TokenRanges
    length: int  # tokens from `start` to where the source continues

    @staticmethod
    def parse(saved: Any) -> "Leftover | None":
        """The leftover in a saved state, if there is one."""
        if saved is None:
            return None
        try:
            start, runs, length = saved["start"], [(begin, end) for begin, end in saved["runs"]], saved["length"]
            edges = [0, *(edge for run in runs for edge in run), length]
            valid = isinstance(start, dict) and bool(runs) and all(map(is_count, edges))
            if valid and edges[1:-1] == sorted(set(edges[1:-1])) and edges[-2] <= length:
                return Leftover(start=start, runs=runs, length=length)
        except (TypeError, ValueError, KeyError):
            pass
        raise StateError(f"'rest' is {shown(saved)}, expected the leftover of a source: {EDITED}")

    def plain(self) -> State:
        return {"start": self.start, "runs": self.runs, "length": self.length}

    @property
    def tokens(self) -> int:
        return sum(end - begin for begin, end in self.runs)

    def after(self, offset: int) -> "Leftover | None":
        """The part of it from an offset on."""
        runs = [(max(begin, offset), end) for begin, end in self.runs if end > offset]
        return replace(self, runs=runs) if runs else None


NO_ENDS: Ints = np.zeros(1, np.int64)  # of a chunk that was not read yet


class LeftoverFirst:
    """Reads a source in a lane: first its leftover, then where it continues.

    It has a position where other iterators have a state: the leftover, and the state of the source
    after it. If the lane asks for marks, they count tokens from where this iterator started.
    """

    def __init__(self, stage: Stage, lane: Lane, leftover: Leftover | None, below: State | None) -> None:
        self._marks = lane.source if lane.marks else None
        self._leftover = leftover
        self._after = below  # where the source continues after the leftover
        self._stage, self._lane = stage, lane
        self._iterator = stage.open(lane, below if leftover is None else leftover.start)
        self._read = 0  # tokens from the start to the end of the last chunk
        # Where each item of a leftover's chunk ends; the first entry is where the chunk starts.
        self._ends = NO_ENDS

    def read(self) -> Chunk:
        while self._leftover is not None:
            self._ends = self._ends[-1:]
            if self._read < self._leftover.runs[-1][1]:
                chunk = self._part_in(self._leftover, self._marked(self._iterator.read()))
                if len(chunk):
                    return chunk
            else:
                self._read, self._leftover = self._leftover.length, None
                self._iterator = self._stage.open(self._lane, self._after)
        return self._marked(self._iterator.read())

    def read_on(self, kept: int) -> Chunk | None:
        """The last chunk from item `kept` on, together with the next one; None if that is not possible."""
        return None if self._leftover is not None or self._marks is not None else self._iterator.read_on(kept)

    def position(self, taken: int) -> tuple[Leftover | None, State | None]:
        """The position after the first `taken` items of the last chunk."""
        if self._leftover is None:
            return None, self._iterator.state(taken)
        return self._leftover.after(int(self._ends[taken])), self._after

    def _part_in(self, leftover: Leftover, chunk: Chunk) -> Chunk:
        """The parts of these documents that are in the leftover."""
        run = TokenRun(chunk)
        first = self._read - len(run)
        begins, ends = np.array(leftover.runs).T - first
        inner = np.concatenate([begins, ends])
        edges = np.unique(np.concatenate([[0], run.document_ends, inner[(inner > 0) & (inner < len(run))]]))
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
        """Count the tokens.

        If the lane asks for marks, replace provenance by offsets from the start.
        """
        if self._marks is None and self._leftover is None:
            return chunk
        before = self._read
        lengths = chunk.lengths()
        self._read += int(lengths.sum())
        if self._marks is None:
            return chunk
        if len(chunk.spans) > len(chunk) or chunk.spans[:, TAIL].any():
            tokens = np.concatenate([item.tokens for item in chunk])
            spans = np.zeros((len(chunk), chunk.spans.shape[1]), np.int64)
            spans[:, START], spans[:, LENGTH], spans[:, BEGINS] = offsets(lengths)[:-1], lengths, 1
            chunk = Chunk([Buffer(tokens)], spans, np.arange(len(chunk) + 1))
        spans = chunk.spans.copy()
        spans[:, DOCUMENT] = 0
        spans[:, POSITION] = before + offsets(lengths)[:-1]
        buffers = [Buffer(buffer.tokens, self._marks) for buffer in chunk.buffers]
        return Chunk(buffers, spans, chunk.first)


def marked_runs(lines: Chunk) -> dict[str, TokenRanges]:
    """The tokens of each source that are in lines, where the lines were read with marks."""
    spans = lines.spans[lines.spans[:, DOCUMENT] >= 0]
    stored = spans[:, LENGTH] - (spans[:, TAIL] > 0)
    runs: dict[str, TokenRanges] = {}
    for (buffer, begin), length in zip(spans[:, [BUFFER, POSITION]].tolist(), stored.tolist(), strict=True):
        if length:
            runs.setdefault(lines.buffers[buffer].source, []).append((begin, begin + length))
    return {source: list(merge(unmerged)) for source, unmerged in runs.items()}
