"""Files and folders: the only module that touches them. Shards are mapped into memory, never read whole.

For now shards are local; checkpoints go to any filesystem that fsspec knows.
"""

import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from fmsdata.errors import ConfigError, DataError, FmsdataError

Opened = TypeVar("Opened")
SMALL = 1 << 16


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path as a local one, or an error if it is a URL of something else.

    >>> local_path("file:///data/web")
    PosixPath('/data/web')
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"path is {path!r}; it must be the path of a folder")
    text = os.fspath(path)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if protocol in ("file", "local"):
        return Path(rest)
    raise ConfigError(f"path {text!r}: {protocol}:// is not available yet; use a local folder or a mounted one")


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
        self, url: str | os.PathLike[str], options: Mapping[str, Any], error: Callable[[str], FmsdataError]
    ) -> None:
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError(f"path is {url!r}; it must be the path of a folder")
        self._url, self._error = os.fspath(url).rstrip("/"), error
        try:
            self._files, self._root = fsspec.core.url_to_fs(os.fspath(url), **options)
        except (ValueError, ImportError, TypeError) as cause:
            raise ConfigError(f"path {self._url!r} can't be used: {cause}") from None
        self._local = isinstance(self._files, LocalFileSystem)

    def __str__(self) -> str:
        return self._url

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        return sorted(name for name, size in self._list("").items() if size is None)

    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder of it, and their sizes. Hidden ones, which may be unfinished, are left out."""
        listed = self._list(folder)
        return {name: size for name, size in listed.items() if size is not None and not name.startswith(".")}

    def _list(self, folder: str) -> dict[str, int | None]:
        path = f"{self._root}/{folder}".rstrip("/")
        with self._told(f"{folder}: can't be listed"), suppress(FileNotFoundError):
            if self._local:
                return _list_local(path)
            entries = self._files.ls(path, detail=True, refresh=True)
            return {
                one["name"].rstrip("/").rpartition("/")[2]: None if one["type"] == "directory" else one["size"]
                for one in entries
                if one["name"].rstrip("/") != path
            }
        return {}

    def read(self, name: str) -> bytes:
        with self._told(f"{name}: can't be read"):
            return bytes(self._files.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all. On object stores that is what writing does."""
        path = f"{self._root}/{name}"
        with self._told(f"{name}: can't be written"):
            if self._local:
                _write_whole(Path(path), data)
                return
            try:
                self._files.pipe_file(path, data)
            except FileNotFoundError:  # object stores have no folders, others do
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, data)

    def remove_file(self, name: str) -> None:
        """Remove a file. What another process has removed already is no matter."""
        with self._told(f"{name}: can't be removed"), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder, one file of it first. What another process has removed already is no matter."""
        path = f"{self._root}/{folder}"
        with self._told(f"{folder}: can't be removed"):
            for name in sorted(self._list(folder), key=lambda name: (name != first, name)):
                with suppress(FileNotFoundError):
                    self._files.rm(f"{path}/{name}", recursive=True)
            with suppress(FileNotFoundError, OSError):
                self._files.rmdir(path)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except FmsdataError:
            raise
        except Exception as cause:  # every filesystem has errors of its own
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise self._error(f"{self._url}/{what}: {reason}") from cause


def _list_local(folder: str) -> dict[str, int | None]:
    """Other processes may write and remove files meanwhile: what is gone when it is looked at was not there."""
    found: dict[str, int | None] = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            found[entry.name] = None if entry.is_dir() else entry.stat().st_size
    return found


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name, and give it its own when all of it is on the disk.

    The other name is used by nobody else: several processes may write the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
