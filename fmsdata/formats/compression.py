"""Compressed files as a stream of bytes: plain, gzip, zstd.

A compressed file is a sequence of frames (zstd) or members (gzip), which are decompressed
independently of each other: called frames here. So a file can be entered where a frame starts.
All frames are read, whatever follows, and a frame that is cut is an error.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from fmsdata.errors import ConfigError
from fmsdata.formats.base import Data
from fmsdata.formats.damage import Truncated

INPUT = 1 << 14  # bytes that are decompressed at once, so that the result is not too large
WINDOW = 1 << 31  # bytes that a zstd frame may refer back to


class Piece(NamedTuple):
    """Some decompressed bytes."""

    data: bytes
    frame: int | None = None  # where a frame starts in the stored file, if these bytes are its first


class Decompressor(Protocol):
    """Stored bytes in, decompressed bytes out."""

    def feed(self, data: Data) -> Iterator[Piece]: ...

    def finish(self) -> None:
        """The file ends here. Raises `Truncated` if it can't."""


class Plain:
    """A file that is not compressed."""

    def feed(self, data: Data) -> Iterator[Piece]:
        yield Piece(bytes(data))

    def finish(self) -> None:
        pass


class Frames:
    """A file of frames, each decompressed by a new decoder.

    >>> import gzip
    >>> b"".join(piece.data for piece in Frames(_gzip, "gzip member").feed(gzip.compress(b"a") + gzip.compress(b"b")))
    b'ab'
    """

    def __init__(self, new: Callable[[], Any], kind: str, padding: bytes = b"") -> None:
        self._new, self._kind, self._padding = new, kind, padding
        self._decoder: Any = None
        self._stored = 0  # bytes that were decompressed
        self._frames = 0

    def feed(self, data: Data) -> Iterator[Piece]:
        view = memoryview(data)
        for start in range(0, len(view), INPUT):
            yield from self._feed(bytes(view[start : start + INPUT]))

    def finish(self) -> None:
        if self._decoder is not None or not self._frames:
            raise Truncated(
                f"it ends inside a {self._kind}" if self._frames else f"it is empty, without a {self._kind}"
            )

    def _feed(self, data: bytes) -> Iterator[Piece]:
        while data:
            first = None
            if self._decoder is None:
                if self._padding and self._frames:
                    stripped = data.lstrip(self._padding)
                    self._stored, data = self._stored + len(data) - len(stripped), stripped
                    if not data:
                        return
                self._decoder, first = self._new(), self._stored
                self._frames += 1
            try:
                out = self._decoder.decompress(data)
            except Exception as error:
                if isinstance(error, MemoryError):
                    raise
                raise Truncated(f"{self._kind} {self._frames}: {error}") from None
            left = self._decoder.unused_data if self._decoder.eof else b""
            self._stored += len(data) - len(left)
            data = left
            if self._decoder.eof:
                self._decoder = None
            yield Piece(out, first)


def _gzip() -> Any:
    return zlib.decompressobj(wbits=31)  # checks the checksum and the length of each member


def _zstd() -> Any:
    return zstd_library().ZstdDecompressor(max_window_size=WINDOW).decompressobj()


def zstd_library() -> Any:
    """The package `zstandard`, which is an extra."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError("reading .zst files needs the package zstandard: pip install 'fmsdata[text]'") from None
    return zstandard


def decompressor(name: str) -> Decompressor:
    """What decompresses a file with this name.

    >>> type(decompressor("a.jsonl")).__name__, type(decompressor("a.jsonl.gz")).__name__
    ('Plain', 'Frames')
    """
    if name.endswith(".gz"):
        return Frames(_gzip, "gzip member", padding=b"\0")  # some tools fill up the last block of a tape or disk
    if name.endswith(".zst"):
        zstd_library()
        return Frames(_zstd, "zstd frame")
    return Plain()


def is_compressed(name: str) -> bool:
    """Whether a file can only be entered where a frame starts."""
    return name.endswith((".gz", ".zst"))
