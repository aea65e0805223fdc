"""Memory that two processes share.

It has no name anywhere, so nothing is left behind however its processes end, and a container's limit on
/dev/shm does not apply to it.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any


class SharedMemory:
    """One process writes, the other reads when it is told to. Grows as needed, and is reused, not made anew.

    >>> memory = SharedMemory()
    >>> memory.write(b"tokens")
    >>> bytes(memory.read(6))
    b'tokens'
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def write(self, data: bytes | memoryview) -> None:
        if os.fstat(self._fd).st_size < len(data):
            os.ftruncate(self._fd, len(data))
        self._mapped(len(data))[: len(data)] = data

    def read(self, size: int) -> memoryview:
        """The first bytes. The view is only good until the other process writes again."""
        return memoryview(self._mapped(size))[:size]

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._fd, max(size, mmap.PAGESIZE))
        return self._map

    def __reduce__(self) -> tuple[Callable[[Any], "SharedMemory"], tuple[Any]]:
        """For processes that are not forked: they get the file descriptor."""
        return _attach, (DupFd(self._fd),)

    def __del__(self) -> None:
        os.close(self._fd)


def _attach(handle: Any) -> SharedMemory:
    return SharedMemory(handle.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fmsdata")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
