"""Files and folders on a local disk: shards are mapped into memory, never read whole. And folders of small files, such
as checkpoints, on any filesystem that fsspec knows.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import pyarrow as pa

from fmsdata.errors import DataError

Opened = TypeVar("Opened")
SMALL = 1 << 16


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


class MappedFiles:
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
