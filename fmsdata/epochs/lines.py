"""Lines of fine-tuning rows: which rows, or parts of them, each line of an epoch holds.

All of it is arithmetic on lengths, and the same on every rank. Rows come in the order of the epoch.
Best fit packs them in windows of some thousand rows: that fills lines as well as packing all at once
would, and keeps the order and the shares of a mixture.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.options import Mode
from fmsdata.stages.pack.fit import best_fit

WINDOW = 1 << 14  # rows that best fit packs together


@dataclass(frozen=True, eq=False)
class Lines:
    """Line `i` has the spans `first[i]` to `first[i + 1] - 1`: tokens `start` to `stop - 1` of a row each."""

    first: Ints
    row: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.first) - 1

    def take(self, numbers: Ints) -> "Lines":
        """The lines with these numbers. Those after the last line are empty."""
        low, high = (self.first[np.minimum(numbers + more, len(self))] for more in (0, 1))
        first = offsets(high - low)
        spans = np.repeat(low - first[:-1], high - low) + np.arange(first[-1])
        return Lines(first, self.row[spans], self.start[spans], self.stop[spans])

    def sums(self, values: Ints) -> Ints:
        """A value of each span, summed up for each line."""
        return np.diff(offsets(values)[self.first])


class LinePlan(NamedTuple):
    """The lines of an epoch, and how many labels are before each of them."""

    lines: Lines
    trained: Ints

    def trained_between(self, first: int, stop: int) -> int:
        """How many labels some lines have. After the last line there are none."""
        low, high = (min(number, len(self.lines)) for number in (first, stop))
        return int(self.trained[high] - self.trained[low])


@dataclass(frozen=True)
class Packing:
    """How rows are packed into lines of `size` tokens, or for `max_tokens` into batches.

    >>> packing = Packing("bestfit", seq_len=10)
    >>> packing.pack(np.array([7, 8, 9]), np.array([6, 5, 4])).row.tolist()
    [7, 9, 8]
    """

    mode: Mode
    seq_len: int
    max_tokens: int | None = None

    @property
    def size(self) -> int:
        """The tokens of a line."""
        return self.seq_len if self.max_tokens is None else self.max_tokens

    @property
    def stacked(self) -> bool:
        """Whether each row of a batch is a line of its own, padded to the longest."""
        return self.mode == "pad" and self.max_tokens is not None

    def pack(self, rows: Ints, lengths: Ints) -> Lines:
        """The lines of these rows, which have these lengths."""
        if self.mode == "split":
            return self._split(rows, lengths)
        if self.mode == "bestfit":
            order, first = _best_fit(lengths, self.size)
            rows, lengths = rows[order], lengths[order]
        elif self.max_tokens is None:
            first = np.arange(len(rows) + 1)
        else:
            first = _padded_batches(lengths, self.max_tokens)
        return Lines(first, rows, np.zeros(len(rows), np.int64), lengths)

    def _split(self, rows: Ints, lengths: Ints) -> Lines:
        """The run of all tokens, cut where lines end. With `max_tokens`, no part is longer than `seq_len`."""
        starts = offsets(lengths)
        line_starts = np.arange(0, starts[-1], self.size)
        edges = [starts[:-1], line_starts]
        if self.max_tokens is not None:
            parts = (lengths - 1) // self.seq_len
            before = offsets(parts)
            number = np.arange(before[-1]) - np.repeat(before[:-1], parts)
            edges.append(np.repeat(starts[:-1], parts) + (number + 1) * self.seq_len)
        cuts = np.unique(np.concatenate(edges))
        of = np.searchsorted(starts, cuts, side="right") - 1
        start = cuts - starts[of]
        stop = np.append(cuts[1:], starts[-1]) - starts[of]
        return Lines(np.append(np.searchsorted(cuts, line_starts), len(cuts)), rows[of], start, stop)


def _best_fit(lengths: Ints, size: int) -> tuple[Ints, Ints]:
    """The order of the rows in their lines, and where lines begin in it.

    A line is placed where its longest row is in the epoch. That is no place in particular, whatever
    the lengths: with lines by their first row, those of many short rows would come first.
    """
    orders, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for begin in range(0, len(lengths), WINDOW):
        own = lengths[begin : begin + WINDOW]
        line = best_fit(own, size)
        places = np.arange(len(own))
        by_length = np.lexsort((places, -own, line))
        _, longest = np.unique(line[by_length], return_index=True)
        rank = np.empty(len(longest), np.int64)
        rank[np.argsort(by_length[longest])] = np.arange(len(longest))
        line = rank[line]
        orders.append(np.argsort(line, kind="stable") + begin)
        counts.append(np.bincount(line))
    return np.concatenate(orders), offsets(np.concatenate(counts))


def _padded_batches(lengths: Ints, most: int) -> Ints:
    """Where batches begin if rows times the longest is at most `most`."""
    first, longest = [0], 0
    for row, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if (row - first[-1] + 1) * longest > most:
            first.append(row)
            longest = length
    return np.array([*first, len(lengths)] if len(lengths) else [0], np.int64)
