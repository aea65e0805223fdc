"""A number per process, which a process shares with those that it starts."""

from ctypes import Array, c_longlong
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

SLOTS = 512  # a page of numbers; two processes rarely meet in one
BITS = 32  # of a number; the process is in the others


class SharedNumbers:
    """Numbers of processes, in memory without a name; 0 if there is none.

    Processes that are forked or started by `multiprocessing` share them. Any other copy is empty.

    >>> numbers = SharedNumbers()
    >>> numbers[123] = 5
    >>> numbers[123], numbers[124]
    (5, 0)
    """

    def __init__(self, slots: "Array[c_longlong] | None" = None) -> None:
        self._slots = RawArray(c_longlong, SLOTS) if slots is None else slots

    def __setitem__(self, process: int, number: int) -> None:
        self._slots[process % SLOTS] = process << BITS | number

    def __getitem__(self, process: int) -> int:
        value = self._slots[process % SLOTS]
        return value & (1 << BITS) - 1 if value >> BITS == process else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedNumbers, () if get_spawning_popen() is None else (self._slots,)
