"""Memory that two processes share.

It is an anonymous file that both map. It has no name, so nothing is left behind however the
processes end, and the size limit of /dev/shm in a container does not apply to it.
"""

import mmap
import os
import tempfile

from fmsdata.loader.limits import limit_error


class SharedMemory:
    """Memory that one process writes and another reads, once it is notified.

    It grows as needed and is reused.

    >>> memory = SharedMemory()
    >>> memory.write(b"tokens", b" and more")
    >>> bytes(memory.read(6))
    b'tokens'
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = -1  # if the next but one line fails
        self._map: mmap.mmap | None = None
        self._fd = _anonymous_file() if fd is None else fd
        self._mapped(mmap.PAGESIZE)  # a map has a descriptor too: if there is none left, that is known at the start

    def write(self, *parts: bytes | memoryview) -> None:
        """Write these bytes one after the other, from the beginning."""
        mapped = self.reserve(sum(map(len, parts)))
        start = 0
        for part in parts:
            mapped[start : start + len(part)] = part
            start += len(part)

    def reserve(self, size: int) -> memoryview:
        """The first `size` bytes, to write to."""
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)
        return self.read(size)

    def read(self, size: int) -> memoryview:
        """The first `size` bytes, as a view that is valid until the other process writes again."""
        return memoryview(self._mapped(size))[:size]

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            self._map = None  # it gives back its descriptor
            try:
                self._map = mmap.mmap(self._fd, max(size, mmap.PAGESIZE))
            except OSError as error:
                raise limit_error(error, "the memory that is shared with a worker could not be mapped") from None
        return self._map

    def fileno(self) -> int:
        """The descriptor, which another process opens the same memory with."""
        return self._fd

    def close(self) -> None:
        """Release the descriptor. Views stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None  # it has a descriptor of its own

    def __del__(self) -> None:
        self.close()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fmsdata")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
