"""Files and folders on a local disk, and what the system says about itself."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from fmsdata.core.limits import describe_os_error
from fmsdata.errors import DataError
from fmsdata.storage.clients.base import Entry, Listing

Opened = TypeVar("Opened")
FileId: TypeAlias = tuple[int, int]  # the device and the number of a file on it


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Paths, relative to the folder and sorted, of all files below it that end in one of the
    suffixes.

    Hidden files and folders are left out: interrupted copies leave them behind. Links are followed.
    """
    return sorted(inside + entry.name for inside, entry in _walk(str(folder), suffixes))


def list_ids(folder: Path, suffixes: tuple[str, ...]) -> list[tuple[str, FileId]]:
    """The same files, unsorted, each with its number on its disk.

    Files with one number are one file under several names. The numbers come with the listing; only
    links cost a call each.
    """
    devices: dict[str, int] = {}

    def file_id(entry: os.DirEntry[str]) -> FileId:
        if entry.is_symlink():
            status = os.stat(entry.path) if os.path.exists(entry.path) else entry.stat(follow_symlinks=False)
            return status.st_dev, status.st_ino
        parent = os.path.dirname(entry.path)
        if parent not in devices:
            devices[parent] = os.stat(parent).st_dev
        return devices[parent], entry.inode()

    return [(inside + entry.name, file_id(entry)) for inside, entry in _walk(str(folder), suffixes)]


def folder_times(folder: Path) -> dict[str, int]:
    """When something was last added to, removed from or renamed in a folder, and each folder below it.

    In nanoseconds, by the path from the outermost folder. These change whenever `list_files` would
    return other names. Folders named `meta` are left out: this package writes into them.
    """
    times: dict[str, int] = {}
    for _ in _folders(str(folder), "", (), times):
        pass
    return {inside: time for inside, time in times.items() if "meta" not in inside.split("/")}


def _walk(folder: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """The files, each after the path from the outermost folder to the folder that it is in."""
    for below, entries in _folders(folder, "", ()):
        for entry in entries:
            if not entry.name.endswith(suffixes) or entry.is_dir():
                continue
            if not entry.is_file() and not entry.is_symlink():
                raise DataError(f"{entry.path}: not a regular file; remove it or give it another name")
            yield below, entry


def _folders(
    folder: str, inside: str, above: tuple[str, ...], times: dict[str, int] | None = None
) -> Iterator[tuple[str, "list[os.DirEntry[str]]"]]:
    """A folder and all folders below it, with what is in them, after the path from the outermost folder."""
    real = os.path.realpath(folder)
    if real in above:
        raise DataError(f"{folder}: links to a folder that it is in; remove the link")
    try:
        if times is not None:  # before it is listed, so that what changes meanwhile is seen later
            times[inside.rstrip("/")] = os.stat(folder).st_mtime_ns
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed: {describe_os_error(error)}") from None
    yield inside, entries
    for entry in entries:
        if entry.is_dir():
            yield from _folders(entry.path, f"{inside}{entry.name}/", (*above, real), times)


def list_level(folder: Path) -> Listing:
    """The files and folders directly in a folder; empty if there is no such folder.

    Other processes may write and remove files meanwhile. A file that disappears during the listing
    is left out.
    """
    files, folders = [], []
    with suppress(FileNotFoundError):
        for found in os.scandir(folder):
            with suppress(FileNotFoundError):
                if found.is_dir():
                    folders.append(found.name)
                else:
                    files.append(_entry(found.name, found.stat()))
    return Listing(sorted(files), sorted(folders))


def file_entry(folder: Path, name: str) -> Entry:
    """A file below a folder, as a listing shows it."""
    return _entry(name, (folder / name).stat())


def _entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, str(status.st_mtime_ns))


def remove_folder(folder: Path, first: str) -> None:
    """Remove a folder, the file named `first` before the others.

    Files that are gone already are ignored.
    """
    listing = list_level(folder)
    for name in sorted((entry.name for entry in listing.files), key=lambda name: (name != first, name)):
        (folder / name).unlink(missing_ok=True)
    for name in listing.folders:
        remove_folder(folder / name, first)
    with suppress(OSError):
        folder.rmdir()


def boot_id() -> str:
    """An identifier that changes when the machine restarts.

    Raises OSError where the system has none.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Recent(Generic[Opened]):
    """A cache of at most `most` objects, of which the least recently used is evicted.

    With `size`, those behind the last `least` are also evicted when all take more than `most_bytes`.
    """

    def __init__(
        self, most: int, least: int = 1, most_bytes: float = math.inf, size: Callable[[Opened], int] = lambda _: 0
    ) -> None:
        self._most, self._least, self._most_bytes, self._size = most, least, most_bytes, size
        self._kept: OrderedDict[object, Opened] = OrderedDict()
        self._bytes = 0

    def get(self, key: object, open: Callable[[], Opened]) -> Opened:
        """The object under this key; `open` creates it if it is not there."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        self._kept[key] = opened = open()
        self._bytes += self._size(opened)
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > self._least):
            self._bytes -= self._size(self._kept.popitem(last=False)[1])
        return opened
