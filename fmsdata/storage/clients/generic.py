"""Clients for any fsspec filesystem: asynchronous, blocking (in threads) and local.

These use fsspec's documented interface for asynchronous filesystems, whose methods start with an
underscore (`_cat_file`, `_info`, `_ls`, `_find`, ...), and `_strip_protocol` and
`_get_kwargs_from_urls`, which it documents as extension points. They are public despite their
names.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from fmsdata.errors import ConfigError
from fmsdata.storage.atomic import write_whole
from fmsdata.storage.clients.base import Entry, FileBytes, Page, version_of
from fmsdata.storage.retry import BadResponse, Replaced, is_missing
from fmsdata.storage.settings import Storage

FOLDERS_AT_ONCE = 8  # to list


class AsyncClient:
    """Any asynchronous fsspec filesystem. Clients for one kind of filesystem are subclasses."""

    reports_versions: ClassVar[bool] = False
    lists_in_pages: ClassVar[bool] = False

    def __init__(self, files: Any) -> None:
        self._files = files
        self._session: Any = None

    @classmethod
    def options(cls, options: Mapping[str, Any], storage: Storage) -> dict[str, Any]:  # noqa: ARG003
        """The arguments of the filesystem: the user's options, and those that the client needs."""
        return dict(options)

    @classmethod
    async def files(cls, filesystem: type[Any], options: Mapping[str, Any], storage: Storage) -> Any:
        """The filesystem that the client uses."""
        loop, options = asyncio.get_running_loop(), cls.options(options, storage)
        return filesystem(**options, asynchronous=True, loop=loop, skip_instance_cache=True)

    async def open(self) -> None:
        if hasattr(self._files, "set_session"):
            self._session = await self._files.set_session()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._files, f"_{method}")(*args, **kwargs)

    async def read(self, path: str, start: int, stop: int | None, version: str | None) -> FileBytes:  # noqa: ARG002
        if stop is None:
            start, stop = 0, (await self.info(path)).size
        data = bytes(await self.call("cat_file", path, start=start, end=stop)) if stop else b""
        if len(data) != stop - start:
            size = (await self.info(path)).size
            if size < stop:
                raise Replaced(f"it has {size} bytes, not {stop} or more")
            raise BadResponse(f"expected {stop - start} bytes, got {len(data)}")
        return FileBytes(data, None)

    async def info(self, path: str) -> Entry:
        self._files.invalidate_cache(path)
        info = await self.call("info", path)
        if info["type"] == "directory":
            raise FileNotFoundError(path)
        if info["size"] is None:
            raise ConfigError(f"{path}: the server does not say how large it is, so parts of it can't be read")
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
            if not is_missing(error):  # some filesystems raise it for servers that do not answer
                raise
            return Page([], [], None)
        root = self._files._strip_protocol(folder).rstrip("/") + "/"
        files, folders = [], []
        for info in found:
            name = info["name"].removeprefix(root).strip("/")
            if f"{info['name'].rstrip('/')}/" == root:
                continue
            if info["type"] == "directory":
                folders.append(name)
            elif info["size"] is None:
                files.append((await self.info(info["name"]))._replace(name=name))
            else:
                files.append(Entry(name, info["size"], version_of(info)))
        return Page(files, folders, None)

    @property
    def _finds(self) -> bool:
        """Whether the filesystem has its own recursive listing.

        fsspec's default walks from folder to folder, and silently leaves out those that can't be
        listed.
        """
        return type(self._files)._find is not AsyncFileSystem._find

    async def _walk(self, root: str) -> Iterable[Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        pending = [root]
        while pending:
            folders, pending = pending[:FOLDERS_AT_ONCE], pending[FOLDERS_AT_ONCE:]
            for listed in await asyncio.gather(*(self.call("ls", folder, detail=True) for folder in folders)):
                new = {info["name"]: info for info in listed if info["name"] not in found}
                found |= new
                pending += [name for name, info in new.items() if info["type"] == "directory"]
        return found.values()

    async def write(self, path: str, data: bytes) -> None:
        try:
            await self.call("pipe_file", path, data)
        except FileNotFoundError:  # the folder is missing; object stores have no folders, others do
            await self.call("makedirs", path.rpartition("/")[0], exist_ok=True)
            await self.call("pipe_file", path, data)

    async def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            await self.call("rm_file", path)

    async def remove_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            await self.call("rm", path, recursive=True)

    async def close(self) -> None:
        session = self._session or getattr(self._files, "session", None)
        close = getattr(session, "close", None)
        closing = close() if close is not None else None
        if asyncio.iscoroutine(closing):
            await closing


class BlockingClient(AsyncClient):
    """Any blocking fsspec filesystem, called in threads."""

    @classmethod
    async def files(cls, filesystem: type[Any], options: Mapping[str, Any], storage: Storage) -> Any:
        return await asyncio.to_thread(filesystem, **cls.options(options, storage), skip_instance_cache=True)

    async def open(self) -> None:
        """Nothing to do."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "cat_file" and type(self._files).cat_file is AbstractFileSystem.cat_file:
            kwargs["cache_type"] = "none"  # the default opens a file, which would read ahead
        call = partial(getattr(self._files, method), *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(None, call)

    @property
    def _finds(self) -> bool:
        return type(self._files).find is not AbstractFileSystem.find


class LocalClient(BlockingClient):
    """Local files, written completely or not at all."""

    async def write(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(write_whole, Path(path), data)
