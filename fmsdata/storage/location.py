"""Location: a folder or a file, on a local disk or on any filesystem that fsspec supports.

Planning uses it to find sources, list shards, and read and write counts; checkpoints use it for
their files. A remote location goes through this process's connection to its filesystem, which is
looked up for each call because the process may have been forked.

One listing returns the names, sizes and versions of all files below a folder, so no shard needs a
request of its own. Locations that are derived from each other can share it (see `listed`).
"""

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from fmsdata.core.limits import describe_os_error
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, FmsdataError, MissingError, StorageError
from fmsdata.storage.atomic import write_whole
from fmsdata.storage.clients.base import Entry, Listing
from fmsdata.storage.connection import Connection
from fmsdata.storage.io_thread import together
from fmsdata.storage.local import file_entry, list_files, list_level, remove_folder
from fmsdata.storage.secrets import mask_password
from fmsdata.storage.settings import Storage

Made = TypeVar("Made")
LOCAL = ("file", "local")
ROOT_PARTS = {"hf": 2}  # leading parts of a path above which nothing can be listed; by default 1, the bucket


class _Shared:
    """Listings, and what was made of them, for all locations that share them."""

    def __init__(self) -> None:
        self.below: dict[str, list[Entry]] = {}  # all files below a folder, by its URL
        self.made: dict[tuple[str, object], Any] = {}


class Location:
    """A folder or a file, local or remote.

    `options` configure its filesystem, for example with credentials, and are never shown. `local`
    is its path if it is local. `error` is the exception to raise if an operation fails; without it,
    remote locations raise StorageError, and local ones OSError.

    >>> web = Location("s3://bucket/corpus", {"anon": True}) / "lang=en/web"
    >>> str(web), web.name, str(web.parent), web.local
    ('s3://bucket/corpus/lang=en/web', 'web', 's3://bucket/corpus/lang=en', None)
    """

    def __init__(
        self,
        url: "str | os.PathLike[str] | Location",
        options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        *,
        error: type[FmsdataError] | None = None,
    ) -> None:
        self._shared: _Shared | None = None
        self._error: type[FmsdataError] | None
        self.options: dict[str, Any]
        self.storage: Storage
        self.url: str
        self.local: Path | None
        if isinstance(url, Location):
            self._shared = url._shared if options is None else None
            options, storage = url.options if options is None else options, storage or url.storage
            error = error or url._error
            url = url.url
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError(f"path is {shown(url)}; it must be the path of a folder")
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(key, str) for key in options)):
            raise ConfigError("storage_options must be a dict of options by name, as in {'anon': True}")
        if storage is not None and not isinstance(storage, Storage):
            raise ConfigError(f"storage is {shown(storage)}; it must be an fmsdata.Storage")
        self.options = dict(options or {})
        self.storage = storage or Storage()
        self._error = error
        self.url, self.local = _parse(os.path.expanduser(os.fspath(url)))

    def __str__(self) -> str:
        """The local path, or the URL without its password."""
        return str(self.local) if self.local is not None else mask_password(self.url)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shared": None}  # listings are not for later, nor for other processes

    def __truediv__(self, below: str) -> "Location":
        """A path below this one. A URL, or an absolute path on a local disk, replaces it."""
        if "://" in below:
            if same_kind(self.url, below):
                return self._at(below)
            return Location(below, None, self.storage, error=self._error)
        if self.local is not None:
            return self._at(str(self.local / below))
        return self._at(f"{self.url}/{below.strip('/')}")

    def _at(self, url: str) -> "Location":
        other = copy(self)
        other._shared = self._shared
        other.url, other.local = _parse(url)
        return other

    @property
    def name(self) -> str:
        return self.local.absolute().name if self.local is not None else self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """The folder that contains it; a bucket is its own parent."""
        if self.local is not None:
            return self._at(str(self.local.parent))
        protocol, _, path = self.url.partition("://")
        above = path.rpartition("/")[0]
        if above and above.count("/") >= ROOT_PARTS.get(protocol, 1) - 1:
            return self._at(f"{protocol}://{above}")
        return self

    @property
    def parents(self) -> "list[Location]":
        """The folders that contain it, from the nearest to the bucket or the root of the disk."""
        parents: list[Location] = []
        below, above = self, self.parent
        while above.url != below.url:
            parents.append(above)
            below, above = above, above.parent
        return parents

    def absolute(self) -> "Location":
        return self if self.local is None else self._at(os.path.abspath(self.local))

    def inside(self, folder: "Location") -> str:
        """Its path relative to a folder; its URL if it is on another filesystem or in another
        bucket.

        >>> Location("s3://bucket/corpus/lang=en/web").inside(Location("s3://bucket/corpus"))
        'lang=en/web'
        """
        if self.local is not None and folder.local is not None:
            return os.path.relpath(self.local, folder.local)
        if self.url.startswith(f"{folder.url}/"):
            return self.url[len(folder.url) + 1 :]
        same = self.url.split("/")[:3] == folder.url.split("/")[:3]  # protocol, nothing, bucket
        return posixpath.relpath(self.url, folder.url) if same else str(self)

    def listed(self, *below: str) -> "Location":
        """The same location, sharing listings with all locations derived from it.

        The given folders are listed now, concurrently.
        """
        shared = copy(self)
        shared._shared = known = self._shared or _Shared()
        new = [place for place in (shared / name for name in below) if place.local is None and place._known() is None]
        urls = {place.url for place in new}
        outer = {place.url: place for place in new if urls.isdisjoint(above.url for above in place.parents)}
        for connection in {place.connection for place in outer.values()}:
            places = [place for place in outer.values() if place.connection is connection]
            known.below.update(zip((place.url for place in places), _list_all(connection, places), strict=True))
        return shared

    def alone(self) -> "Location":
        """The same location without shared listings."""
        other = copy(self)
        other._shared = None
        return other

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """The result of `make`, which is called once for all locations that share listings."""
        if self._shared is None:
            return make()
        place = (self.url, key)
        if place not in self._shared.made:
            self._shared.made[place] = make()
        made: Made = self._shared.made[place]
        return made

    def made(self, key: object) -> Any:
        """What `once` made of this location and key; None if it was not called."""
        return None if self._shared is None else self._shared.made.get((self.url, key))

    def exists(self) -> bool:
        if self.local is not None:
            return self.local.exists()
        return self.is_dir() or self.is_file()

    def is_file(self) -> bool:
        if self.local is not None:
            return self.local.is_file()
        try:
            self.connection.run(self.connection.info(self.path))
        except MissingError:
            return False
        return True

    def why_no_folder(self) -> str:
        """Why this is not a folder, for errors."""
        return "is a file, not a folder" if self.exists() else "no such folder"

    def is_dir(self) -> bool:
        """Whether it is a folder. On an object store: whether there is anything in it."""
        if self.local is not None:
            return self.local.is_dir()
        return bool(self._known()) or any(self.level())

    def folders(self) -> list[str]:
        """The names of the folders in it, sorted; none if it does not exist."""
        return self.level().folders

    def sizes(self) -> dict[str, int]:
        """The files in it with their sizes; none if it does not exist.

        Hidden files are left out: they may be unfinished.
        """
        return {entry.name: entry.size for entry in self.level().files if not entry.name.startswith(".")}

    def names(self, suffixes: tuple[str, ...]) -> list[str]:
        """Paths, relative to it and sorted, of all files below it that end in one of the suffixes.

        Hidden files and folders are left out: interrupted copies leave them behind.
        """
        return list_files(self.local, suffixes) if self.local is not None else [e.name for e in self.files(suffixes)]

    def files(self, suffixes: tuple[str, ...]) -> list[Entry]:
        """The same files with their sizes and versions."""
        if self.local is not None:
            return [file_entry(self.local, name) for name in list_files(self.local, suffixes)]
        known = self._known()
        if known is None:
            (known,) = _list_all(self.connection, [self])
            if self._shared is not None:
                self._shared.below[self.url] = known
        found = (entry for entry in known if entry.name.endswith(suffixes) and "/." not in f"/{entry.name}")
        return sorted(found, key=lambda entry: entry.name)

    def level(self) -> Listing:
        """The files and folders directly in it; empty if it does not exist."""
        known = self._known()
        if known is not None:
            files = [entry for entry in known if "/" not in entry.name]
            return Listing(files, sorted({entry.name.partition("/")[0] for entry in known if "/" in entry.name}))
        with self._raising("listed"):
            if self.local is not None:
                return list_level(self.local)
            return self.once(Listing, lambda: self.connection.run(self.connection.list(self.path, False)))

    def read_bytes(self) -> bytes:
        with self._raising("read"):
            if self.local is not None:
                return self.local.read_bytes()
            return self.connection.run(self.connection.read_all(self.path))

    def read_range(self, start: int, stop: int, version: str | None = None) -> bytes:
        """The bytes from start to stop, all of them. A remote file must have this version, if one is given."""
        with self._raising("read"):
            if self.local is None:
                return bytes(self.connection.run(self.connection.read(self.path, start, stop, version)).data)
            with self.local.open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
            if len(data) != stop - start:
                raise OSError(f"it ends at byte {start + len(data)}, expected {stop}")
            return data

    def write_bytes(self, data: bytes) -> None:
        """Write a small file, completely or not at all."""
        with self._raising("written"):
            if self.local is not None:
                write_whole(self.local, data)
            else:
                self.connection.run(self.connection.write(self.path, data))

    def remove(self) -> None:
        """Remove a file. It need not exist: another process may have removed it."""
        with self._raising("removed"):
            if self.local is not None:
                self.local.unlink(missing_ok=True)
            else:
                self.connection.run(self.connection.remove(self.path))

    def remove_folder(self, first: str) -> None:
        """Remove a folder and all files in it, beginning with the one named `first`.

        It need not exist.
        """
        with self._raising("removed"):
            if self.local is not None:
                remove_folder(self.local, first)
                return
            connection, path = self.connection, self.path.rstrip("/")
            names = [entry.name for entry in connection.run(connection.list(path)).files]
            for name in sorted(names, key=lambda name: (name != first, name)):
                connection.run(connection.remove(f"{path}/{name}"))  # not every store can remove many at once
            connection.run(connection.remove_folder(path))

    @contextmanager
    def _raising(self, verb: str) -> Iterator[None]:
        """Raise failures as the exception that the caller chose, with the file and the cause."""
        try:
            yield
        except StorageError as cause:  # it names the file
            if self._error is None:
                raise
            raise self._error(str(cause)) from None
        except OSError as cause:
            if self._error is None:
                raise
            raise self._error(f"{self} can't be {verb}: {describe_os_error(cause)}") from cause

    @property
    def connection(self) -> Connection:
        """This process's connection to its filesystem, if it is remote."""
        return Connection.to(self.url, self.options, self.storage)

    @property
    def path(self) -> str:
        """Its path, in the form that its filesystem expects."""
        return self.connection.path(self.url)

    def _known(self) -> list[Entry] | None:
        """All files below it, if it or a folder that contains it was listed."""
        below = {} if self._shared is None else self._shared.below
        if self.url in below:
            return below[self.url]
        for folder in self.parents if below else ():
            if folder.url in below:
                inside = self.inside(folder) + "/"
                return [
                    entry._replace(name=entry.name[len(inside) :])
                    for entry in below[folder.url]
                    if entry.name.startswith(inside)
                ]
        return None


def _parse(text: str) -> tuple[str, Path | None]:
    """The URL in its normal form, and the path if it is local."""
    protocol, separator, path = text.partition("://")
    if not separator:
        return text, Path(text)
    if protocol in LOCAL:
        return path, Path(path)
    shown = mask_password(text)
    if "::" in protocol:
        raise ConfigError(
            f"path {shown!r} chains several filesystems; name one, and set `storage.cache` to keep local copies"
        )
    if not path.strip("/") or (protocol == "s3" and path.startswith("/")):
        raise ConfigError(f"path {shown!r} names no folder; write {protocol}://bucket/folder")
    if protocol in ("http", "https") and "?" in path:
        shown = shown.partition("?")[0]
        raise ConfigError(f"path {shown!r} has a query; write storage_options: {{params: {{...}}}} instead")
    parts: list[str] = []
    for part in path.rstrip("/").split("/"):
        if part not in (".", ".."):
            parts.append(part)
        elif part == ".." and len(parts) > 1:  # but not out of the bucket
            parts.pop()
    return f"{protocol}://{'/'.join(parts)}", None


def _list_all(connection: Connection, folders: list[Location]) -> list[list[Entry]]:
    listings = connection.run(together(connection.list(folder.path, True) for folder in folders))
    return [listing.files for listing in listings]


def same_kind(first: str, second: str) -> bool:
    """Whether two paths are on the same kind of filesystem.

    >>> same_kind("s3://corpus/web", "s3://runs/7"), same_kind("s3://corpus/web", "checkpoints")
    (True, False)
    """
    return bool(fsspec.utils.get_protocol(first) == fsspec.utils.get_protocol(second))
