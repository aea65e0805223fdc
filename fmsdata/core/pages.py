"""Memory in pages of its own, which goes back to the system with its last user.

What a process fetches comes in all sizes and is held for different times. From the allocator, freed
blocks leave holes between the others, a quarter of all that was fetched. Pages leave none.
"""

import mmap
from typing import TypeAlias

Data: TypeAlias = bytes | memoryview
LARGE = 1 << 16  # bytes: smaller memory is left to the allocator


def page_memory(size: int) -> memoryview:
    """Memory to write to.

    >>> memory = page_memory(1 << 20)
    >>> memory[:4] = b"abcd"
    >>> bytes(memory[:6])
    b'abcd\\x00\\x00'
    """
    if size >= LARGE:
        try:
            return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except OSError:  # a process can have about 65,000 mappings
            pass
    return memoryview(bytearray(size))


def page_copy(data: Data) -> memoryview:
    """A copy that nobody writes to."""
    memory = page_memory(len(data))
    memory[:] = data
    return memory.toreadonly()
