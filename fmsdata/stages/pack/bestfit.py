"""Mode `bestfit`: whole documents, placed where they fit best; only longer ones are cut.

Documents are read in windows of some hundred lines' worth of tokens, and each window is packed
alone (`fit.py`). So the state is where the window starts and how many of its lines were taken. The
lines of a window come in a keyed random order, and the documents of a line in the order of the
stream, so nothing is sorted by length.
"""

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fmsdata.core.chunk import Chunk, stored_tokens
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints, key_of, keyed_order, offsets
from fmsdata.core.lane import Lane
from fmsdata.core.spans import BEGINS, BUFFER, CROPPED
from fmsdata.core.state import EDITED, State, number, parse, part
from fmsdata.core.wording import shown
from fmsdata.errors import StateError
from fmsdata.stages.pack.fit import best_fit, overfill
from fmsdata.stages.pack.token_run import TokenRun
from fmsdata.stages.windows import window_sizes

if TYPE_CHECKING:
    from fmsdata.stages.pack.pack import Pack

Bools = npt.NDArray[np.bool_]


class BestFitMode:
    """The mode for the table of modes."""

    fills_lines = False

    def open(self, pack: "Pack", lane: Lane, state: State | None) -> StageIterator:
        return _BestFitIterator(pack, lane, state)

    def finish(self, pack: "Pack", lane: Lane, state: State) -> tuple[State, Chunk | None]:
        """The state after the window in progress, and its lines that were not taken."""
        if not number(state, "taken"):
            return state, None
        iterator = self.open(pack, lane, state)
        lines = iterator.read()
        return iterator.state(len(lines)), lines

    def start(self, below: State, before: State) -> State:
        """The state at the start of a window, where `before` was a state at the start of a line."""
        kept = {name: before.get(name, default) for name, default in (("window", 0), ("extra", ""), ("cropped", 0))}
        return {**kept, "taken": 0, "below": below}


class LineCounts(NamedTuple):
    """How the tokens in the lines of a lane differ from what was read below, for exact stats."""

    extra: Counter[str]  # by source: tokens in lines that were taken, minus tokens read before the window
    cropped: int  # tokens that were thrown away

    @classmethod
    def of(cls, state: State | None) -> "LineCounts":
        """The counts in a state."""
        text = "" if state is None else state.get("extra")
        extra = {} if text == "" else parse(text, f"'extra' ({shown(text)})")
        if not all(type(tokens) is int for tokens in extra.values()):
            raise StateError(f"'extra' is {shown(text)}, expected numbers of tokens: {EDITED}")
        return cls(Counter(extra), number(state, "cropped"))

    def plain(self) -> State:
        extra = {name: tokens for name, tokens in sorted(self.extra.items()) if tokens}
        return {"extra": json.dumps(extra, separators=(",", ":")) if extra else "", "cropped": self.cropped}

    def after(self, lines: Chunk) -> "LineCounts":
        """The counts after these lines were taken."""
        thrown_away = int((lines.spans[:, BEGINS] >> CROPPED).sum())
        extra = self.extra.copy()
        extra.update(_tokens_by_source(lines))
        return LineCounts(extra, self.cropped + thrown_away)


class _BestFitIterator(StageIterator):
    """The state: that below at the start of the window, its number, and the lines taken of it."""

    def __init__(self, pack: "Pack", lane: Lane, state: State | None) -> None:
        self._pack = pack
        self._sizes = window_sizes(pack.window, pack.first_window)
        self._documents = _Documents(pack, lane, part(state, "below"))
        self._key = key_of(lane.seed, "bestfit", lane.source, lane.index)
        self._number = number(state, "window")
        self._skip = number(state, "taken")  # lines of the window that were taken before
        self._counts = LineCounts.of(state)  # after these lines
        self._anchor = self._documents.state()
        self._lines: Chunk | None = None  # of the window, without those that were taken before
        self._read: Counter[str] = Counter()  # tokens of the window, by source, if some are thrown away

    def read(self) -> Chunk:
        if self._lines is not None:
            self._counts = self._counts_behind(self._lines)
            self._number, self._skip, self._anchor = self._number + 1, 0, self._documents.state()
            self._lines = None
        documents, heads = self._documents.take(self._size_of(self._number) * self._pack.seq_len)
        if self._pack.crop:
            self._read = _tokens_by_source(documents)
        lines = pack_window(documents, heads, self._pack, key_of(self._key, self._number))
        if self._skip >= len(lines):
            raise StateError(f"'taken' is {self._skip}, but the window has only {len(lines)} lines")
        self._lines = lines.slice(self._skip, len(lines))
        return self._lines

    def state(self, taken: int) -> State:
        lines = self._lines
        if lines is not None and taken == len(lines):
            counts, below = self._counts_behind(lines), self._documents.state()
            return {"window": self._number + 1, "taken": 0, **counts.plain(), "below": below}
        counts = self._counts if lines is None or not taken else self._counts.after(lines.slice(0, taken))
        return {"window": self._number, "taken": self._skip + taken, **counts.plain(), "below": self._anchor}

    def next_items(self) -> int:
        return self._size_of(self._number + 1)

    def _size_of(self, number: int) -> int:
        """The lines' worth of tokens in a window."""
        return self._sizes[min(number, len(self._sizes) - 1)]

    def _counts_behind(self, lines: Chunk) -> LineCounts:
        """The counts at the end of the window: without `crop`, its lines are all that was read."""
        if not self._pack.crop:
            return LineCounts(Counter(), self._counts.cropped)
        counts = self._counts.after(lines)
        counts.extra.subtract(self._read)
        return counts


class _Documents:
    """The documents below, taken by the places that they need in lines."""

    def __init__(self, pack: "Pack", lane: Lane, state: State | None) -> None:
        self._pack = pack
        self._below = pack.below.open(lane, state)
        self._chunk: Chunk | None = None
        self._taken = 0  # documents of the chunk
        self._heads: Bools = np.zeros(0, bool)  # which documents need a BOS
        self._ends: Ints = np.zeros(1, np.int64)  # running sum of places, from 0

    def take(self, places: int) -> tuple[Chunk, Bools]:
        """Documents that need at least this many places, and which of them need a BOS.

        At the end of a finite pass, what is left. Raises `Exhausted` if that is nothing.
        """
        chunks: list[Chunk] = []
        heads: list[Bools] = []
        while places > 0:
            if self._chunk is None or self._taken == len(self._chunk):
                self._taken, self._chunk = 0, None
                try:
                    self._chunk = self._below.read()
                except Exhausted:
                    if not chunks:
                        raise
                    break
                self._heads = self._chunk.first_tokens() != self._pack.bol
                self._ends = offsets(self._places(self._chunk.lengths() + self._heads))
            begin, ends = self._taken, self._ends
            self._taken = min(int(np.searchsorted(ends, ends[begin] + places)), len(self._chunk))
            chunks.append(self._chunk.slice(begin, self._taken))
            heads.append(self._heads[begin : self._taken])
            places -= int(ends[self._taken] - ends[begin])
        return Chunk.join(chunks).compact(), np.concatenate(heads)

    def state(self) -> State:
        return self._below.state(self._taken)

    def _places(self, lengths: Ints) -> Ints:
        """The places that documents need: each piece after the first has a BOS more."""
        size, most = self._pack.seq_len, self._pack.max_documents
        places: Ints = lengths + np.maximum(lengths - 2, 0) // (size - 1)
        return places if most is None else np.maximum(places, size // most)


def pack_window(documents: Chunk, heads: Bools, pack: "Pack", key: int) -> Chunk:
    """The lines that these documents fill, in an order that depends on the key."""
    pieces, heads = _cut_long(documents, heads, pack)
    lengths = pieces.lengths() + heads
    crop = pack.crop and lengths.sum() >= pack.seq_len  # a finite pass may end with less than a line
    line = overfill(lengths, pack.seq_len) if crop else best_fit(lengths, pack.seq_len, pack.max_documents)
    count = int(line.max()) + 1
    line = keyed_order(count, key).take(line)
    order = np.argsort(line, kind="stable")
    if crop:  # the longest piece of a line is its last, so that it is the one that is shortened
        order = _longest_last(order, line, lengths)
    pieces = pieces.take(order)
    pieces.spans[:, BEGINS] &= 1
    pieces.spans[pieces.first[:-1], BEGINS] = 1
    pieces = pieces.with_heads(heads.take(order), pack.bol or 0)
    lines = Chunk(pieces.buffers, pieces.spans, pieces.first.take(offsets(np.bincount(line, minlength=count))))
    return _cropped(lines, pack.seq_len) if crop else lines.padded(pack.seq_len, pack.fill)


def _cut_long(documents: Chunk, heads: Bools, pack: "Pack") -> tuple[Chunk, Bools]:
    """Documents that are longer than a line, cut into pieces; the others as they are."""
    lengths, room = documents.lengths(), pack.seq_len - 1
    starts = offsets(lengths)
    long = np.flatnonzero(lengths + heads > pack.seq_len)
    if not len(long):
        return documents, heads
    rest = lengths[long] - (pack.seq_len - heads[long])
    cuts = -(-rest // room)
    first = offsets(cuts)
    places = np.repeat(starts[:-1][long] + pack.seq_len - heads[long] - first[:-1] * room, cuts)
    places += np.arange(first[-1]) * room
    # An EOS is not alone behind a BOS: it takes the token before it along, whether it was inserted or stored.
    places[first[1:] - 1] -= rest % room == 1
    edges = np.sort(np.concatenate([starts, places]))
    pieces = TokenRun(documents).cut(edges)
    is_further = np.ones(len(pieces), bool)
    is_further[np.searchsorted(edges, starts[:-1])] = False
    of_pieces = np.empty(len(pieces), bool)
    of_pieces[~is_further] = heads
    # A stored BOS may stand where the document was cut.
    of_pieces[is_further] = pieces.take(np.flatnonzero(is_further)).first_tokens() != pack.bol
    return pieces, of_pieces


def _longest_last(order: Ints, line: Ints, lengths: Ints) -> Ints:
    """The pieces of each line in the same order, but the longest last."""
    by_length = np.lexsort((lengths, line))
    is_longest = np.zeros(len(order), bool)
    is_longest[by_length[np.flatnonzero(np.diff(line[by_length], append=-1))]] = True
    return order[np.lexsort((is_longest[order], line[order]))]


def _cropped(lines: Chunk, size: int) -> Chunk:
    """The first tokens of each line.

    The span before the cut says how many stored ones follow it.
    """
    starts = offsets(lines.lengths())
    edges = np.unique(np.concatenate([starts, starts[:-1] + size]))
    parts = TokenRun(lines).cut(edges)
    is_line = np.zeros(len(parts), bool)
    is_line[np.searchsorted(edges, starts[:-1])] = True
    stored = offsets(stored_tokens(parts.spans))[parts.first]
    cut_off = np.diff(stored) * ~is_line
    kept = np.flatnonzero(is_line)
    chunk = parts.take(kept)
    chunk.spans[chunk.first[1:] - 1, BEGINS] |= np.append(cut_off, 0)[kept + 1] << CROPPED
    return chunk


def _tokens_by_source(chunk: Chunk) -> Counter[str]:
    """The stored tokens of each source."""
    of_buffers = np.bincount(chunk.spans[:, BUFFER], stored_tokens(chunk.spans), len(chunk.buffers))
    tokens: Counter[str] = Counter()
    for buffer, count in zip(chunk.buffers, of_buffers.astype(np.int64).tolist(), strict=True):
        tokens[buffer.source] += count
    return tokens
