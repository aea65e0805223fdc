"""Files and folders on a local disk: shards are mapped into memory, never read whole. And folders of small files, such
as checkpoints, on any filesystem that fsspec knows.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from fmsdata.atomic import write_whole
from fmsdata.connection import Connection
from fmsdata.errors import ConfigError, DataError, FmsdataError, StorageError
from fmsdata.storage_settings import Storage

Opened = TypeVar("Opened")
SMALL = 1 << 16


def is_local(url: str) -> bool:
    """Whether a path or URL is that of a local file or folder."""
    return fsspec.utils.get_protocol(url) in ("file", "local")


def same_kind(one: str, other: str) -> bool:
    """Whether two paths are on the same kind of filesystem.

    >>> same_kind("s3://corpus/web", "s3://runs/7"), same_kind("s3://corpus/web", "checkpoints")
    (True, False)
    """
    return bool(fsspec.utils.get_protocol(one) == fsspec.utils.get_protocol(other))


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Paths, relative to the folder and sorted, of all files below it that end in one of the suffixes.

    Hidden files and folders are left out: they are what interrupted copies leave behind. Links are followed.
    """
    return sorted(_walk(str(folder), "", suffixes, ()))


def _walk(folder: str, inside: str, suffixes: tuple[str, ...], above: tuple[str, ...]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:
        raise DataError(f"{folder}: links to a folder that it is in; remove the link")
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed: {error.strerror}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, f"{inside}{entry.name}/", suffixes, (*above, real))
        elif entry.name.endswith(suffixes):
            if not entry.is_file() and not entry.is_symlink():
                raise DataError(f"{entry.path}: not a regular file; remove it or give it another name")
            yield inside + entry.name


def map_file(path: Path) -> pa.Buffer:
    """The file's bytes, mapped. No file descriptor stays open; the mapping ends with the last use of it.

    A small file is read instead: thousands of them may be in use at once, and a process can have some 65,000 mappings.
    """
    try:
        with pa.memory_map(str(path)) as file:
            return pa.py_buffer(path.read_bytes()) if file.size() <= SMALL else file.read_buffer()
    except FileNotFoundError:
        raise DataError(f"{path}: the file is gone; it was there when the shards were listed") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


class Mapped:
    """Files that are mapped now, so that none is mapped twice. A mapping ends with its last user."""

    def __init__(self) -> None:
        self._buffers: WeakValueDictionary[Path, pa.Buffer] = WeakValueDictionary()

    def get(self, path: Path) -> pa.Buffer:
        buffer = self._buffers.get(path)
        if buffer is None:
            self._buffers[path] = buffer = map_file(path)
        return buffer


class Recent(Generic[Opened]):
    """The most recently used of what `open` makes, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[object, Opened] = OrderedDict()

    def get(self, key: object, open: Callable[[], Opened]) -> Opened:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        self._kept[key] = opened = open()
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return opened


class Folder:
    """A folder of small files on any fsspec filesystem, written whole or not at all.

    Whatever goes wrong is raised as `error`, with the file and the cause.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any],
        error: Callable[[str], FmsdataError],
        storage: Storage | None = None,
    ) -> None:
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError(f"path is {url!r}; it must be the path of a folder")
        text = os.fspath(url)
        self._url, self.storage_options, self._error = text.rstrip("/"), dict(options), error
        self._files = _LocalFiles(text) if is_local(text) else _RemoteFiles(text, self.storage_options, storage)

    def __str__(self) -> str:
        return self._url

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        with self._told("can't be listed"):
            return sorted(name for name, size in self._files.list("").items() if size is None)

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder of it, and their sizes. Hidden ones, which may be unfinished, are left out."""
        with self._told(f"{folder}: can't be listed"):
            listed = self._files.list(folder)
        return {name: size for name, size in listed.items() if size is not None and not name.startswith(".")}

    def read(self, name: str) -> bytes:
        with self._told(f"{name}: can't be read"):
            return self._files.read(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        with self._told(f"{name}: can't be written"):
            self._files.write(name, data)

    def remove_file(self, name: str) -> None:
        """Remove a file. What another process has removed already is no matter."""
        with self._told(f"{name}: can't be removed"):
            self._files.remove_file(name)

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder, one file of it first. What another process has removed already is no matter."""
        with self._told(f"{folder}: can't be removed"):
            self._files.remove(folder, first)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except StorageError as cause:  # it names the file already
            raise self._error(str(cause)) from None
        except OSError as cause:
            raise self._error(f"{self._url}/{what}: {cause.strerror or cause}") from cause


class _LocalFiles:
    """What a folder does with local files."""

    def __init__(self, path: str) -> None:
        self._root = Path(LocalFileSystem._strip_protocol(path))

    def list(self, folder: str) -> dict[str, int | None]:
        """Other processes may write and remove files meanwhile: what is gone when it is looked at was not there."""
        found: dict[str, int | None] = {}
        with suppress(FileNotFoundError):
            for entry in os.scandir(self._root / folder):
                with suppress(FileNotFoundError):
                    found[entry.name] = None if entry.is_dir() else entry.stat().st_size
        return found

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        write_whole(self._root / name, data)

    def remove_file(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def remove(self, folder: str, first: str) -> None:
        for name, size in sorted(self.list(folder).items(), key=lambda one: (one[0] != first, one[0])):
            if size is None:
                self.remove(f"{folder}/{name}", first)
            else:
                self.remove_file(f"{folder}/{name}")
        with suppress(OSError):
            (self._root / folder).rmdir()


class _RemoteFiles:
    """The same through a connection. Object stores have no folders: they end with the last file in them."""

    def __init__(self, url: str, options: Mapping[str, Any], storage: Storage | None) -> None:
        self._url, self._options, self._storage = url, options, storage
        self._root = self._connection.path(url).rstrip("/")

    @property
    def _connection(self) -> Connection:
        return Connection.to(self._url, self._options, self._storage)  # of this process: there may have been a fork

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def list(self, folder: str) -> dict[str, int | None]:
        connection = self._connection
        listed = connection.run(connection.list(self._path(folder), recursive=False))
        return {**dict.fromkeys(listed.folders), **{entry.name: entry.size for entry in listed.files}}

    def read(self, name: str) -> bytes:
        connection = self._connection
        return connection.run(connection.read_all(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        connection = self._connection
        connection.run(connection.write(self._path(name), data))

    def remove_file(self, name: str) -> None:
        connection = self._connection
        connection.run(connection.remove(self._path(name)))

    def remove(self, folder: str, first: str) -> None:
        """File by file: not every object store can remove many at once."""
        connection = self._connection
        files = connection.run(connection.list(self._path(folder))).files
        for entry in sorted(files, key=lambda entry: (entry.name != first, entry.name)):
            connection.run(connection.remove(self._path(f"{folder}/{entry.name}")))
        connection.run(connection.remove_folder(self._path(folder)))
