"""Tokenize: documents of text become documents of tokens while they are read.

One document in, one document out, or none: the state is that of the stage below. Documents are
encoded in small pieces of a block. A lane that takes lines has the next pieces encoded meanwhile, so
that a window is not tokenized at the moment when it is needed.
"""

import copy
import os
import shlex
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.core.chunk import Chunk
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane, Pace
from fmsdata.core.memory import Source
from fmsdata.core.spans import BEGINS, BUFFER, COLUMNS, DOCUMENT, LENGTH, POSITION, START, TAIL, Buffer
from fmsdata.core.stage import Size, Stage
from fmsdata.core.state import State
from fmsdata.core.tokens import Tokens
from fmsdata.core.wording import counted
from fmsdata.corpus.tokenizer import FILE, open_tokenizer, token_type
from fmsdata.corpus.tokenizer_threads import THREADS
from fmsdata.errors import ConfigError, DataError, FmsdataError, StageError
from fmsdata.stages.shard_reader import TOKEN_BYTES, ShardReader
from fmsdata.stages.strip import checked_strip, strip_ends

PIECE_BYTES = 1 << 15  # of text that one thread encodes at once
MOST_BYTES, MOST_DOCUMENTS = 1 << 20, 1 << 13
PIECES_PER_WINDOW = 8
PATIENCE = 2  # epochs without a single document before a source is given up


class Tokenize(Stage):
    """The documents of a stage that holds text, as tokens.

    `tokenizer` is a path to a `tokenizer.json`, a folder that holds one, `tiktoken:NAME` (or the path
    of its file), `bytes`, or an object with `encode_batch` or `encode`. Special tokens are never added,
    and text that spells one stays text. The tokenizer is part of the run: another one can't resume it.

    All tokens in `strip` are removed from both ends of a document. Documents that are then empty or
    shorter than `min_length` tokens are skipped.

    >>> docs = Tokenize(ShardReader("corpus/web", column="text"), "tokenizer.json")     # doctest: +SKIP
    """

    def __init__(self, below: Stage, tokenizer: object, *, strip: Collection[int] = (), min_length: int = 1) -> None:
        super().__init__(below)
        if not below.holds_text():
            name = below.source_name() if not below.children() else type(below).__name__
            raise ConfigError(f"Tokenize reads text, but {name!r} holds tokens already; remove the Tokenize")
        self._tokenizer = open_tokenizer(tokenizer)
        self._given = tokenizer
        self._spec = os.fsdecode(tokenizer) if isinstance(tokenizer, str | os.PathLike) else None
        self.tokenizer = self._tokenizer.identity
        self.strip = checked_strip(strip)
        self.min_length = whole("min_length", min_length)

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        if lane.lengths_only and isinstance(self.below, ShardReader):
            return self.below.without_short((), self.min_length).open(lane, state)
        return _TokenizeIterator(self, lane, state)

    def holds_text(self) -> bool:
        return False

    def tokenizes(self) -> bool:
        return True

    @property
    def given(self) -> object:
        """The tokenizer as it was given: its path or name, or the object."""
        return self._given

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in memory."""
        return token_type(self._tokenizer.vocabulary).itemsize

    @property
    def is_counted(self) -> bool:
        """Whether the size is counted, and not an estimate."""
        return self._counted() is not None

    @property
    def how_to_count(self) -> str:
        """What counts the tokens of each document, once: a command, or for a tokenizer that is an object, a call."""
        if not isinstance(self.below, ShardReader):
            return ""
        folder, column = self.below.counts.csv_root or str(self.below.path.absolute()), self.below.column
        if self._spec is None:
            given = "" if column is None else f", column={column!r}"
            return (
                f"`fmsdata.corpus.index.index_corpus({folder!r}{given}, "
                "tokenizer=fmsdata.corpus.tokenizer.open_tokenizer(tokenizer))`"
            )
        is_file = self.tokenizer.startswith(f"{FILE}:")
        tokenizer = os.path.abspath(os.path.expanduser(self._spec)) if is_file else self._spec
        words = ["fmsdata", "index", folder, "--tokenizer", tokenizer]
        return f"`{shlex.join(words if column is None else [*words, '--column', column])}`"

    def size(self) -> Size:
        """Documents and tokens of one epoch. Without tokens in the index, they are estimated from the bytes of text."""
        size, counted = super().size(), self._counted()
        return Size(size.documents, size.tokens // TOKEN_BYTES if counted is None else counted)

    def total_tokens(self) -> float:
        return super().total_tokens() * self.size().tokens / max(1, self.below.size().tokens)

    def _counted(self) -> int | None:
        """The tokens of an epoch, if the index has those of this tokenizer."""
        counts = self.below.counts if isinstance(self.below, ShardReader) else None
        return counts.text_tokens if counts is not None and counts.tokenizer == self.tokenizer else None

    def encode(self, texts: list[str]) -> tuple[Tokens, Ints]:
        """The tokens of texts in one array, and where each begins in it."""
        return self._tokenizer.encode(texts)

    def source_name(self) -> str:
        return self.below.source_name()


def stages_of(source: Stage) -> Iterator[Stage]:
    """The stages of a source from the top down, as long as each has one stage below."""
    yield source
    while list(source.children()) == ["below"]:
        source = source.below
        yield source


def reader_of(source: Stage) -> ShardReader | None:
    """The reader of a source, below what tokenizes or changes its documents; None if that is something else."""
    lowest = list(stages_of(source))[-1]
    return lowest if isinstance(lowest, ShardReader) else None


def tokenizer_of(source: Stage) -> Tokenize | None:
    """What tokenizes a source, if anything does."""
    return next((stage for stage in stages_of(source) if isinstance(stage, Tokenize)), None)


def is_counted(source: Stage) -> bool:
    """Whether the number of tokens of a source is counted, and not an estimate."""
    tokenize = tokenizer_of(source)
    return tokenize is None or tokenize.is_counted


def with_max_epochs(source: Stage, max_epochs: float | None) -> Stage:
    """The same source with a different end, whatever is above its reader."""
    if isinstance(source, ShardReader):
        return source if source.max_epochs == max_epochs else source.with_max_epochs(max_epochs)
    if list(source.children()) != ["below"]:
        return source
    below = with_max_epochs(source.below, max_epochs)
    if below is source.below:
        return source
    other = copy.copy(source)
    other.below = below
    return other


class _Piece(NamedTuple):
    """Documents that were tokenized, and the state of the stage below before each, and after the last."""

    documents: Chunk
    states: list[State]


class _TokenizeIterator(StageIterator):
    """The state is that of the stage below, before the next document that is kept."""

    def __init__(self, stage: Tokenize, lane: Lane, state: State | None) -> None:
        self._stage, self._lane = stage, lane
        # The stage below reads bytes, and the lane counts tokens.
        pace = Pace(share=TOKEN_BYTES, within=lane.pace)
        self._below = stage.below.open(replace(lane, pace=pace), state)
        self._text: Chunk | None = None
        self._next = 0  # the first document of it that is not encoded
        self._documents = 1  # to encode at once; it grows: a rare source starts fast, a frequent one runs fast
        self._states = [self._below.state(0)]
        self._ahead: deque[_Piece] = deque()
        self._ahead_tokens = 0
        self._owed = 0.0  # tokens to encode ahead that were not enough for a piece yet
        self._piece_tokens = 1  # of the last piece
        self._end: Exception | None = None  # what the next read raises after the pieces
        self._dropped = 0  # bytes of text in a row that gave no document
        lane.ahead.register(self)

    def read(self) -> Chunk:
        if not self._ahead:
            self._encode_piece()
        if not self._ahead:
            if isinstance(self._end, Exhausted):
                self._states = [self._below.state(0)]
            raise self._end or RuntimeError("a piece is neither there nor missing")
        piece = self._ahead.popleft()
        self._ahead_tokens -= _tokens_of(piece)
        self._states = piece.states
        return piece.documents

    def state(self, taken: int) -> State:
        return self._states[taken]

    def work(self, tokens: float) -> None:
        share = self._lane.pace.of_lane
        most = self._lane.window_tokens * share
        self._owed = min(self._owed + tokens * share, most)
        while self._owed > self._piece_tokens / 2 and self._ahead_tokens < most and self._end is None:
            before = self._ahead_tokens
            self._encode_piece()
            self._piece_tokens = max(1, self._ahead_tokens - before)
            self._owed -= self._piece_tokens

    def _encode_piece(self) -> None:
        """Have one more piece, or the reason why there is none."""
        if self._end is not None:
            return
        try:
            piece = self._next_piece()
        except Exception as error:
            self._end = error
            return
        self._ahead.append(piece)
        self._ahead_tokens += _tokens_of(piece)

    def _next_piece(self) -> _Piece:
        while True:
            if self._text is None or self._next == len(self._text):
                self._text = None
                self._text, self._next = self._below.read(), 0
            text, first = self._text, self._next
            lengths = text.slice(first, min(first + self._documents, len(text))).lengths()
            stop = first + max(1, int(np.searchsorted(np.cumsum(lengths), self._piece_bytes(), "right")))
            part = text.slice(first, stop)
            documents, kept = self._encoded(part)
            self._next = stop
            self._documents = min(2 * self._documents, MOST_DOCUMENTS)
            if len(kept):
                self._dropped = 0
                states = [self._below.state(first + place) for place in kept.tolist()]
                return _Piece(documents, [*states, self._below.state(stop)])
            self._dropped += int(part.lengths().sum())
            if self._dropped > PATIENCE * max(1, self._stage.below.size().tokens):
                raise DataError(
                    f"source {self._lane.source or self._stage.source_name()!r}: none of its documents has at least "
                    f"{counted(max(1, self._stage.min_length), 'token')} (min_length) after stripping; lower "
                    "min_length or remove "
                    "the source"
                )

    def _piece_bytes(self) -> int:
        """How much text to encode at once: enough for all threads, but only a part of what a window takes of it."""
        most = min(PIECE_BYTES * THREADS.count, MOST_BYTES)
        window = self._lane.window_tokens * self._lane.pace.of_lane * TOKEN_BYTES
        return min(most, round(window / PIECES_PER_WINDOW)) if window else most

    def _encoded(self, part: Chunk) -> tuple[Chunk, Ints]:
        """The documents of a part as tokens, and which of them were kept."""
        stage = self._stage
        texts = _texts(part)
        try:
            tokens, ends = stage.encode(texts)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise self._failure(part, texts, error) from error
        start, length = ends[:-1].copy(), np.diff(ends)
        stripped = np.zeros(len(part), np.int64)
        if stage.strip:
            stripped, length = strip_ends([tokens], stripped, start, length, np.array(stage.strip))
        kept = np.flatnonzero(length >= max(1, stage.min_length))
        below = part.spans.take(part.first[:-1].take(kept), axis=0)  # the first span of each document
        spans = np.empty((len(kept), COLUMNS), np.int64)
        used, spans[:, BUFFER] = np.unique(below[:, BUFFER], return_inverse=True)
        spans[:, START] = (start + stripped).take(kept)
        spans[:, LENGTH] = length.take(kept)
        spans[:, DOCUMENT] = below[:, DOCUMENT]
        spans[:, POSITION] = stripped.take(kept)
        spans[:, BEGINS] = below[:, BEGINS]
        spans[:, TAIL] = 0
        buffers = [_with_tokens(part.buffers[i], tokens) for i in used.tolist()]
        return Chunk(buffers, spans, np.arange(len(kept) + 1)), kept

    def _failure(self, part: Chunk, texts: list[str], error: BaseException) -> Exception:
        """The error of the tokenizer, with the document that it could not encode."""
        reason = str(error) if isinstance(error, FmsdataError) else f"{type(error).__name__}: {error}"
        culprit = next((i for i, text in enumerate(texts) if not self._can_encode(text)), None)
        if culprit is None:
            first, last = part[0], part[len(part) - 1]
            where = f"documents {first.shard}#{first.document} to {last.shard}#{last.document}"
        else:
            where = f"{part[culprit].shard}, document {part[culprit].document} ({len(texts[culprit]):,} characters)"
        source = self._lane.source or self._stage.source_name()
        return StageError(f"source {source!r}: the tokenizer failed at {where}: {reason}")

    def _can_encode(self, text: str) -> bool:
        try:
            self._stage.encode([text])
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return False
        return True


def _tokens_of(piece: _Piece) -> int:
    return int(piece.documents.spans[:, LENGTH].sum())


def _with_tokens(origin: Buffer, tokens: Tokens) -> Buffer:
    return replace(origin, tokens=tokens)


def _texts(part: Chunk) -> list[str]:
    """The documents of a chunk of text."""
    copies, unchecked, texts = part.copies, set[Source](), list[str]()
    bad: tuple[int, str] | None = None
    for i in range(len(part)):
        stored = copies.read(i, unchecked)
        if stored.dtype != np.uint8:
            narrow = stored.astype(np.uint8)
            if not np.array_equal(narrow, stored):
                bad = i, "its values are no bytes: a stage below Tokenize must return the bytes of UTF-8"
                break
            stored = narrow
        try:
            texts.append(str(stored.data, "utf-8"))
        except UnicodeDecodeError as error:
            bad = i, f"not valid UTF-8 at byte {error.start} of the document"
            break
    for source in unchecked:
        source.check()
    if bad is not None:
        item = part[bad[0]]
        raise DataError(f"source {item.source!r}, {item.shard}, document {item.document}: {bad[1]}")
    return texts
