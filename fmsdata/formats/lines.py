"""Lines: documents of text files end at a newline, and nowhere else.

Other characters that some programs take for the end of a line (U+2028, vertical tab, form feed,
U+0085) are part of a document. A carriage return before the newline is not, nor is a byte-order mark
at the start of the file. The last line needs no newline.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats.base import Data, Documents
from fmsdata.formats.compression import Decompressor
from fmsdata.formats.damage import Guarded

NEWLINE, RETURN, MARK = 10, 13, b"\xef\xbb\xbf"
NOT_UTF8 = "it is not UTF-8 text"


class Lines(NamedTuple):
    """Some consecutive lines of a file: line `i` is `tokens[ends[i] : ends[i + 1]]`, without its end."""

    tokens: Tokens
    ends: Ints
    first: int  # the number of the first line, from 0

    def __len__(self) -> int:
        return len(self.ends) - 1

    def between(self, begin: int, end: int) -> "Lines":
        """The lines `begin` to `end - 1` of these."""
        ends = self.ends[begin : end + 1]
        return Lines(self.tokens[ends[0] : ends[-1]], ends - ends[0], self.first + begin)


# Lines of a file with this name become documents. If the last argument is true, bad ones are skipped.
Parse: TypeAlias = Callable[[str, Lines, bool], Documents]


def split_lines(data: Data, first: int = 0) -> Lines:
    """Cut bytes into lines, of which the last may have no newline. `first` is the number of the first one.

    >>> lines = split_lines(b"one\\r\\n\\ntwo")
    >>> bytes(lines.tokens), lines.ends.tolist()
    (b'onetwo', [0, 3, 3, 6])
    """
    array = np.frombuffer(data, np.uint8)
    if not first and bytes(data[:3]) == MARK:
        array = array[3:]
        if not len(array):  # a line, with nothing but the mark
            return Lines(array, np.zeros(2, np.int64), 0)
    stop = np.flatnonzero(array == NEWLINE)
    newlines = len(stop)
    if len(array) and (not newlines or stop[-1] != len(array) - 1):
        stop = np.append(stop, len(array))
    last = stop[stop > 0] - 1
    returns = last[array[last] == RETURN]
    kept = np.ones(len(array), np.bool_)
    kept[stop[:newlines]] = False
    kept[returns] = False
    length = np.diff(stop, prepend=-1) - 1
    length[np.searchsorted(stop, returns)] -= 1
    return Lines(array[kept], offsets(length), first)


def bad_line(name: str, line: int, reason: str) -> DataError:
    """The error for a line, which is counted from 1."""
    return DataError(f"{name}: line {line}: {reason}; correct the line, or remove it")


def collect(name: str, texts: list[bytes | str], first: int, *, skip_bad: bool) -> Documents:
    """Documents from the text of each line, or the reason why it has none."""
    bad = [(first + number + 1, text) for number, text in enumerate(texts) if isinstance(text, str)]
    if bad and not skip_bad:
        raise bad_line(name, *bad[0])
    kept = [text if isinstance(text, bytes) else b"" for text in texts]
    length = np.fromiter(map(len, kept), np.int64, len(kept))
    return Documents(np.frombuffer(b"".join(kept), np.uint8), offsets(length), first, bad)


class LineStream:
    """A text file that is read from its beginning to its end. See `DocumentStream`."""

    def __init__(self, name: str, decompressor: Decompressor, parse: Parse, *, skip_bad: bool = False) -> None:
        self._name, self._decompressor, self._parse, self._skip_bad = name, decompressor, parse, skip_bad
        self._waiting: list[bytes] = []  # the start of a line
        self._lines = 0

    def feed(self, data: Data) -> Documents:
        whole: list[bytes] = []
        with Guarded(self._name):
            for piece, _ in self._decompressor.feed(data):
                cut = piece.rfind(b"\n") + 1
                if cut:
                    whole += [*self._waiting, piece[:cut]]
                    self._waiting = []
                if cut < len(piece):
                    self._waiting.append(piece[cut:])
        return self._documents(whole)

    def finish(self) -> Documents:
        with Guarded(self._name):
            self._decompressor.finish()
        whole, self._waiting = self._waiting, []
        return self._documents(whole)

    def _documents(self, whole: list[bytes]) -> Documents:
        lines = split_lines(b"".join(whole), self._lines)
        self._lines += len(lines)
        return self._parse(self._name, lines, self._skip_bad)
