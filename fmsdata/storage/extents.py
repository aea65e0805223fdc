"""Which parts of a file are free: for files that are written in place, in parts of any size."""

from bisect import bisect_left, insort


class Extents:
    """The parts of a file of at most `limit` bytes.

    The smallest free part that is large enough is used next, and neighbouring free parts become one.

    >>> extents = Extents(100)
    >>> extents.take(30), extents.take(60), extents.take(20)
    (0, 30, None)
    >>> extents.free(0, 30)
    >>> extents.take(20), extents.used, extents.end
    (0, 80, 90)
    """

    def __init__(self, limit: int) -> None:
        self.used = 0  # bytes
        self.end = 0  # everything behind is free
        self._limit = limit
        self._by_size: list[tuple[int, int]] = []  # size and start of each free part, sorted
        self._size_at: dict[int, int] = {}  # by start
        self._start_at: dict[int, int] = {}  # by stop

    def take(self, size: int, most: int | None = None) -> int | None:
        """The start of a part of this size; None if there is none.

        With `most`, the parts in use may end there at the latest.
        """
        found = bisect_left(self._by_size, (size, 0))
        if found < len(self._by_size):
            length, start = self._by_size[found]
            self._remove(start, length)
            if length > size:
                self._add(start + size, length - size)
        elif self.end + size <= min(self._limit, self._limit if most is None else most):
            start = self.end
            self.end += size
        else:
            return None
        self.used += size
        return start

    def free(self, start: int, size: int) -> None:
        """A part is not used any more."""
        self.used -= size
        stop = start + size
        if stop in self._size_at:
            stop += self._remove(stop, self._size_at[stop])
        if start in self._start_at:
            before = self._start_at[start]
            self._remove(before, start - before)
            start = before
        if stop == self.end:
            self.end = start
        else:
            self._add(start, stop - start)

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start], self._start_at[start + size] = size, start

    def _remove(self, start: int, size: int) -> int:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start], self._start_at[start + size]
        return size
