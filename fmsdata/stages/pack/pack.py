"""The stage `Pack`, and the table of its modes.

A new mode is a file of its own, an entry in `MODES` and its name in `fmsdata.core.options.Mode`. A
mode that does not keep the order of the documents has an iterator of its own.
"""

from typing import Protocol

from fmsdata.core.checks import token, whole
from fmsdata.core.iterator import StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.options import Mode
from fmsdata.core.stage import Stage, endless
from fmsdata.core.state import State
from fmsdata.errors import ConfigError
from fmsdata.stages.pack import pad, split
from fmsdata.stages.pack.cut import CutMode


class PackMode(Protocol):
    """How documents become lines."""

    @property
    def fills_lines(self) -> bool:
        """Whether every line is full without padding."""

    def open(self, pack: "Pack", lane: Lane, state: State | None) -> StageIterator:
        """An iterator over lines."""


MODES: dict[str, PackMode] = {
    "split": CutMode(split.line_end, fills_lines=True),
    "pad": CutMode(pad.line_end, fills_lines=False),
}


class Pack(Stage):
    """Lines of `seq_len` tokens.

    With `mode="split"`, documents continue over lines. With `mode="pad"`, a document that does not
    fit starts a new line, the rest of the line is filled with `pad`, and only documents that are
    longer than a line are split. `bol` and `eol` stand at the start and end of each line; where a
    line already starts or ends with that token, none is added. `mode="split"` ignores `pad`, so that
    changing the mode is one edit.

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
            raise ConfigError(f"pack mode is {mode!r}; it must be {' or '.join(map(repr, MODES))}")
        self.mode = mode
        self.bol = token("bol", bol)
        self.eol = token("eol", eol)
        needed = 1 + (bol is not None) + (eol is not None)
        self.seq_len = whole("seq_len", seq_len)
        if self.seq_len < needed:
            raise ConfigError(
                f"seq_len is {seq_len}; a line needs room for at least {needed} tokens (bol, eol and one of a document)"
            )
        check_pad(mode, pad)
        padding = token("pad", pad)
        # What has no effect is no part of the description: a run may add or drop it.
        self.pad = None if MODES[mode].fills_lines else padding

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return MODES[self.mode].open(self, lane, state)

    def epoch_items(self) -> int:
        return self.size().tokens // self.seq_len

    def window_tokens(self) -> int:
        return self.seq_len * super().window_tokens()


def check_pad(mode: Mode, pad: int | None) -> None:
    """Raise unless there is a token to pad with where lines are padded."""
    if pad is None and not MODES[mode].fills_lines:
        raise ConfigError(f"pack mode {mode!r} needs a `pad` token")
