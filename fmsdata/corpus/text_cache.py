"""The user's folder for what is made of text files: indexes of lines, and copies that can be entered anywhere.

It is `storage.cache.path`, or `fmsdata` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`).
A file in it is named by a digest of the text file's path, size and version, so that another version
of the text file never finds it. Nothing is evicted: remove the folder to get the space back.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fmsdata.errors import ConfigError
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location
from fmsdata.storage.own_folder import make_own_folder, user_cache
from fmsdata.storage.settings import Storage

FORMAT = 1  # part of every name: a version that writes other files finds none of these
FOLDER = "fmsdata-text"  # beside other things in `storage.cache.path`
log = logging.getLogger("fmsdata")


class TextCache:
    """The folder, which is created when it is first written to.

    >>> TextCache(Storage()).path("part-0.jsonl", "index").name     # doctest: +SKIP
    '5b3f1c0d9e8a7b6c5b3f1c0d9e8a7b6c.index'
    """

    work = "indexes or copies"  # what a process does that others wait for
    contents = "what is made of text files; set storage.cache"  # and which setting moves the folder

    def __init__(self, storage: Storage) -> None:
        base = user_cache() if storage.cache is None else os.path.abspath(storage.cache.path)
        self.folder = Path(base) / FOLDER

    def path(self, key: str, ending: str) -> Path:
        """Where something is kept."""
        digest = hashlib.blake2b(f"{FORMAT}\n{key}".encode(errors="surrogateescape"), digest_size=16).hexdigest()
        return self.folder / f"{digest}.{ending}"

    def make(self) -> None:
        """Create the folder, or check that nobody else can write to it."""
        try:
            make_own_folder(str(self.folder.parent))
            make_own_folder(str(self.folder))
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: OSError) -> ConfigError:
        """The error for a folder that can't be written to."""
        return ConfigError(
            f"{self.folder}: can't be written ({error.strerror or error}), but it has to hold {self.contents} "
            "(or the variable XDG_CACHE_HOME) to a writable folder with room"
        )

    def clean(self, path: Path) -> None:
        """Remove what a killed process left of a file, while nobody else writes it."""
        for left in self.folder.glob(f".{path.name}.*.unfinished"):
            left.unlink(missing_ok=True)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Only one process of this user works on something at a time. A killed process does not hold the lock."""
        self.make()
        path = self.path(key, "lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self.unwritable(error) from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("waiting for another process that %s %s", self.work, key.partition("\n")[0])
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def version_key(folder: Location, entry: Entry, *more: str) -> str | None:
    """What identifies a version of a file; None if the filesystem has no versions."""
    if entry.version is None:
        return None
    place = folder / entry.name
    name = os.path.realpath(place.local) if place.local is not None else place.url
    return "\n".join([name, str(entry.size), entry.version, *more])
