"""Files as libraries want them, with a position, over bytes that are read by range."""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they import fsspec, which reading a local file does not need
    from fmsdata.storage.clients.base import Entry
    from fmsdata.storage.location import Location


class SeekableFile(io.RawIOBase):
    """A file of `size` bytes with a position. A subclass reads the bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def tell(self) -> int:
        return self.place


class RemoteFile(SeekableFile):
    """A remote file, read in ranges of the version that was listed, or of the version that is there now."""

    def __init__(self, location: "Location", entry: "Entry | None" = None) -> None:
        self._connection, self._path = location.connection, location.path
        self._version = None if entry is None else entry.version
        super().__init__(self._connection.run(self._connection.info(self._path)).size if entry is None else entry.size)

    def readinto(self, buffer: Any) -> int:
        stop = min(self.size, self.place + len(buffer))
        if stop <= self.place:
            return 0
        data = self._connection.run(self._connection.read(self._path, self.place, stop, self._version)).data
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)
