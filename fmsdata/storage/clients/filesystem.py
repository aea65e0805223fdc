"""TODO."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from fmsdata.errors import ConfigError
from fmsdata.storage.atomic import write_whole
from fmsdata.storage.clients.base import Entry, Fetched, Page, version_of
from fmsdata.storage.retry import Damaged, Replaced, is_missing

WALKS = 8  # folders that are listed at a time


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
