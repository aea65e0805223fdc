"""A cache of fetched ranges on the node's own disk, shared by all processes of the node.

An entry is a file that holds the digest of its key and the checksum of its data. So a file that was
torn by a power failure, damaged by the disk or renamed is noticed, removed and fetched again.
Against forgery, the folder belongs to its user alone (see `own_folder.py`): the checksum has no
key.

Readers take no lock. Writers reserve the bytes of an entry in a ledger before they write it. So the
ledger never says less than there is, whichever process is killed at whatever moment, and nobody has
to count. Only when the ledger says that the cache is full, one process counts the entries and
evicts the least recently used ones, while the others continue to read. Locks end with the process
that holds them (`file_lock.py`).

Entries are not written with `atomic.py`, for two reasons. Damaged entries are noticed anyway, so an
fsync would only cost time. And the temporary file has the size of the entry from the start, so
other processes see how many bytes are reserved for it.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import struct
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.errors import ConfigError
from fmsdata.storage.file_lock import closed_in_forks, is_free, locked
from fmsdata.storage.local import boot_id
from fmsdata.storage.own_folder import is_private, make_own_folder, open_own_file, open_own_folder

HEADER = struct.Struct("<8sQ20s20s")  # the format and its version, length of the data, digest of the key, checksum
FORMAT = b"fmscach1"
ENTRY = re.compile(r"([0-9a-f]{38})\.range")  # in a folder named by the first two digits
UNFINISHED = re.compile(r"[0-9a-f]{16}")
LEDGER = struct.Struct("<8s16sQ")  # the format and its version, the boot in which entries were counted, bytes
LEDGER_FORMAT = b"fmsledg1"
# A tenth of the cache is evicted at a time: counting costs 4 us an entry, so 40 us for each entry
# that is stored.
FREE = 10
TOUCH_AFTER = 60.0  # seconds in which a second use of an entry is not recorded
LONGEST = 1.0  # seconds for evicting more than is needed at once: the disk may be busy, and the caller waits
BATCH = 64  # entries to evict between two updates of the ledger
ABANDONED_AFTER = 10.0  # seconds without a lock: a file gets its lock a moment after it was created
# Seconds to wait for the ledger, which is usually locked for 10 us, and for room. After that, data
# is not stored.
PATIENCE = 0.5
NOT_OURS = (FileNotFoundError, NotADirectoryError, PermissionError)  # nothing of ours is there
REST = 10.0  # seconds without storing anything after a failure
log = logging.getLogger("fmsdata")


class DiskCache:
    """Ranges of remote files in a folder of at most `limit` bytes, headers and all included.

    The least recently used ranges are evicted; uses within a minute count as one. Any number of
    processes and threads can use the folder at the same time. Processes with the same limit never
    exceed it, not even for a moment and not by a byte. With different limits, the largest holds at
    all times, and a smaller one after each `put` of a process that has it. (What the filesystem
    adds, up to 4 KiB a file, is not counted. Files that somebody puts there by hand are counted
    from the next time that the cache is full.)

    `get` never waits for other processes. `put` waits for a moment, and takes a second or two if it
    has to evict among 100,000 entries. It may skip storing rather than wait.

    >>> import tempfile
    >>> cache = DiskCache(tempfile.mkdtemp(), limit=1 << 30)
    >>> cache.put("s3://corpus/web/a.arrow|etag|0-6", b"tokens")
    >>> cache.get("s3://corpus/web/a.arrow|etag|0-6", size=6)
    b'tokens'
    >>> cache.get("s3://corpus/web/b.arrow|etag|0-6", size=6) is None
    True
    """

    def __init__(self, path: str | Path, limit: int) -> None:
        self.path, self.limit = os.path.abspath(path), whole("limit", limit, least=1)
        self._boot = _boot()
        self._warned: set[str] = set()
        self._rest_until = 0.0
        try:
            make_own_folder(self.path)
            self._root = os.path.realpath(self.path)  # no link is followed below
            self._unfinished = f"{self._root}/.fmsdata-unfinished"
            self._unfinished_bytes()
            with self._ledger(patience=5.0) as ledger:
                if ledger.boot != self._boot:  # after a power failure, the ledger may be an old one
                    ledger.forget()
                crowded = ledger.total is None or ledger.total > self.limit
            if crowded:
                self._make_room(0)
        except TimeoutError as error:
            self._warn_unusable(str(error))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: can't be used as a cache: {getattr(error, 'strerror', None) or error}; "
                "give a writable folder on a disk of the node, or none to run without a cache"
            ) from None

    def get(self, key: str, size: int) -> bytes | None:
        """The data stored under the key; None if it is missing or damaged, and must be fetched."""
        digest = _digest(key)
        try:
            with self._open_entry(digest) as file:
                info = os.fstat(file.fileno())
                if info.st_size == HEADER.size + size and is_private(info):
                    header, data = file.read(HEADER.size), file.read(size)
                    if header == _header(digest, data):
                        if not 0 <= time.time() - info.st_mtime < TOUCH_AFTER:
                            _touch(file.fileno())
                        return data
            problem = "it is damaged"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # not the file's fault
                self._warn_unusable(problem)
                return None
        text = f"{self._file(digest)} is fetched again: {problem}; further such files are not reported"
        self._warn_once("damage", text)
        self._remove(digest)
        return None

    @contextmanager
    def _open_entry(self, digest: bytes) -> Iterator[BinaryIO]:
        folder, name = os.path.split(self._file(digest))
        with open_own_folder(folder) as fd, open(open_own_file(name, os.O_RDONLY, fd), "rb") as file:
            yield file

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Store the data.

        If that fails, for example because the disk is full, warn once and do not store it.
        """
        data = memoryview(data).cast("B")
        size = HEADER.size + len(data)
        if size > self.limit or time.monotonic() < self._rest_until:
            return
        try:
            with self._unfinished_file() as (fd, unfinished, name):
                if self._reserve(size, fd):
                    self._store(_digest(key), data, fd, unfinished, name)
        except OSError as error:
            self._rest_until = time.monotonic() + REST
            self._warn_unusable(error.strerror or str(error))

    @contextmanager
    def _unfinished_file(self) -> Iterator[tuple[int, int, str]]:
        """A new file, open, its folder and its name. It is locked while it is written."""
        name = secrets.token_hex(8)
        with _folder(self._unfinished) as folder:
            fd = open_own_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
            with closed_in_forks(fd):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield fd, folder, name
                finally:
                    with suppress(FileNotFoundError):  # it was renamed to its entry
                        os.unlink(name, dir_fd=folder)

    def _reserve(self, size: int, fd: int) -> bool:
        """Add `size` bytes to the ledger, if they fit. They stay there if storing the entry fails.

        The file gets its size at the same time, so that a process that counts sees the reserved
        bytes.
        """
        end = time.monotonic() + PATIENCE
        while True:
            with self._ledger() as ledger:
                if ledger.total is not None and ledger.total + size <= self.limit:
                    ledger.write(ledger.total + size, ledger.boot)
                    os.ftruncate(fd, size)
                    return True
            if time.monotonic() > end:
                return False
            if not self._make_room(size):
                time.sleep(0.002)

    def _store(self, digest: bytes, data: memoryview, fd: int, unfinished: int, name: str) -> None:
        _write(fd, memoryview(_header(digest, data)))
        _write(fd, data)
        _touch(fd)  # the kernel's own times are the same for files written within some milliseconds
        folder, entry = os.path.split(self._file(digest))
        with _folder(folder) as into:
            os.rename(name, entry, src_dir_fd=unfinished, dst_dir_fd=into)

    def _make_room(self, size: int) -> bool:
        """Count the entries, and evict the least recently used ones.

        False if another process does it already.

        Others store and read meanwhile. Bytes that they reserved before the ledger was read belong
        to an unfinished file that is listed next, or to an entry that is found later (or to both:
        then the count is too large, but never too small). Bytes that they reserve afterwards are
        added whenever the ledger is written.
        """
        with locked(f"{self._root}/.fmsdata-room", patience=0) as alone:
            if alone is None:
                return False
            with self._ledger() as ledger:
                known = ledger.total
            if size and known is not None and known + size <= self.limit:
                return True  # another process was faster
            total = self._unfinished_bytes()
            times, sizes, digests = self._entries()
            total += sum(sizes)
            goal = self.limit - self.limit // FREE - size
            end = time.monotonic() + LONGEST
            oldest = iter(np.argsort(np.frombuffer(times, np.int64), kind="stable").tolist())
            while True:
                with self._ledger() as ledger:
                    now = ledger.total
                    if (now is None) != (known is None):
                        return True  # another process asked for a new count
                    total = max(0, total + (now or 0) - (known or 0))
                    ledger.write(total, self._boot)
                known = total
                batch = list(islice(oldest, BATCH))
                late = time.monotonic() > end and total + size <= self.limit
                if total <= goal or late or not batch:
                    return True
                for entry in batch:
                    if total > goal and self._remove(digests[20 * entry : 20 * entry + 20]):
                        total -= sizes[entry]

    def _entries(self) -> tuple["array[int]", "array[int]", bytearray]:
        """Time of last use, size and digest of each entry.

        Files with other names are not ours, and ignored.
        """
        times, sizes, digests = array("q"), array("q"), bytearray()
        for number in range(256):
            folder = f"{self._root}/{number:02x}"
            with suppress(*NOT_OURS), open_own_folder(folder), os.scandir(folder) as files:
                for file in files:
                    if match := ENTRY.fullmatch(file.name):
                        with suppress(FileNotFoundError):
                            info = file.stat(follow_symlinks=False)
                            times.append(info.st_mtime_ns)
                            sizes.append(info.st_size)
                            digests += bytes.fromhex(f"{number:02x}{match[1]}")
        return times, sizes, digests

    def _unfinished_bytes(self) -> int:
        """The bytes reserved for unfinished files.

        Files left behind by ended processes are removed.
        """
        reserved = 0
        with _folder(self._unfinished) as folder:
            for name in os.listdir(folder):
                if UNFINISHED.fullmatch(name):
                    with suppress(FileNotFoundError):
                        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if time.time() - info.st_ctime > ABANDONED_AFTER and is_free(f"{self._unfinished}/{name}"):
                            os.unlink(name, dir_fd=folder)
                        else:
                            reserved += info.st_size
        return reserved

    def _remove(self, digest: bytes | bytearray) -> bool:
        """Remove an entry. A process that has it open can still read it."""
        folder, name = os.path.split(self._file(digest))
        try:
            with open_own_folder(folder) as fd:
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            self._warn_unusable(f"{folder}/{name} can't be removed: {error.strerror}")
            return False
        return True

    def _file(self, digest: bytes | bytearray) -> str:
        name = digest.hex()
        return f"{self._root}/{name[:2]}/{name[2:]}.range"

    @contextmanager
    def _ledger(self, patience: float | None = None) -> Iterator["_Ledger"]:
        with locked(f"{self._root}/.fmsdata-ledger", PATIENCE if patience is None else patience) as fd:
            if fd is None:
                raise TimeoutError("another process holds the ledger and makes no progress")
            yield _Ledger(fd)

    def _warn_unusable(self, problem: str) -> None:
        self._warn_once("trouble", f"cache {self.path}: {problem}; continuing without the cache where it fails")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


class _Ledger:
    """The bytes of all entries, finished or not: never less than there are.

    Use it only while it is locked.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        text = os.pread(fd, LEDGER.size, 0)
        known = len(text) == LEDGER.size and text.startswith(LEDGER_FORMAT)
        _, self.boot, total = LEDGER.unpack(text) if known else (b"", b"", None)
        self.total: int | None = total  # None if unknown: entries must be counted

    def write(self, total: int, boot: bytes) -> None:
        os.pwrite(self._fd, LEDGER.pack(LEDGER_FORMAT, boot, total), 0)

    def forget(self) -> None:
        os.ftruncate(self._fd, 0)
        self.total = None


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=20).digest()


def _header(digest: bytes, data: bytes | memoryview) -> bytes:
    """The bytes before the data.

    They depend only on key and data, so a reader compares them as a whole.

    The checksum is SHA-1. It is against damage, not against forgery. With the processor's
    instructions for it, 512 KB take 0.27 ms (SHA-256 0.30, BLAKE2b 0.65, CRC-32 0.14, reading the
    file 0.05). CRC-32 would accept one in four billion damaged entries: too many for the torn files
    of a cluster that lost its power.
    """
    checksum = hashlib.sha1(data, usedforsecurity=False).digest()
    return HEADER.pack(FORMAT, len(data), digest, checksum)


@contextmanager
def _folder(path: str) -> Iterator[int]:
    """A folder of the cache, open. It is created, but not its parents: if the cache's folder is
    gone, its disk may be unmounted, and the entries must not go to the disk below the mount point.
    """
    if not os.path.isdir(path):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    with open_own_folder(path) as fd:
        yield fd


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _touch(fd: int) -> None:
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _boot() -> bytes:
    """An identifier that changes when the machine restarts."""
    with suppress(OSError, ValueError):
        return bytes.fromhex(boot_id().replace("-", ""))
    return bytes(16)
