"""The stage `Pack`, and the table of its modes.

A new mode is a file of its own, an entry in `MODES` and its name in `fmsdata.core.options.Mode`. A
mode that does not keep the order of the documents has an iterator of its own.
"""

import copy
from typing import Protocol

from fmsdata.core.checks import flag, token, whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.options import Mode
from fmsdata.core.stage import Stage, endless, tokens_only
from fmsdata.core.state import State
from fmsdata.core.wording import counted, shown
from fmsdata.errors import ConfigError
from fmsdata.stages.pack import pad, split
from fmsdata.stages.pack.bestfit import BestFitMode
from fmsdata.stages.pack.cut import CutMode
from fmsdata.stages.windows import TOKENIZED, saved_windows

# The lines' worth of documents that `bestfit` packs together: at most WINDOW, and at most half of
# what a lane reads in an epoch, but at least LEAST. The first windows over text have FIRST lines.
WINDOW, LEAST, FIRST = 512, 32, 8
EPOCH_PER_WINDOW = 2


class PackMode(Protocol):
    """How documents become lines."""

    @property
    def fills_lines(self) -> bool:
        """Whether every line is full without padding."""

    def open(self, pack: "Pack", lane: Lane, state: State | None) -> StageIterator:
        """An iterator over lines."""

    def finish(self, pack: "Pack", lane: Lane, state: State) -> tuple[State, Chunk | None]:
        """The state at the next line with nothing in progress, and the tokens until there."""

    def start(self, below: State, before: State) -> State:
        """The state at the start of a line, where `before` was the state of any mode there."""


MODES: dict[str, PackMode] = {
    "split": CutMode(split.line_end, fills_lines=True),
    "pad": CutMode(pad.line_end, fills_lines=False),
    "bestfit": BestFitMode(),
}
BESTFIT_ONLY = ("crop", "max_documents", "window", "first_window")  # parameters that no other mode has


class Pack(Stage):
    """Lines of `seq_len` tokens.

    With `mode="split"`, documents continue over lines. With `mode="pad"`, a document that does not
    fit starts a new line, the rest of the line is filled with `pad`, and only documents that are
    longer than a line are split. `bol` and `eol` stand at the start and end of each line; where a
    line already starts or ends with that token, none is added. `mode="split"` ignores `pad`, so
    that changing the mode is one edit.

    With `mode="bestfit"`, documents are placed where they fit best, in windows of `window` lines'
    worth of tokens. `bol` is the BOS that begins every line, every document in it and every piece
    of a document that is longer than a line. A line holds at most `max_documents` of them. With
    `crop`, lines are not padded: a line gets a few tokens too many, and those are thrown away.

    A window that is not given has 512 lines, or half of what a lane reads in an epoch, but at least
    32. Over text that is tokenized while it is read, the windows of all lanes hold at most 32
    million tokens, and they begin with `first_window` lines, 8 if it is not given. A run keeps the
    numbers that it started with.

    >>> lines = Pack(docs, seq_len=4097, mode="split")                     # doctest: +SKIP
    >>> lines = Pack(docs, seq_len=4097, mode="bestfit", bol=1, pad=0)     # doctest: +SKIP
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
        crop: bool = False,
        max_documents: int | None = None,
        window: int | None = None,
        first_window: int | None = None,
    ) -> None:
        super().__init__(tokens_only(endless(below, "Pack"), "Pack"))
        if not isinstance(mode, str) or mode not in MODES:
            raise ConfigError(f"pack mode is {shown(mode)}; it must be {' or '.join(map(repr, MODES))}")
        self.mode = mode
        self.bol = token("bol", bol)
        self.eol = token("eol", eol)
        needed = 1 + (bol is not None) + (eol is not None)
        self.seq_len = whole("seq_len", seq_len)
        if self.seq_len < needed:
            raise ConfigError(
                f"seq_len is {seq_len}; a line needs room for at least {counted(needed, 'token')} (bol, eol and "
                "one of a document)"
            )
        self.crop = flag("crop", crop)
        self.max_documents = None if max_documents is None else whole("max_documents", max_documents, least=1)
        self._automatic = window is None  # a run chooses it, when it knows its lanes
        self.window = WINDOW if window is None else whole("pack window", window, least=1)
        self.first_window = None if first_window is None else whole("pack first_window", first_window, least=1)
        check_options(mode, bol=bol, eol=eol, pad=pad, crop=crop, max_documents=max_documents)
        padding = token("pad", pad)
        self._fill = padding or 0  # fills up the last line of a finite pass, in every mode
        # A value without effect is left out of the description, so a run may add or drop it.
        self.pad = None if MODES[mode].fills_lines or crop else padding

    def only_plans(self) -> bool:
        return self.below.only_plans()

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return MODES[self.mode].open(self, lane, state)

    @property
    def fill(self) -> int:
        """The token that fills up a finite pass: `pad` of any mode, or 0."""
        return self._fill

    def parameters(self) -> State:
        described = super().parameters()
        if self.first_window is None:  # as it was before there was such a parameter
            del described["first_window"]
        return {name: described[name] for name in described if self.mode == "bestfit" or name not in BESTFIT_ONLY}

    def settled(self, lanes: int, saved: State | None = None) -> Stage:
        stage = super().settled(lanes, saved)
        if not self._automatic or self.mode != "bestfit" or not isinstance(stage, Pack):
            return stage
        windows = saved_windows(saved, Pack.__name__) or stage._chosen_windows(lanes)
        if windows == (stage.window, stage.first_window):
            return stage
        stage = copy.copy(stage)
        stage.window, stage.first_window = windows
        return stage

    def _chosen_windows(self, lanes: int) -> tuple[int, int | None]:
        """The size of a window, and of the first."""
        lines = self.epoch_items()
        window = max(LEAST, min(WINDOW, lines // (lanes * EPOCH_PER_WINDOW))) if lines else WINDOW
        if not self.tokenizes():
            return window, self.first_window
        window = max(LEAST, min(window, TOKENIZED // (lanes * self.seq_len)))
        return window, FIRST if self.first_window is None else self.first_window

    def epoch_items(self) -> int:
        return self.size().tokens // self.seq_len

    def window_tokens(self) -> int:
        return self.seq_len * self.window_items() * super().window_tokens()

    def window_items(self) -> int:
        return self.window if self.mode == "bestfit" else 1


def check_options(
    mode: Mode, *, bol: int | None, eol: int | None, pad: int | None, crop: bool, max_documents: int | None
) -> None:
    """Raise unless the mode has these options, and all that it needs."""
    if mode != "bestfit" and (crop or max_documents is not None):
        name = "crop" if crop else "max_documents"
        raise ConfigError(f"pack mode {shown(mode)} has no `{name}`; remove it, or use mode 'bestfit'")
    if mode == "bestfit" and bol is None:
        raise ConfigError("pack mode 'bestfit' needs a `bol` token: the BOS that begins every line and every document")
    if mode == "bestfit" and eol is not None:
        raise ConfigError(
            f"pack mode 'bestfit' has no `eol` ({eol}): what ends a document is `documents.eos` (Delimit)"
        )
    if crop and max_documents is not None:
        raise ConfigError(
            f"crop fills every line, which {counted(max_documents, 'document')} may be too short for; "
            "give one of `crop` and `max_documents`"
        )
    if pad is None and not MODES[mode].fills_lines and not crop:
        raise ConfigError(f"pack mode {shown(mode)} needs a `pad` token" + (", or `crop`" if mode == "bestfit" else ""))
