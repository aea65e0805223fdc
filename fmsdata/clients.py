"""Clients of filesystems: what fsspec offers, as the few calls that a connection makes of it. One attempt each.

`HttpClient`, and that of S3, see the head of an answer before its body, so they notice at once if it is not what was
asked for, or of another version of the file. Other filesystems give bytes and nothing else. Those that block work
in threads.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from fmsdata.atomic import write_whole
from fmsdata.errors import ConfigError
from fmsdata.retry import Damaged, Replaced, is_missing

PART = 1 << 20  # of a body, where its size is not known, or where it is skipped
WALKS = 8  # folders that are listed at a time


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


class AsyncClient:
    """Any filesystem of fsspec that is asynchronous."""

    def __init__(self, files: Any) -> None:
        self._files = files

    async def open(self) -> None:
        if hasattr(self._files, "set_session"):
            await self._files.set_session()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._files, f"_{method}")(*args, **kwargs)

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> Fetched:  # noqa: ARG002
        if stop is None:
            start, stop = 0, (await self.info(path)).size
        data = bytes(await self.call("cat_file", path, start=start, end=stop)) if stop else b""
        if len(data) != stop - start:
            size = (await self.info(path)).size
            if size < stop:
                raise Replaced(f"it has {size} bytes, not {stop} or more")
            raise Damaged(f"{len(data)} bytes came instead of {stop - start}")
        return Fetched(data, None)

    async def info(self, path: str) -> Entry:
        self._files.invalidate_cache(path)
        info = await self.call("info", path)
        if info["type"] == "directory":
            raise FileNotFoundError(path)
        if info["size"] is None:
            raise ConfigError(f"{path}: the server does not tell how large it is, so parts of it can't be read")
        return Entry(path.rpartition("/")[2], info["size"], version_of(info))

    async def list(self, folder: str, recursive: bool, page: str | None) -> Page:  # noqa: ARG002
        self._files.invalidate_cache(folder)
        try:
            if not recursive:
                found = await self.call("ls", folder, detail=True)
            elif self._finds:
                found = (await self.call("find", folder, detail=True)).values()
            else:
                found = await self._walk(folder)
        except FileNotFoundError as error:
            if not is_missing(error):  # some say this of servers that do not answer
                raise
            return Page([], [], None)
        root = self._files._strip_protocol(folder).rstrip("/") + "/"
        files, folders = [], []
        for one in found:
            name = one["name"].removeprefix(root).strip("/")
            if f"{one['name'].rstrip('/')}/" == root:
                continue
            if one["type"] == "directory":
                folders.append(name)
            elif one["size"] is None:
                files.append((await self.info(one["name"]))._replace(name=name))
            else:
                files.append(Entry(name, one["size"], version_of(one)))
        return Page(files, folders, None)

    @property
    def _finds(self) -> bool:
        """Whether it has a way of its own to list what is in folders below. That of fsspec, which goes from folder to
        folder, leaves out those that can't be listed, without a word."""
        return type(self._files)._find is not AsyncFileSystem._find

    async def _walk(self, folder: str) -> Iterable[Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        folders = [folder]
        while folders:
            some, folders = folders[:WALKS], folders[WALKS:]
            for listed in await asyncio.gather(*(self.call("ls", one, detail=True) for one in some)):
                new = {one["name"]: one for one in listed if one["name"] not in found}
                found |= new
                folders += [name for name, one in new.items() if one["type"] == "directory"]
        return found.values()

    async def is_folder(self, path: str) -> bool:
        self._files.invalidate_cache(path)
        try:
            return bool((await self.call("info", path))["type"] == "directory")
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
            return False

    async def write(self, path: str, data: bytes) -> None:
        try:
            await self.call("pipe_file", path, data)
        except FileNotFoundError:  # object stores have no folders, others do
            await self.call("makedirs", path.rpartition("/")[0], exist_ok=True)
            await self.call("pipe_file", path, data)

    async def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            await self.call("rm_file", path)

    async def remove_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            await self.call("rm", path, recursive=True)

    async def close(self) -> None:
        close = getattr(getattr(self._files, "_session", None), "close", None)
        closing = close() if close is not None else None
        if asyncio.iscoroutine(closing):
            await closing


class BlockingClient(AsyncClient):
    """Any filesystem of fsspec that blocks, in threads."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "cat_file" and type(self._files).cat_file is AbstractFileSystem.cat_file:
            kwargs["cache_type"] = "none"  # it opens a file, which would read ahead
        call = partial(getattr(self._files, method), *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(None, call)

    @property
    def _finds(self) -> bool:
        return type(self._files).find is not AbstractFileSystem.find


class LocalClient(BlockingClient):
    """Local files."""

    async def write(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(write_whole, Path(path), data)


class HttpClient(AsyncClient):
    """Files behind http(s) URLs."""

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> Fetched:
        session = await self._files.set_session()
        settings = dict(self._files.kwargs)
        headers = {**settings.pop("headers", {}), "Accept-Encoding": "identity"}
        if stop is not None:
            headers["Range"] = span(start, stop)
        async with session.get(self._files.encode_url(path), headers=headers, **settings) as answer:
            answer.raise_for_status()
            told = answer.headers
            if told.get("Content-Encoding", "identity") != "identity":
                raise ConfigError(f"{path}: the server compresses it on the way, so parts of it can't be read")
            found = version_of(told)
            check_version(version, found)
            skip, size = place(answer.status, told.get("Content-Range"), told.get("Content-Length"), start, stop)
            return Fetched(await collect(answer.content.read, skip, size), found)

    async def is_folder(self, path: str) -> bool:
        return bool(await self.call("ls", path, detail=True))


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
