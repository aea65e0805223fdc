"""Copies of memory that may vanish: the pages of a mapped file that another process truncates.

A process that touches such a page itself is killed by SIGBUS. So the system copies: it reports a
page that it can't read as an error. One call copies a thousand pieces, about as fast as the process
would.
"""

import ctypes
import os
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fmsdata.core import native
from fmsdata.core.keys import Ints
from fmsdata.core.tokens import Tokens

MOST_PIECES = 1024  # that the system copies in one call
Bytes = npt.NDArray[np.uint8]
Piece = ctypes.c_uint64 * 2  # address and bytes
SystemCopy = Callable[[int, int, int, int, int, int], int]


class Source(Protocol):
    """What is mapped into memory, such as a file."""

    def check(self) -> None:
        """Raise if it is not what it was when it was mapped."""

    def unreadable(self) -> Exception:
        """The error for memory that can't be read."""


class MappedTokens:
    """Tokens in memory that may vanish or change. What is taken from them is a copy."""

    __slots__ = ("_array", "address", "dtype", "length", "source")

    def __init__(self, array: Tokens, source: Source) -> None:
        self._array = array  # keeps the memory mapped
        self.source = source
        self.dtype: np.dtype[Any] = array.dtype
        self.address: int = array.ctypes.data
        self.length = len(array)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: slice) -> Tokens:
        start, stop, _ = where.indices(len(self))
        width = self.dtype.itemsize
        copied = copy_bytes(self.address + start * width, max(0, stop - start) * width, self.source)
        self.source.check()
        return copied.view(self.dtype)

    def take(self, places: Ints) -> Tokens:
        if len(places) and (places.min() < 0 or places.max() >= len(self)):
            raise IndexError("no token there")
        return copy_numbers(places * self.dtype.itemsize + self.address, self.dtype, [self.source])


def copy_bytes(address: int, size: int, source: Source) -> Bytes:
    """A copy of one piece of memory."""
    out = np.empty(size, np.uint8)
    copy_memory(np.array([[address, size]]), out, [source])
    return out


def copy_numbers(addresses: Ints, dtype: np.dtype[Any], sources: Collection[Source]) -> npt.NDArray[Any]:
    """A copy of the numbers at these addresses."""
    pieces = np.empty((len(addresses), 2), np.int64)
    pieces[:, 0], pieces[:, 1] = addresses, dtype.itemsize
    out = np.empty(len(addresses) * dtype.itemsize, np.uint8)
    copy_memory(pieces, out, sources)
    return out.view(dtype)


def copy_memory(pieces: Ints, out: Bytes, sources: Collection[Source]) -> None:
    """Copy pieces of memory, rows of address and bytes, one after the other.

    They must fill `out`. Both arrays must be contiguous.

    `sources` are what the memory is mapped from. If a piece can't be read, the error of the source
    that has changed is raised.
    """
    if not len(out):
        return
    copy = system_copy()
    if copy is None:  # a file that shrinks between the check and the copy still ends the process
        for source in sources:
            source.check()
        _copy_here(pieces, address_of(out))
    elif not _copy(copy, pieces, out):
        for source in sources:
            source.check()
        raise next(iter(sources)).unreadable() if sources else MemoryError("memory can't be read")


def copy_and_check(pieces: Ints, out: Bytes, sources: set[Source]) -> None:
    """`copy_memory`, and then a check of the sources."""
    kernel, unstamped = native.kernel, set(sources)
    if kernel is None or system_copy() is None or not kernel.copy(pieces, out, unstamped):
        copy_memory(pieces, out, unstamped := sources)  # after the kernel only to raise what is wrong
    for source in unstamped:
        source.check()


def start_copy(pieces: Ints, out: Tokens, sources: set[Source], wide: list[Ints], extra: int) -> Callable[[], bool]:
    """`copy_and_check` that goes on meanwhile, if there is a kernel. Returns a function that waits for its end.

    That function returns whether `wide` was filled from `out`: inputs and labels of one batch after the other, see
    `Batch.shifted`. What the memory belongs to must be kept until then.
    """
    kernel, unstamped, whole = native.kernel, set(sources), out.reshape(-1).view(np.uint8)
    started = None
    if kernel is not None and system_copy() is not None:
        started = kernel.start_copy(pieces, out, unstamped, wide, extra)

    def end() -> bool:
        if kernel is None or started is None or not kernel.end_copy(started):
            copy_and_check(pieces, whole, sources)
            return False
        for source in unstamped:
            source.check()
        return True

    return end


def _copy(copy: SystemCopy, pieces: Ints, out: Bytes) -> bool:
    """Copy pieces. False if one of them can't be read."""
    target, left, process = address_of(out), len(out), os.getpid()
    while True:
        now = pieces[:MOST_PIECES]
        into = Piece(target, left)
        copied = copy(process, address_of(now), len(now), ctypes.addressof(into), 1, 0)
        if copied == left:
            return True
        ends = np.cumsum(now[:, 1])
        if copied < min(1, int(ends[-1])):
            return False
        target, left = target + copied, left - copied
        whole = int(np.searchsorted(ends, copied, "right"))
        pieces = pieces[whole:]
        if whole < len(now):  # the system stops at 2 GB, and before a page that it can't read
            part = copied - int(ends[whole] - now[whole, 1])
            pieces = pieces.copy()
            pieces[0] += part, -part


def address_of(array: Any) -> int:
    """Where an array is that can be written to, faster than `array.ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def _copy_here(pieces: Ints, target: int) -> None:
    for address, size in pieces.tolist():
        ctypes.memmove(target, address, size)
        target += size


@cache
def system_copy() -> SystemCopy | None:
    """The call that copies memory and reports what it can't read.

    None if the system has no such call, or does not allow it.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_writev
    except (AttributeError, OSError, TypeError):
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    copy: SystemCopy = call
    here, there = np.arange(2), np.zeros(2, np.int64)
    works = _copy(copy, np.array([[address_of(here), here.nbytes]]), there.view(np.uint8)) and (here == there).all()
    return copy if works else None
