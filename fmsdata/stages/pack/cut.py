"""Packing for modes that keep the order of the documents: one run of tokens, cut into lines.

No token is lost or repeated, and the state is a position in the run: the state below before the
document in progress, and how many of its tokens are used.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane
from fmsdata.core.state import State, number, part
from fmsdata.errors import StateError
from fmsdata.stages.pack.token_run import TokenRun

if TYPE_CHECKING:
    from fmsdata.stages.pack.pack import Pack


class CutMode(NamedTuple):
    """A mode that cuts the run of tokens into lines.

    `line_end(run, start, room)` returns where a line ends that starts at `start` and has room for
    `room` tokens of documents, or None if that takes more documents to decide.
    """

    line_end: Callable[[TokenRun, int, int], int | None]
    fills_lines: bool  # whether every line is full without padding

    def open(self, pack: "Pack", lane: Lane, state: State | None) -> StageIterator:
        return _CutIterator(self, pack, lane, state)

    def finish(self, pack: "Pack", lane: Lane, state: State) -> tuple[State, Chunk | None]:
        """The state after the document in progress, and its part that is in no line yet."""
        used = number(state, "used")
        if not used:
            return state, None
        iterator = pack.below.open(lane, part(state, "below"))
        document = TokenRun(iterator.read().slice(0, 1))
        if used >= len(document):
            raise StateError(f"'used' is {used}, but the document has only {len(document)} tokens")
        return self.start(iterator.state(1), state), document.cut(np.array([used, len(document)]))

    def start(self, below: State, before: State) -> State:  # noqa: ARG002
        """The state at the start of a line that starts with a document."""
        return {"used": 0, "below": below}


class LineCuts(NamedTuple):
    """Where lines start and end in a run, and which of them need a `bol` or an `eol` inserted."""

    positions: Ints  # where each line starts, and where the last ends
    heads: list[bool]
    tails: list[bool]


def cut_lines(run: TokenRun, start: int, mode: CutMode, pack: "Pack") -> LineCuts:
    """All lines that the run holds from `start` on."""
    if mode.fills_lines and pack.bol is None and pack.eol is None:
        return LineCuts(np.arange(start, len(run) + 1, pack.seq_len), [], [])
    positions, heads, tails = [start], [], []
    while start < len(run):
        head = pack.bol is not None and run.token(start) != pack.bol
        room = pack.seq_len - head
        end, tail = mode.line_end(run, start, room), False
        if end is not None and pack.eol is not None and run.token(end - 1) != pack.eol:
            end = mode.line_end(run, start, room - 1)
            tail = end is not None and (mode.fills_lines or run.token(end - 1) != pack.eol)
        if end is None:
            break
        positions.append(start := end)
        heads.append(head)
        tails.append(tail)
    return LineCuts(np.array(positions, np.int64), heads, tails)


class _CutIterator(StageIterator):
    def __init__(self, mode: CutMode, pack: "Pack", lane: Lane, state: State | None) -> None:
        self._mode, self._pack = mode, pack
        self._below = pack.below.open(lane, part(state, "below"))
        self._pending: Chunk | None = None  # documents that are not in lines yet; they start at the anchor
        self._anchor: State = {"used": number(state, "used"), "below": self._below.state(0)}
        self._run: TokenRun | None = None
        self._positions: Ints = np.zeros(1, np.int64)  # of the lines of the chunk, in the run
        self._carried = 0  # documents of the run that are from earlier chunks of the stage below

    def read(self) -> Chunk:
        if self._run is not None:
            end = int(self._positions[-1])
            self._anchor = self._state_at(end)
            document, _ = self._run.document_at(end)
            documents = self._run.documents
            self._pending = documents.slice(document, len(documents)).compact() if document < len(documents) else None
        carried = [self._pending] if self._pending else []
        while True:
            self._carried = sum(map(len, carried))
            try:
                below = self._below.read()
            except Exhausted:
                if not carried:
                    self._run = None
                    raise
                return self._last_line(TokenRun(carried[0]))
            self._run = run = TokenRun(Chunk.join([*carried, below]))
            used = self._anchor["used"]
            if used >= run.document_ends[0]:
                raise StateError(f"'used' is {used}, but the document has only {run.document_ends[0]} tokens")
            cuts = cut_lines(run, used, self._mode, self._pack)
            self._positions = cuts.positions
            if len(cuts.positions) > 1:
                return self._finish(run.cut(cuts.positions), cuts)
            carried = [run.documents]

    def state(self, taken: int) -> State:
        return self._anchor if taken == 0 else self._state_at(int(self._positions[taken]))

    def _state_at(self, position: int) -> State:
        """The state where a line starts.

        Only the first line starts in documents from earlier chunks; its state is the anchor.
        """
        if self._run is None:
            return self._anchor
        document, used = self._run.document_at(position)
        return {"used": used, "below": self._below.state(document - self._carried)}

    def _last_line(self, run: TokenRun) -> Chunk:
        """What is left at the end of a finite pass: less than a line, filled up with padding."""
        start, end = self._anchor["used"], len(run)
        self._run, self._positions = run, np.array([start, end], np.int64)
        head = self._pack.bol is not None and run.token(start) != self._pack.bol
        tail = self._pack.eol is not None and run.token(end - 1) != self._pack.eol
        line = self._finish(run.cut(self._positions), LineCuts(self._positions, [head], [tail]))
        return line.padded(self._pack.seq_len, self._pack.fill)

    def _finish(self, lines: Chunk, cuts: LineCuts) -> Chunk:
        pack = self._pack
        if pack.bol is not None:
            lines = lines.with_heads(np.array(cuts.heads), pack.bol)
        if pack.eol is not None:
            lines = lines.with_tails(np.array(cuts.tails), pack.eol)
        return lines if pack.pad is None else lines.padded(pack.seq_len, pack.pad)
