"""What was fetched, kept on the node's own disk for all processes of the node.

An entry is a file that tells its key and the checksum of its data, so that nothing in the folder has to be
trusted: not a file that a power failure has torn (hence no fsync), not one that a disk has damaged, not one that
was renamed. What is not as it was written is removed, and fetched again.

Readers take no lock. Writers reserve the bytes of an entry in a ledger before they write it, so the ledger never
tells less than what there is, whoever is killed at whatever moment, and nobody has to count. Only when the ledger
says that the cache is full are the entries counted, and the least recently used ones removed: by one process, while
others go on reading. All locks are the kernel's (flock): they end with the process that holds them.
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

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.errors import ConfigError

HEADER = struct.Struct("<8sQ20s20s")  # the format and its version, length of the data, digest of the key, checksum
FORMAT = b"fmscach1"
ENTRY = re.compile(r"([0-9a-f]{38})\.range")  # in a folder named by the first two digits
UNFINISHED = re.compile(r"[0-9a-f]{16}")
LEDGER = struct.Struct("<8s16sQ")  # the format and its version, the boot in which entries were counted, bytes
LEDGER_FORMAT = b"fmsledg1"
FREE = 10  # a tenth of the cache is made free at a time: counting costs 4 us an entry, so 40 us for each that is stored
TOUCH_AFTER = 60.0  # seconds in which a second use of an entry is not noted
LONGEST = 1.0  # seconds for removing more than is needed at once: disks may be busy, and the caller waits
BATCH = 64  # entries that are removed before it is told that there is room
ABANDONED_AFTER = 10.0  # seconds without a lock: a file gets its lock a moment after it was made
PATIENCE = 0.5  # seconds to wait for the ledger, which is held for some 10 us, and for room. Then data is not stored
REST = 10.0  # seconds without storing after that failed
log = logging.getLogger("fmsdata")


class DiskCache:
    """Ranges of remote files in a folder, at most `limit` bytes, headers and unfinished files included.

    The least recently used ones make room for others; a use within a minute of the last counts as the same. Any
    number of processes and threads may use the folder at the same time. Processes with the same limit never exceed
    it, not even for a moment and not by a byte; with different ones, the greatest is kept at all times, and the
    smaller after each `put` of a process that has it. (What the filesystem adds, up to 4 KiB a file, is not
    counted. Files that somebody puts there by hand are, from the next time that the cache is full.)

    `get` never waits for other processes. `put` does for a moment, and takes a second or two when it is the one that
    has to make room among 100,000 entries. It may leave data out rather than wait: a cache may forget.

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
        self._unfinished = f"{self.path}/.fmsdata-unfinished"
        self._boot = _boot()
        self._told: set[str] = set()
        self._rest_until = 0.0
        try:
            os.makedirs(self.path, exist_ok=True)
            self._unfinished_bytes()
            with self._ledger(patience=5.0) as ledger:
                if ledger.boot != self._boot:  # what a power failure leaves may be an old one
                    ledger.forget()
                crowded = ledger.total is None or ledger.total > self.limit
            if crowded:
                self._make_room(0)
        except TimeoutError as error:
            self._trouble(str(error))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: can't be used as a cache: {getattr(error, 'strerror', None) or error}; "
                "give a folder on a disk of the node that can be written to, or none to do without a cache"
            ) from None

    def get(self, key: str, size: int) -> bytes | None:
        """The data that was put under the key. None if it is not there, or not as it was: it has to be fetched."""
        digest = _digest(key)
        path = self._file(digest)
        try:
            with open(path, "rb") as file:
                info = os.fstat(file.fileno())
                if info.st_size == HEADER.size + size:
                    header, data = file.read(HEADER.size), file.read(size)
                    if header == _header(digest, data):
                        if not 0 <= time.time() - info.st_mtime < TOUCH_AFTER:
                            _touch(file.fileno())
                        return data
            problem = "it is not as it was written"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # not the file's fault
                self._trouble(problem)
                return None
        self._tell("damage", f"{path} is fetched again: {problem}; more of such files are not told of")
        self._remove(path)
        return None

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Keep the data. Whatever speaks against it, a full disk for example, is told once, and it is not kept."""
        data = memoryview(data).cast("B")
        size = HEADER.size + len(data)
        if size > self.limit or time.monotonic() < self._rest_until:
            return
        try:
            with self._unfinished_file() as (fd, unfinished):
                if self._reserve(size, fd):
                    self._store(_digest(key), data, fd, unfinished)
        except OSError as error:
            self._rest_until = time.monotonic() + REST
            self._trouble(error.strerror or str(error))

    @contextmanager
    def _unfinished_file(self) -> Iterator[tuple[int, str]]:
        """A new file, open, and its path. It is locked as long as somebody writes to it."""
        path = f"{self._unfinished}/{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            _make_folder(self._unfinished)
            fd = os.open(path, flags, 0o666)
        _held.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, path
        finally:
            with suppress(FileNotFoundError):  # it has got its place
                os.unlink(path)
            _held.discard(fd)
            os.close(fd)

    def _reserve(self, size: int, fd: int) -> bool:
        """Note in the ledger that so many bytes will be there, if they fit. They stay noted if storing them fails.

        The file gets its size at the same time, so that whoever counts knows what is reserved for it.
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

    def _store(self, digest: bytes, data: memoryview, fd: int, unfinished: str) -> None:
        path = self._file(digest)
        _write(fd, memoryview(_header(digest, data)))
        _write(fd, data)
        _touch(fd)  # the kernel's own times of files written within some milliseconds are the same
        try:
            os.rename(unfinished, path)
        except FileNotFoundError:
            _make_folder(os.path.dirname(path))
            os.rename(unfinished, path)

    def _make_room(self, size: int) -> bool:
        """Count the entries, and remove the least recently used ones. False if another process is at it.

        Others store and read meanwhile. What they reserved before the ledger was read is an unfinished file that is
        listed then, or an entry that is found later (or both: that is too much, but never too little). What they
        reserve after it is added whenever the ledger is written.
        """
        with _locked(f"{self.path}/.fmsdata-room", patience=0) as alone:
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
                        return True  # somebody wants it to be counted anew
                    total = max(0, total + (now or 0) - (known or 0))
                    ledger.write(total, self._boot)
                known = total
                some = list(islice(oldest, BATCH))
                late = time.monotonic() > end and total + size <= self.limit
                if total <= goal or late or not some:
                    return True
                for entry in some:
                    if total > goal and self._remove(self._file(digests[20 * entry : 20 * entry + 20])):
                        total -= sizes[entry]

    def _entries(self) -> tuple["array[int]", "array[int]", bytearray]:
        """Time of last use, size and digest of each. Files of others are left alone: names tell."""
        times, sizes, digests = array("q"), array("q"), bytearray()
        for number in range(256):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{self.path}/{number:02x}") as files:
                for file in files:
                    if match := ENTRY.fullmatch(file.name):
                        with suppress(FileNotFoundError):
                            info = file.stat(follow_symlinks=False)
                            times.append(info.st_mtime_ns)
                            sizes.append(info.st_size)
                            digests += bytes.fromhex(f"{number:02x}{match[1]}")
        return times, sizes, digests

    def _unfinished_bytes(self) -> int:
        """The bytes that are reserved for unfinished files. Those that processes which are gone left are removed."""
        _make_folder(self._unfinished)
        reserved = 0
        for name in os.listdir(self._unfinished):
            if UNFINISHED.fullmatch(name):
                path = f"{self._unfinished}/{name}"
                with suppress(FileNotFoundError):
                    info = os.stat(path)
                    if time.time() - info.st_ctime > ABANDONED_AFTER and _is_free(path):
                        os.unlink(path)
                    else:
                        reserved += info.st_size
        return reserved

    def _remove(self, path: str) -> bool:
        """Remove an entry. Whoever has it open reads on."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            self._trouble(f"{path} can't be removed: {error.strerror}")
            return False
        return True

    def _file(self, digest: bytes | bytearray) -> str:
        name = digest.hex()
        return f"{self.path}/{name[:2]}/{name[2:]}.range"

    @contextmanager
    def _ledger(self, patience: float | None = None) -> Iterator["_Ledger"]:
        with _locked(f"{self.path}/.fmsdata-ledger", PATIENCE if patience is None else patience) as fd:
            if fd is None:
                raise TimeoutError("another process holds the ledger, and does not go on")
            yield _Ledger(fd)

    def _trouble(self, problem: str) -> None:
        self._tell("trouble", f"cache {self.path}: {problem}; going on without what can't be kept or read there")

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("%s", text)


class _Ledger:
    """The bytes of all entries, finished or not, or more than that. Only to be used while it is locked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        text = os.pread(fd, LEDGER.size, 0)
        known = len(text) == LEDGER.size and text.startswith(LEDGER_FORMAT)
        _, self.boot, total = LEDGER.unpack(text) if known else (b"", b"", None)
        self.total: int | None = total  # None if nobody knows: entries must be counted

    def write(self, total: int, boot: bytes) -> None:
        os.pwrite(self._fd, LEDGER.pack(LEDGER_FORMAT, boot, total), 0)

    def forget(self) -> None:
        os.ftruncate(self._fd, 0)
        self.total = None


_held: set[int] = set()  # files with locks. A forked child must not keep them locked when its parent is killed


def _close_held() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


@contextmanager
def _locked(path: str, patience: float, create: bool = True) -> Iterator[int | None]:
    """The file, open and locked, or None if others did not let go of it.

    There is no waiting without end: the process that holds it may have been stopped.
    """
    fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    _held.add(fd)
    try:
        yield fd if _lock(fd, patience) else None
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if another thread forks just now
        _held.discard(fd)
        os.close(fd)


def _lock(fd: int, patience: float) -> bool:
    end, pause = time.monotonic() + patience, 0.0001
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        time.sleep(pause)
        pause = min(2 * pause, 0.002)


def _is_free(path: str) -> bool:
    with _locked(path, patience=0, create=False) as fd:
        return fd is not None


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=20).digest()


def _header(digest: bytes, data: bytes | memoryview) -> bytes:
    """What stands before the data, all of it a function of key and data: a reader compares it as a whole.

    SHA-1, against damage and not against forgers, for which it is too weak: with the instructions that processors
    have for it 512 KB take 0.27 ms (SHA-256 0.30, BLAKE2b 0.65, CRC-32 0.14, reading the file 0.05). CRC-32 would pass
    one in four billion damaged entries: too many for the torn files of a cluster that lost its power.
    """
    checksum = hashlib.sha1(data, usedforsecurity=False).digest()
    return HEADER.pack(FORMAT, len(data), digest, checksum)


def _make_folder(path: str) -> None:
    """Not those above it: if the cache's own is gone, a disk may have been taken away, and this one is not for it."""
    with suppress(FileExistsError):
        os.mkdir(path)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _touch(fd: int) -> None:
    now = time.time_ns()
    with suppress(PermissionError):  # another user's
        os.utime(fd, ns=(now, now))


def _boot() -> bytes:
    """Changes when the machine is started."""
    with suppress(OSError, ValueError):
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return bytes(16)
