"""Marks on processes that a process shares with those it forks."""

import mmap
from typing import Any

SLOTS = 512  # a page of numbers; two processes rarely meet in one


class SharedMarks:
    """Which processes are marked, in memory without a name. A copy that is sent elsewhere is empty.

    >>> marks = SharedMarks()
    >>> marks.add(123)
    >>> 123 in marks, 124 in marks
    (True, False)
    """

    def __init__(self) -> None:
        self._slots = memoryview(mmap.mmap(-1, SLOTS * 8)).cast("q")

    def add(self, process: int) -> None:
        """Mark a process."""
        self._slots[process % SLOTS] = process

    def discard(self, process: int) -> None:
        """Remove the mark, if there is one."""
        if process in self:
            self._slots[process % SLOTS] = 0

    def __contains__(self, process: int) -> bool:
        return self._slots[process % SLOTS] == process

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedMarks, ()
