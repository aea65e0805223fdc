"""Pack: documents into lines of fixed length.

The documents of a lane, one behind the other, are one long run of tokens. Both modes cut that run into lines
and differ only in where: `split` cuts when the line is full, `pad` at the last end of a document that still
fits. So no token is lost or repeated, and the state is a place in the run: the state below before the
document in progress, and how much of it is used.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from fmsdata.core.checks import token, whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage, StageIterator, endless
from fmsdata.core.state import State, number, part
from fmsdata.errors import ConfigError, StateError
from fmsdata.stages.token_run import Run

Mode = Literal["split", "pad"]


class Pack(Stage):
    """Lines of `seq_len` tokens.

    `split` lets documents run on over lines. `pad` starts a new line where a document does not fit, fills up
    with `pad`, and splits only documents longer than a line. `bol` and `eol` stand at the start and end of
    each line, unless the token there is the same already.

    >>> lines = Pack(docs, seq_len=4097, mode="split")     # doctest: +SKIP
    """

    def __init__(
        self,
        below: Stage,
        *,
        seq_len: int,
        mode: Mode = "split",
        bol: int | None = None,
        eol: int | None = None,
        pad: int | None = None,
    ) -> None:
        super().__init__(endless(below, "Pack"))
        if mode not in MODES:
            raise ConfigError(f"pack mode {mode!r}: use {' or '.join(map(repr, MODES))}")
        self.mode = mode
        self.bol = token("bol", bol)
        self.eol = token("eol", eol)
        self.pad = token("pad", pad)
        needed = 1 + (bol is not None) + (eol is not None)
        self.seq_len = whole("seq_len", seq_len)
        if self.seq_len < needed:
            raise ConfigError(
                f"seq_len is {seq_len}; a line needs room for at least {needed} tokens (bol, eol and one of a document)"
            )
        check_pad(mode, pad)

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return _PackIterator(self, lane, state)

    def window_tokens(self) -> int:
        return self.seq_len * super().window_tokens()


def check_pad(mode: Mode, pad: int | None) -> None:
    """Raise unless there is a token to pad with exactly where lines are padded."""
    if (pad is None) == (mode == "pad"):
        raise ConfigError(
            "pack mode 'pad' needs a `pad` token" if pad is None else f"pad={pad} is only for pack mode 'pad'"
        )


def _split(run: Run, place: int, room: int) -> int | None:
    end = place + room
    return end if end <= run.document_ends[-1] else None


def _pad(run: Run, place: int, room: int) -> int | None:
    ends = run.document_ends
    full = place + room
    fitting = int(np.searchsorted(ends, full, side="right"))
    if fitting == len(ends) and ends[-1] < full:
        return None
    end = int(ends[fitting - 1]) if fitting else 0
    return end if end > place else full


# Where a line that starts at `place` and has `room` for tokens of documents ends, or None if that takes more
# documents to tell. A mode that does not keep the documents' order, such as best-fit, is an iterator of
# its own.
MODES: dict[str, Callable[[Run, int, int], int | None]] = {"split": _split, "pad": _pad}


class _PackIterator(StageIterator):
    def __init__(self, pack: Pack, lane: Lane, state: State | None) -> None:
        self._pack = pack
        self._fit = MODES[pack.mode]
        self._below = pack.below.open(lane, part(state, "below"))
        self._pending: Chunk | None = None  # documents that are not in lines yet; the anchor is where they start
        self._anchor: State = {"used": number(state, "used"), "below": self._below.state(0)}
        self._run: Run | None = None
        # Where in the run each line of the chunk starts, and where the last ends.
        self._places: Ints = np.zeros(1, np.int64)
        self._held = 0  # documents of the run that are not of the chunk below

    def read(self) -> Chunk:
        if self._run is not None:
            end = int(self._places[-1])
            self._anchor = self._state_at(end)
            document, _ = self._run.document_at(end)
            documents = self._run.documents
            self._pending = documents.slice(document, len(documents)).compact() if document < len(documents) else None
        held = [self._pending] if self._pending else []
        while True:
            self._held = sum(map(len, held))
            held.append(self._below.read())
            self._run = Run(Chunk.join(held))
            if self._anchor["used"] >= self._run.document_ends[0]:
                raise StateError(
                    f"{self._anchor['used']} tokens are used of a document of {self._run.document_ends[0]}"
                )
            self._places, heads, tails = self._lines(self._run, self._anchor["used"])
            if len(self._places) > 1:
                return self._finish(self._run.cut(self._places), heads, tails)
            held = [self._run.documents]

    def state(self, taken: int) -> State:
        return self._anchor if taken == 0 else self._state_at(int(self._places[taken]))

    def _state_at(self, place: int) -> State:
        """Only the first line starts in documents held over from earlier chunks; that state is the anchor."""
        if self._run is None:
            return self._anchor
        document, used = self._run.document_at(place)
        return {"used": used, "below": self._below.state(document - self._held)}

    def _lines(self, run: Run, place: int) -> tuple[Ints, list[bool], list[bool]]:
        """Where lines start and end, and which need a `bol` or an `eol` put in."""
        if self._fit is _split and self._pack.bol is None and self._pack.eol is None:
            return np.arange(place, int(run.document_ends[-1]) + 1, self._pack.seq_len), [], []
        places, heads, tails = [place], [], []
        while place < run.document_ends[-1]:
            head = self._pack.bol is not None and run.token(place) != self._pack.bol
            room = self._pack.seq_len - head
            end, tail = self._fit(run, place, room), False
            if end is not None and self._pack.eol is not None and run.token(end - 1) != self._pack.eol:
                end = self._fit(run, place, room - 1)
                tail = end is not None and (self._fit is _split or run.token(end - 1) != self._pack.eol)
            if end is None:
                break
            places.append(place := end)
            heads.append(head)
            tails.append(tail)
        return np.array(places, np.int64), heads, tails

    def _finish(self, lines: Chunk, heads: list[bool], tails: list[bool]) -> Chunk:
        pack = self._pack
        if pack.bol is not None:
            lines = lines.with_heads(np.array(heads), pack.bol)
        if pack.eol is not None:
            lines = lines.with_tails(np.array(tails), pack.eol)
        return lines if pack.pad is None else lines.padded(pack.seq_len, pack.pad)
