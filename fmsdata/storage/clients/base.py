"""The interface between a connection and a filesystem: a few calls, one attempt each.

`S3Client` and `HttpClient` see the head of a response before its body. They notice at once if the
response does not match the request, or belongs to another version of the file. Other filesystems
return bytes and nothing else (see `generic.py`).
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, Protocol

from fmsdata.core.pages import Data, page_memory
from fmsdata.storage.retry import BadResponse, Replaced

PART = 1 << 20  # bytes of a body to read at once, if its size is unknown or it is skipped


class Entry(NamedTuple):
    """A file in a listing."""

    name: str  # relative to the listed folder, with "/"
    size: int
    version: str | None  # changes when the content does; None if the filesystem has no versions


class Listing(NamedTuple):
    """The contents of a folder."""

    files: list[Entry]
    folders: list[str]  # names of the folders in it; empty if the listing is recursive


class FileBytes(NamedTuple):
    """Bytes of a file."""

    data: Data
    version: str | None  # of the file, if the response says


class Page(NamedTuple):
    """One page of a listing."""

    files: list[Entry]
    folders: list[str]
    next: str | None  # token of the next page


class Client(Protocol):
    """One attempt at each operation. Paths are in the form that the filesystem expects."""

    reports_versions: ClassVar[bool]  # reads say which version of the file they are of
    lists_in_pages: ClassVar[bool]  # a long listing takes several requests, each of them short

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> FileBytes: ...

    async def info(self, path: str) -> Entry: ...

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def remove(self, path: str) -> None: ...

    async def remove_folder(self, path: str) -> None: ...

    async def close(self) -> None: ...


def protocols(filesystem: type[Any]) -> tuple[str, ...]:
    """The protocols of an fsspec filesystem class."""
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def range_header(start: int, stop: int | None) -> str:
    """The Range header of a request.

    >>> range_header(0, 100)
    'bytes=0-99'
    """
    return f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"


def plain_tag(tag: str | None) -> str | None:
    """An ETag without quotes and prefix, which not every response has.

    >>> plain_tag('W/"5d41402a"')
    '5d41402a'
    """
    return tag.removeprefix("W/").strip('"') or None if tag else None


VERSIONS = (
    *("ETag", "etag", "generation", "blob_id", "md5Hash", "mtime", "modified", "LastModified", "last_modified"),
    *("Last-Modified", "updated", "created"),
)


def version_of(info: Mapping[str, Any]) -> str | None:
    """The version of a file, from the attributes or headers that its filesystem returns."""
    for name in VERSIONS:
        value = info.get(name)
        if value:
            return plain_tag(str(value.timestamp() if isinstance(value, datetime) else value))
    return None


def check_version(expected: str | None, found: str | None) -> None:
    """Raise if both versions are known and differ."""
    if expected is not None and found is not None and expected != found:
        raise Replaced(f"its version is {found}, not {expected}")


def body_range(
    status: int, content_range: str | None, content_length: int | str | None, start: int, stop: int | None
) -> tuple[int, int | None]:
    """How many bytes of a response body to skip, and how many to read after that; None: all.

    Raises if the status and the headers show that the response does not hold the requested bytes.
    """
    size = None if content_length is None else int(content_length)
    if status != 206:  # the server ignored the range: the body is the whole object
        if stop is None:
            return 0, size
        if size is not None and size < stop:
            raise BadResponse(f"expected bytes {start} to {stop}, got {size} bytes")
        return start, stop - start
    if content_range is not None:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range.strip())
        if found is None or int(found[1]) != start:
            raise BadResponse(f"expected bytes {start}-{'' if stop is None else stop - 1}, got {content_range!r}")
        total = None if found[2] == "*" else int(found[2])
        if stop is None:
            stop = total
        elif total is not None and total < stop:
            raise Replaced(f"it has {total} bytes, not {stop} or more")
    if stop is None:
        return 0, size
    if size is not None and size != stop - start:
        raise BadResponse(f"expected {stop - start} bytes, got {size}")
    return 0, stop - start


async def read_body(read: Callable[[int], Awaitable[bytes]], skip: int, size: int | None) -> Data:
    """Skip `skip` bytes of a body and read the next `size`; None: all."""
    skipped = 0
    while skipped < skip:
        part = await read(min(PART, skip - skipped))
        if not part:
            raise BadResponse(f"the response ended after {skipped} bytes")
        skipped += len(part)
    if size is None:
        parts: list[bytes] = []
        while part := await read(PART):
            parts.append(part)
        return b"".join(parts)
    data, taken = page_memory(size), 0
    while taken < size:
        part = await read(size - taken)
        if not part:
            raise BadResponse(f"expected {size} bytes, got {taken}")
        data[taken : taken + len(part)] = part
        taken += len(part)
    return data.toreadonly()
