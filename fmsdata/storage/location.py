"""Location: a folder or a file on a local disk, or on any filesystem that fsspec knows.

Planning goes through it: finding sources, listing shards, reading and writing counts. What is not local is reached
through this process's connection to its filesystem. One listing tells names, sizes and versions of all that is below
a folder, so that no shard is asked for by itself; locations that are made of each other can share it.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fmsdata.errors import ConfigError, FmsdataError, MissingError, StorageError
from fmsdata.storage.atomic import write_whole
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.connection import Connection, Listing
from fmsdata.storage.io_thread import together
from fmsdata.storage.local import list_files
from fmsdata.storage.settings import Storage

Made = TypeVar("Made")
LOCAL = ("file", "local")
PARTS = {"hf": 2}  # of a path above which nothing can be listed; by default 1, the bucket
PASSWORD = re.compile(r"^([^/]*://[^/:]*):[^/]*@")


class _Shared:
    """What was listed, and what was made of it, for all locations that share it."""

    def __init__(self) -> None:
        self.below: dict[str, list[Entry]] = {}  # all files below a folder, by its URL
        self.made: dict[tuple[str, object], Any] = {}


class Location:
    """A folder or a file, local or not.

    `options` are for its filesystem, such as credentials, and are never shown. `local` is its path if it is local.

    >>> web = Location("s3://bucket/corpus", {"anon": True}) / "lang=en/web"
    >>> str(web), web.name, str(web.parent), web.local
    ('s3://bucket/corpus/lang=en/web', 'web', 's3://bucket/corpus/lang=en', None)
    """

    def __init__(
        self,
        url: "str | os.PathLike[str] | Location",
        options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._shared: _Shared | None = None
        self.options: dict[str, Any]
        self.storage: Storage
        self.url: str
        self.local: Path | None
        if isinstance(url, Location):
            self._shared = url._shared if options is None else None
            options, storage = url.options if options is None else options, storage or url.storage
            url = url.url
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError(f"path is {url!r}; it must be the path of a folder")
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(one, str) for one in options)):
            raise ConfigError("storage_options must be a dict of options by name, as in {'anon': True}")
        if storage is not None and not isinstance(storage, Storage):
            raise ConfigError(f"storage is {storage!r}; it must be an fmsdata.Storage")
        self.options = dict(options or {})
        self.storage = storage or Storage()
        self.url, self.local = _parsed(os.fspath(url))

    def __str__(self) -> str:
        """The local path as it was written, or the URL without a password."""
        return str(self.local) if self.local is not None else PASSWORD.sub(r"\1:***@", self.url)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shared": None}  # what was listed is of its moment and its process

    def __truediv__(self, below: str) -> "Location":
        """What is below it; or elsewhere, if `below` is a URL, or an absolute path on a local disk."""
        if "://" in below:
            return self._at(below) if same_kind(self.url, below) else Location(below, None, self.storage)
        if self.local is not None:
            return self._at(str(self.local / below))
        return self._at(f"{self.url}/{below.strip('/')}")

    def _at(self, url: str) -> "Location":
        other = copy(self)
        other._shared = self._shared
        other.url, other.local = _parsed(url)
        return other

    @property
    def name(self) -> str:
        return self.local.absolute().name if self.local is not None else self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Location":
        """The folder that it is in; of a bucket, the bucket."""
        if self.local is not None:
            return self._at(str(self.local.parent))
        protocol, _, rest = self.url.partition("://")
        above = rest.rpartition("/")[0]
        return self._at(f"{protocol}://{above}") if above.count("/") >= PARTS.get(protocol, 1) - 1 and above else self

    @property
    def parents(self) -> "list[Location]":
        """The folders that it is in, from the nearest to the bucket, or to the root of the disk."""
        parents: list[Location] = []
        below, above = self, self.parent
        while above.url != below.url:
            parents.append(above)
            below, above = above, above.parent
        return parents

    def absolute(self) -> "Location":
        return self if self.local is None else self._at(os.path.abspath(self.local))

    def inside(self, folder: "Location") -> str:
        """Its path as seen from a folder; the URL if it is on another filesystem or in another bucket.

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
        """The same, sharing all listings with what is made of it. The folders named are listed at once, now."""
        shared = copy(self)
        shared._shared = known = self._shared or _Shared()
        folders = [one for one in (shared / name for name in below) if one.local is None and one._known() is None]
        urls = {one.url for one in folders}
        outer = {one.url: one for one in folders if urls.isdisjoint(above.url for above in one.parents)}
        for connection in {one.connection for one in outer.values()}:
            mine = [one for one in outer.values() if one.connection is connection]
            known.below.update(zip((one.url for one in mine), _list_all(connection, mine), strict=True))
        return shared

    def alone(self) -> "Location":
        """The same, without what was listed."""
        return copy(self)

    def once(self, what: object, make: Callable[[], Made]) -> Made:
        """What is made of it, once for all locations that share their listings."""
        if self._shared is None:
            return make()
        key = (self.url, what)
        if key not in self._shared.made:
            self._shared.made[key] = make()
        made: Made = self._shared.made[key]
        return made

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

    def is_dir(self) -> bool:
        """Whether it is a folder. On an object store, that is: whether anything is in it."""
        if self.local is not None:
            return self.local.is_dir()
        return bool(self._known()) or any(self.level())

    def folders(self) -> list[str]:
        """The names of the folders in it, sorted."""
        if self.local is not None:
            return sorted(one.name for one in self.local.iterdir() if one.is_dir())
        return sorted(self.level().folders)

    def names(self, suffixes: tuple[str, ...]) -> list[str]:
        """Paths, relative to it and sorted, of all files below it that end in one of the suffixes.

        Hidden files and folders are left out: they are what interrupted copies leave behind.
        """
        return list_files(self.local, suffixes) if self.local is not None else [e.name for e in self.files(suffixes)]

    def files(self, suffixes: tuple[str, ...]) -> list[Entry]:
        """The same files with their sizes and versions."""
        if self.local is not None:
            return [_entry(self.local, name) for name in list_files(self.local, suffixes)]
        known = self._known()
        if known is None:
            (known,) = _list_all(self.connection, [self])
            if self._shared is not None:
                self._shared.below[self.url] = known
        found = (one for one in known if one.name.endswith(suffixes) and not f"/{one.name}".count("/."))
        return sorted(found, key=lambda one: one.name)

    def level(self) -> Listing:
        """What is in the folder itself; nothing if it is not there."""
        known = self._known()
        if known is None:
            return self.once(Listing, lambda: self.connection.run(self.connection.list(self.path, False)))
        files = [one for one in known if "/" not in one.name]
        return Listing(files, sorted({one.name.partition("/")[0] for one in known if "/" in one.name}))

    def read_bytes(self) -> bytes:
        if self.local is not None:
            return self.local.read_bytes()
        return self.connection.run(self.connection.read_all(self.path))

    def write_bytes(self, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        if self.local is not None:
            write_whole(self.local, data)
        else:
            self.connection.run(self.connection.write(self.path, data))

    def remove(self) -> None:
        if self.local is not None:
            self.local.unlink(missing_ok=True)
        else:
            self.connection.run(self.connection.remove(self.path))

    @property
    def connection(self) -> Connection:
        """This process's connection to its filesystem, if it is not local."""
        return Connection.to(self.url, self.options, self.storage)

    @property
    def path(self) -> str:
        """Its path as its filesystem has it."""
        return self.connection.path(self.url)

    def _known(self) -> list[Entry] | None:
        """All files below it, as far as it or a folder that it is in was listed."""
        below = {} if self._shared is None else self._shared.below
        if self.url in below:
            return below[self.url]
        for folder in self.parents if below else ():
            if folder.url in below:
                inside = self.inside(folder) + "/"
                return [
                    one._replace(name=one.name[len(inside) :])
                    for one in below[folder.url]
                    if one.name.startswith(inside)
                ]
        return None


def _parsed(text: str) -> tuple[str, Path | None]:
    """The URL in its plain form, and the path if it is a local one."""
    protocol, separator, rest = text.partition("://")
    if not separator:
        return text, Path(text)
    if protocol in LOCAL:
        return rest, Path(rest)
    shown = PASSWORD.sub(r"\1:***@", text)
    if "::" in protocol:
        raise ConfigError(f"path {shown!r} is several in one; name one, and give `storage.cache` a path to keep copies")
    if not rest.strip("/") or (protocol == "s3" and rest.startswith("/")):
        raise ConfigError(f"path {shown!r} names no folder; write {protocol}://bucket/folder")
    if protocol in ("http", "https") and "?" in rest:
        shown = shown.partition("?")[0]
        raise ConfigError(f"path {shown!r} has a query behind it; write storage_options: {{params: {{...}}}} instead")
    parts: list[str] = []
    for part in rest.rstrip("/").split("/"):
        if part not in (".", ".."):
            parts.append(part)
        elif part == ".." and len(parts) > 1:  # not out of the bucket
            parts.pop()
    return f"{protocol}://{'/'.join(parts)}", None


def _list_all(connection: Connection, folders: list[Location]) -> list[list[Entry]]:
    listings = connection.run(together(connection.list(one.path, True) for one in folders))
    return [one.files for one in listings]


def _entry(folder: Path, name: str) -> Entry:
    found = (folder / name).stat()
    return Entry(name, found.st_size, str(found.st_mtime_ns))


def is_local(url: str) -> bool:
    """Whether a path or URL is that of a local file or folder."""
    return fsspec.utils.get_protocol(url) in ("file", "local")


def same_kind(one: str, other: str) -> bool:
    """Whether two paths are on the same kind of filesystem.

    >>> same_kind("s3://corpus/web", "s3://runs/7"), same_kind("s3://corpus/web", "checkpoints")
    (True, False)
    """
    return bool(fsspec.utils.get_protocol(one) == fsspec.utils.get_protocol(other))


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
