"""Memory for the tensors of batches, which is used again when nothing refers to them any more.

The system gives new memory page by page, which takes longer than to fill it. So some arrays are
kept, and one that no tensor uses is filled again. A tensor, a view of it, or anything made of it
without a copy keeps a reference to its array: what a trainer still holds is never overwritten.
"""

import sys
import threading
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints
from fmsdata.core.tokens import Tokens

KEPT = 64  # arrays of a shape, for each thread that makes batches
KEPT_BYTES = 1 << 26  # of all arrays of a shape
KEPT_TOKENS = 4  # arrays of tokens


def _references(arrays: list[Any], which: int) -> int:
    """How many references there are to an array of a list."""
    return sys.getrefcount(arrays[which])


FREE = _references([np.empty(0)], 0)  # to an array that is in no tensor; it depends on the version of Python


class Buffers:
    """The arrays of a thread."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._arrays: list[Ints] = []
        self._next = 0  # behind the array that was returned last
        self._bytes: list[npt.NDArray[np.uint8]] = []

    def tokens(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Tokens:
        """An array of this shape and type with any content: a part of one that may be larger."""
        size = shape[0] * shape[1] * dtype.itemsize
        for which, length in enumerate(map(len, self._bytes)):
            if size <= length <= 2 * size and _references(self._bytes, which) == FREE:
                return self._bytes[which][:size].view(dtype).reshape(shape)
        array = np.empty(size, np.uint8)
        if size <= KEPT_BYTES // KEPT_TOKENS:
            self._bytes = [array, *self._bytes[: KEPT_TOKENS - 1]]
        return array.view(dtype).reshape(shape)

    def get(self, shape: tuple[int, ...]) -> Ints:
        """An array of this shape with any content."""
        if shape != self._shape:  # the shape of the batches has changed: the others are not needed any more
            self._shape, self._arrays, self._next = shape, [], 0
        for which in chain(range(self._next, len(self._arrays)), range(self._next)):  # the oldest is likely to be free
            if _references(self._arrays, which) == FREE:
                self._next = which + 1
                return self._arrays[which]
        array = np.empty(shape, np.int64)
        if len(self._arrays) < KEPT and (len(self._arrays) + 1) * array.nbytes <= KEPT_BYTES:
            self._arrays.append(array)
        return array


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.buffers = Buffers()


_OF_THREAD = _OfThread()


def buffers() -> Buffers:
    """The arrays of this thread. They end with it."""
    return _OF_THREAD.buffers
