"""Clients of filesystems: what fsspec offers, as the few calls that a connection makes of it. One attempt each.

`HttpClient`, and that of S3, see the head of an answer before its body, so they notice at once if it is not what was
asked for, or of another version of the file. Other filesystems give bytes and nothing else. Those that block work
in threads.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from fmsdata.storage.retry import Damaged, Replaced

PART = 1 << 20  # of a body, where its size is not known, or where it is skipped


class Entry(NamedTuple):
    """A file in a listing."""

    name: str  # relative to what was listed, with "/"
    size: int
    version: str | None  # changes when the content does; None if the filesystem tells nothing


class Fetched(NamedTuple):
    """Bytes of a file."""

    data: bytes
    version: str | None  # of the file they are of, if the answer told


class Page(NamedTuple):
    """A part of a listing."""

    files: list[Entry]
    folders: list[str]
    next: str | None  # what to ask for the part after it


class Client(Protocol):
    """One attempt at each of these. Paths are as the filesystem wants them."""

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> Fetched: ...

    async def info(self, path: str) -> Entry: ...

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page: ...

    async def is_folder(self, path: str) -> bool: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def remove(self, path: str) -> None: ...

    async def remove_folder(self, path: str) -> None: ...

    async def close(self) -> None: ...


def protocols(kind: type[Any]) -> tuple[str, ...]:
    """The protocols of a class of fsspec."""
    told = kind.protocol
    return (told,) if isinstance(told, str) else tuple(told)


def span(start: int, stop: int | None) -> str:
    """As a request tells which bytes it wants.

    >>> span(0, 100)
    'bytes=0-99'
    """
    return f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"


def plain(tag: str | None) -> str | None:
    """An ETag without what not every answer has around it.

    >>> plain('W/"5d41402a"')
    '5d41402a'
    """
    return tag.removeprefix("W/").strip('"') or None if tag else None


VERSIONS = (
    *("ETag", "etag", "generation", "blob_id", "md5Hash", "mtime", "modified", "LastModified", "last_modified"),
    *("Last-Modified", "updated", "created"),
)


def version_of(info: Mapping[str, Any]) -> str | None:
    """What tells, in what a filesystem says of a file, that its content changed."""
    for name in VERSIONS:
        told = info.get(name)
        if told:
            return plain(str(told.timestamp() if isinstance(told, datetime) else told))
    return None


def check_version(expected: str | None, found: str | None) -> None:
    """Raise if an answer is of another version than the one that is wanted."""
    if expected is not None and found is not None and expected != found:
        raise Replaced(f"its version is {found}, not {expected}")


def place(
    status: int, told: str | None, length: int | str | None, start: int, stop: int | None
) -> tuple[int, int | None]:
    """How many bytes of an answer's body to skip, and how many to take then; None: all that come.

    Raises if the answer does not have what was asked for, as far as its status, Content-Range and Content-Length tell.
    """
    size = None if length is None else int(length)
    if status != 206:  # the range was not looked at: this is all of the object
        if stop is None:
            return 0, size
        if size is not None and size < stop:
            raise Damaged(f"{size} bytes came instead of those from {start} to {stop}")
        return start, stop - start
    if told is not None:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", told.strip())
        if found is None or int(found[1]) != start:
            raise Damaged(f"{told!r} came instead of bytes {start}-{'' if stop is None else stop - 1}")
        total = None if found[2] == "*" else int(found[2])
        if stop is None:
            stop = total
        elif total is not None and total < stop:
            raise Replaced(f"it has {total} bytes, not {stop} or more")
    if stop is None:
        return 0, size
    if size is not None and size != stop - start:
        raise Damaged(f"{size} bytes came instead of {stop - start}")
    return 0, stop - start


async def collect(read: Callable[[int], Awaitable[bytes]], skip: int, size: int | None) -> bytes:
    """Bytes of a body: so many, after so many that are skipped."""
    skipped = taken = 0
    parts: list[bytes] = []
    while skipped < skip:
        part = await read(min(PART, skip - skipped))
        if not part:
            raise Damaged(f"the answer ended after {skipped} bytes")
        skipped += len(part)
    while size is None or taken < size:
        part = await read(PART if size is None else size - taken)
        if not part:
            break
        parts.append(part)
        taken += len(part)
    if size is not None and taken != size:
        raise Damaged(f"{taken} bytes came instead of {size}")
    return parts[0] if len(parts) == 1 else b"".join(parts)
