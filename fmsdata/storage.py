"""Files and folders: the only module that touches them. Shards are mapped into memory, never read whole.

For now every path is a local one; object stores come in through the same few functions.
"""

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import pyarrow as pa

from fmsdata.errors import ConfigError, DataError

Opened = TypeVar("Opened")


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path as a local one, or an error if it is a URL of something else.

    >>> local_path("file:///data/web")
    PosixPath('/data/web')
    """
    text = os.fspath(path)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if protocol in ("file", "local"):
        return Path(rest)
    raise ConfigError(f"path {text!r}: {protocol}:// is not available yet; use a local folder or a mounted one")


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Paths, relative to the folder and sorted, of all files below it that end in one of the suffixes.

    Hidden files and folders are left out: they are what interrupted copies leave behind.
    """
    found: list[str] = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = os.path.relpath(parent, folder).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        found += [prefix + name for name in files if name.endswith(suffixes) and not name.startswith(".")]
    return sorted(found)


def map_file(path: Path) -> pa.Buffer:
    """The file's bytes, mapped. No file descriptor stays open; the mapping ends with the last use of it."""
    try:
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()
    except FileNotFoundError:
        raise DataError(f"{path}: the file is gone; it was there when the shards were listed") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


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
