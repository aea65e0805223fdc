"""Shards on a local disk, mapped into memory while other processes may write to them.

A mapped file keeps what it looked like when it was mapped: its size, the time of its last change
and its inode. It is compared with that whenever something is taken from it. A file that has changed
is an error, never other tokens. What is taken is copied by the system, so that a file that shrinks
is an error too, and not the end of the process.
"""

import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.limits import describe_os_error
from fmsdata.core.memory import MappedTokens, copy_bytes, copy_memory
from fmsdata.errors import DataError

MAPPINGS = 65_530  # of a process, where the system does not say
SMALL = 1 << 16  # bytes of a file that is read instead of mapped
WAY_OUT = "shards must stay as they are during a run: restore the file, or write the new one beside it, and resume"


class Version(NamedTuple):
    """What a file looked like."""

    size: int
    modified: int  # in nanoseconds
    inode: int

    def difference(self, now: "Version") -> str:
        """What happened to a file since it looked like this."""
        if now.size < self.size:
            return f"shrank from {self.size:,} to {now.size:,} bytes"
        if now.inode != self.inode:
            return "was replaced by another file"
        return f"grew from {self.size:,} to {now.size:,} bytes" if now.size > self.size else "was written to"


class MappedFile:
    """The bytes of a file. Small files are read instead of mapped, and checked in the same way."""

    def __init__(self, path: Path) -> None:
        self._path = os.path.abspath(path)  # the process may change its folder
        self._name = str(path)
        self.version = self._look()
        self.stamp = os.fsencode(self._path), *self.version  # the kernel checks what has one
        try:
            self.buffer = _map(path)
        except OSError as error:
            raise self._cannot_read(error) from None
        self.size: int = self.buffer.size
        self.check()

    def __enter__(self) -> "MappedFile":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """What was read inside is of the file that was mapped, or there is an error.

        A file that looks damaged may have changed.
        """
        if error is None or isinstance(error, DataError):
            self.check()

    def check(self) -> None:
        """Raise if the file is not the one that was mapped."""
        if (now := self._look()) != self.version:
            raise changed(self._name, self.version, now)

    def unreadable(self) -> DataError:
        """The error for bytes that can't be read from a file that did not change."""
        return DataError(f"{self._name}: cannot be read: the disk reports an error; check it, or restore the file")

    def read(self, start: int, stop: int) -> memoryview:
        """A copy of some bytes, as far as there are any."""
        stop = min(stop, self.size)
        if not 0 <= start <= stop:
            raise IndexError(f"bytes {start} to {stop} are not in a file of {self.size} bytes")
        return copy_bytes(self.buffer.address + start, stop - start, self).data

    def collect(self, ranges: Ints) -> tuple[memoryview, Ints]:
        """A copy of ranges, and where each of them starts in it, aligned to 8 bytes.

        Ranges are rows of first byte and size. The caller has checked that they are inside the
        file.
        """
        start = ranges[:, 0]
        pieces = np.empty((len(ranges), 2), np.int64)
        pieces[:, 1] = size = np.minimum(ranges[:, 1] + 7 & -8, self.size - start)
        pieces[:, 0] = start + self.buffer.address
        ends = offsets(size)
        out = np.empty(ends[-1], np.uint8)
        copy_memory(pieces, out, [self])
        return out.data, ends[:-1]

    def tokens(self, dtype: npt.DTypeLike) -> MappedTokens:
        """The whole file as tokens."""
        count = self.size // np.dtype(dtype).itemsize
        return MappedTokens(np.frombuffer(memoryview(self.buffer), dtype, count), self)

    def _look(self) -> Version:
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise self._cannot_read(error) from None
        if not stat.S_ISREG(status.st_mode):  # to open a pipe, for example, may take forever
            raise DataError(f"{self._name}: not a regular file; remove it or give it another name")
        return Version(status.st_size, status.st_mtime_ns, status.st_ino)

    def _cannot_read(self, error: OSError) -> DataError:
        if isinstance(error, FileNotFoundError):
            return DataError(f"{self._name}: the file is gone; it was there when the shards were listed")
        return DataError(f"{self._name}: cannot be read: {describe_os_error(error)}")


def _map(path: Path) -> pa.Buffer:
    """The bytes of a file, mapped into memory. The mapping ends with its last user.

    No file descriptor stays open. A small file is read instead: thousands of them may be in use at
    once, and a process can have about 65,000 mappings.
    """
    with pa.memory_map(str(path)) as file:
        return pa.py_buffer(path.read_bytes()) if file.size() <= SMALL else file.read_buffer()


@cache
def most_mappings() -> int:
    """How many mappings a process can have. Each mapped file is one; none of them keeps a descriptor open."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return MAPPINGS


class Versions:
    """What the files of a run looked like when it first opened them, in any of its processes."""

    def __init__(self) -> None:
        self._seen: dict[str, Version] = {}
        self._sent = 0

    def require(self, found: Mapping[str, Version]) -> None:
        """Raise if a file does not look as before. Files that were not seen yet are remembered."""
        for path, version in found.items():
            before = self._seen.setdefault(path, version)
            if before[:2] != version[:2]:
                raise changed(path, before, version)

    def news(self) -> dict[str, Version]:
        """The files that were seen since the last call."""
        if self._sent == len(self._seen):
            return {}
        new = dict(list(self._seen.items())[self._sent :])
        self._sent = len(self._seen)
        return new

    def __getstate__(self) -> dict[str, object]:
        """For another process, which reports only what it sees itself."""
        return {"_seen": dict(self._seen), "_sent": len(self._seen)}


class MappedFiles:
    """The files that are mapped now, so that none is mapped twice.

    A mapping ends with its last user.

    A file that was mapped before must still look the same. (But for its inode: some filesystems in
    user space number files anew when nobody uses them.)
    """

    def __init__(self, versions: "Versions | None" = None) -> None:
        self._files: WeakValueDictionary[Path, MappedFile] = WeakValueDictionary()
        self._versions = Versions() if versions is None else versions

    def get(self, path: Path) -> MappedFile:
        file = self._files.get(path)
        if file is None:
            file = MappedFile(path)
            self._versions.require({str(path): file.version})
            self._files[path] = file
        return file


def changed(name: str, before: Version, now: Version) -> DataError:
    return DataError(f"{name}: the file {before.difference(now)} during the run; {WAY_OUT}")
