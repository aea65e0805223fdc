"""Where the lines of a text file are: one pass over the file records points at which it can be entered.

A point is a line and the place in the stored file from which it is decompressed: in a plain file
any line, in a compressed file the first line that starts in a frame. The lines between two points
are a stretch, the unit of decoding. Points follow each other after about a thousandth of the file,
but no frame is cut: a file that is one large frame is one stretch (see `LineIndex.largest`).
"""

from dataclasses import dataclass

import numpy as np

from fmsdata.core.keys import Ints
from fmsdata.core.ranges import Range
from fmsdata.formats.base import Reading
from fmsdata.formats.compression import decompressor, is_compressed
from fmsdata.formats.damage import Guarded, Truncated

DOCUMENT, PLACE, STORED, SKIP = range(4)  # the columns of points
POINTS = 1024  # in a plain file, where stretches may have any size
LEAST, MOST = 1 << 12, 1 << 20  # bytes of a stretch, if it may have any size
READ = 1 << 23  # bytes that the pass over a file requests at once


@dataclass(frozen=True, eq=False)
class LineIndex:
    """The lines of a file.

    `points` are rows of the number of a line, its place in the decompressed file, the place of its
    frame in the stored file, and the decompressed bytes of the frame before it. The last row is the
    end of the file.
    """

    points: Ints

    @property
    def documents(self) -> int:
        return int(self.points[-1, DOCUMENT])

    @property
    def size(self) -> int:
        """Bytes of the stored file."""
        return int(self.points[-1, STORED])

    @property
    def nbytes(self) -> int:
        """Bytes of the decompressed file."""
        return int(self.points[-1, PLACE])

    @property
    def largest(self) -> int:
        """The most bytes that are decompressed to read one line."""
        return int((np.diff(self.points[:, PLACE]) + self.points[:-1, SKIP]).max(initial=0))

    def stretches(self, first: int, stop: int) -> range:
        """The stretches that hold the lines `first` to `stop - 1`."""
        line = self.points[:, DOCUMENT]
        return range(int(line.searchsorted(first, "right")) - 1, int(line.searchsorted(stop, "left")))

    def lines(self, stretch: int) -> Range:
        """The numbers of the lines of a stretch."""
        return Range(*self.points[stretch : stretch + 2, DOCUMENT].tolist())

    def stored(self, stretch: int) -> Range:
        """The place of a stretch in the stored file. Its last line may end in the frame of the next one."""
        behind = stretch + 1 + bool(self.points[stretch + 1, SKIP])  # the end of the file has no frame
        return Range(int(self.points[stretch, STORED]), int(self.points[behind, STORED]))

    def inside(self, stretch: int) -> Range:
        """The place of a stretch in what was decompressed from its place in the stored file."""
        begin, end = self.points[stretch : stretch + 2, PLACE].tolist()
        skip = int(self.points[stretch, SKIP])
        return Range(skip, skip + end - begin)

    def require(self, size: int) -> None:
        """Raise `Truncated` if a file of this size can't have these points. (An index may be damaged.)"""
        points = self.points
        if points.ndim != 2 or points.shape[1] != SKIP + 1 or not len(points) or (points >> 62).any():
            raise Truncated("it is no table of points")
        line, place, stored, skip = points.T
        rising = all((column[1:] >= column[:-1]).all() for column in (line, place, stored))
        starts = len(points) == 1 or not (line[0] or place[0])
        if not rising or not starts or points[-1, STORED] != size or points[-1, SKIP] or (skip > place).any():
            raise Truncated("its points are not in order, or not inside the file")
        lines, bytes_ = np.diff(line), np.diff(place)
        if (lines < 1).any() or (lines > bytes_).any():
            raise Truncated("its points have other lines between them than there can be")


def index_lines(name: str, size: int) -> Reading[LineIndex]:
    """Index a text file of `size` bytes, in one pass."""
    indexer = _Indexer(max(LEAST, min(size // POINTS, MOST)), compressed=is_compressed(name))
    decompress = decompressor(name)
    for start in range(0, size, READ):
        (data,) = yield [Range(start, min(start + READ, size))]
        with Guarded(name):
            for piece, frame in decompress.feed(data):
                indexer.add(piece, frame)
    with Guarded(name):
        decompress.finish()
    return LineIndex(indexer.finish(size))


class _Indexer:
    """Points of a file, found in its decompressed bytes."""

    def __init__(self, spacing: int, *, compressed: bool) -> None:
        self._spacing, self._compressed = spacing, compressed
        self._points: list[tuple[int, int, int, int]] = []
        self._line, self._place = 0, 0  # lines that ended, and bytes, so far
        self._starts = True  # whether a line starts at this place
        self._frame = 0, 0  # where the last frame starts in the stored file, and in the decompressed one
        self._next = 0  # the next point is not before this place

    def add(self, piece: bytes, frame: int | None) -> None:
        if frame is not None:
            self._frame = frame, self._place
        at = 0
        while at < len(piece):
            if self._starts and self._place >= self._next and self._is_new_frame():
                self._add_point()
            # Up to the first line that may be a point, or to the end of the piece.
            behind = len(piece)
            if not self._compressed or self._is_new_frame():
                wanted = at + max(0, self._next - self._place - 1)
                found = piece.find(b"\n", wanted)
                behind = found + 1 if found >= 0 else len(piece)
            self._line += piece.count(b"\n", at, behind)
            self._place += behind - at
            self._starts = piece[behind - 1] == 10
            at = behind

    def finish(self, size: int) -> Ints:
        lines = self._line + (not self._starts)
        return np.array([*self._points, (lines, self._place, size, 0)], np.int64)

    def _is_new_frame(self) -> bool:
        """Whether the file can be entered here, other than at the last point."""
        return not self._compressed or not self._points or self._frame[0] > self._points[-1][2]

    def _add_point(self) -> None:
        frame, begins = self._frame if self._compressed else (self._place, self._place)
        self._points.append((self._line, self._place, frame, self._place - begins))
        self._next = self._place + self._spacing
