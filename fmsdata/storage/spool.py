"""The spool: tokens that are in use and do not fit into memory, in a file on the node's disk.

The file has no name, so nothing is left of it when its process ends, however that happens. It is
mapped into memory. What was stored is read through the mapping, and the kernel decides which of its
pages stay in memory. Each part is written once, and its place is used again when nobody needs it.

A spool belongs to one process. In a forked child, everything in it counts as lost.
"""

import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from pathlib import Path

import numpy as np

from fmsdata.core.limits import describe_os_error
from fmsdata.core.memory import MappedTokens
from fmsdata.core.tokens import Tokens
from fmsdata.errors import ConfigError
from fmsdata.storage.extents import Extents
from fmsdata.storage.own_folder import user_cache
from fmsdata.storage.settings import SpoolSettings

ALIGNED = 64  # bytes: where parts of the file start
STEP = 64 << 20  # bytes by which the file grows between two looks at the disk
KEPT_FREE = 1 / 20  # of a disk, for others
IN_MEMORY = {"tmpfs", "ramfs"}  # kinds of filesystems


class SpoolLost(OSError):
    """What was stored can't be read. It has to be fetched again."""


class SpooledTokens(MappedTokens):
    """Tokens in a spool. Their place is free when nobody uses them."""

    __slots__ = ("_place", "_spool")

    def __init__(self, array: Tokens, spool: "Spool", place: tuple[int, int]) -> None:
        self._spool, self._place = spool, place
        super().__init__(array, spool)

    def __del__(self) -> None:
        self._spool.unused.append(self._place)  # any thread may come here: settled later


class Spool:
    """Tokens of this process, in a file of at most `limit` bytes that has no name.

    `problem` says why something could not be stored, from then on until there is room again.

    >>> import numpy as np
    >>> spool = Spool(SpoolSettings(limit=1 << 20))
    >>> tokens = spool.store(np.arange(1000))
    >>> tokens[10:13], spool.bytes
    (array([10, 11, 12]), 8000)
    """

    def __init__(self, settings: SpoolSettings) -> None:
        self.problem = ""
        self.unused: deque[tuple[int, int]] = deque()
        self._settings = settings
        self._extents = Extents(settings.limit)
        self._most = 0  # bytes that the disk had room for, when that was looked at
        self._file: int | None = None
        self._memory: Tokens | None = None
        self._lost = False
        if settings.path is not None:
            try:
                os.makedirs(settings.path, exist_ok=True)
                self._open(settings.path)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"storage.spool.path {settings.path!r} can't be used: {_reason(error)}; "
                    "give a writable folder on a disk of the node, or `storage.spool: null` to run without a spool"
                ) from None
        _spools.add(self)

    @property
    def bytes(self) -> int:
        """That are in use."""
        self._settle()
        return self._extents.used

    def store(self, tokens: Tokens) -> SpooledTokens | None:
        """The tokens as they were stored; None if that was not possible, see `problem`."""
        if self._lost:
            return None
        try:
            if self._file is None:
                self._open(default_folder())
            stored = self._store(np.ascontiguousarray(tokens))
        except (OSError, ValueError) as error:
            self.problem = _reason(error)
            return None
        self.problem = ""
        return stored

    def check(self) -> None:
        """Raise if this is not the process that stored it."""
        if self._lost:
            raise SpoolLost(errno.ESTALE, "the spool belongs to a parent process")

    def unreadable(self) -> SpoolLost:
        """The error for tokens that can't be read."""
        return SpoolLost(errno.EIO, "the disk of the spool reports an error")

    def _store(self, tokens: Tokens) -> SpooledTokens:
        self._settle()
        size = max(ALIGNED, tokens.nbytes + -tokens.nbytes % ALIGNED)
        place = self._extents.take(size, self._most)
        if place is None:
            self._grow(size)
            place = self._extents.take(size, self._most)
        if place is None:
            raise OSError(errno.ENOSPC, f"storage.spool.limit ({self._settings.limit:,} bytes) is reached")
        try:
            self._write(tokens.reshape(-1).view(np.uint8).data, place)
        except OSError:
            self._extents.free(place, size)
            raise
        array = np.frombuffer(self._memory, tokens.dtype, len(tokens), offset=place)  # type: ignore[arg-type]
        return SpooledTokens(array, self, (place, size))

    def _write(self, data: memoryview, place: int) -> None:
        while data:
            written = os.pwrite(self._file or 0, data, place)
            data, place = data[written:], place + written

    def _grow(self, size: int) -> None:
        """Let the file become longer, if the disk has room for that and for others."""
        disk = os.fstatvfs(self._file or 0)
        if disk.f_bavail < disk.f_blocks * KEPT_FREE:
            raise OSError(errno.ENOSPC, f"less than {KEPT_FREE:.0%} of the disk are free")
        self._most = self._extents.end + max(size, STEP)

    def _open(self, folder: str) -> None:
        with tempfile.TemporaryFile(prefix="fmsdata-spool-", dir=folder, buffering=0) as file:
            os.ftruncate(file.fileno(), self._settings.limit)  # of this, the disk holds what is written
            memory = mmap.mmap(file.fileno(), self._settings.limit, mmap.MAP_SHARED, mmap.PROT_READ)
            self._memory = np.frombuffer(memory, np.uint8)
            self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file).atexit = False

    def _settle(self) -> None:
        while self.unused:
            self._extents.free(*self.unused.popleft())

    def forget(self) -> None:
        """In a forked child."""
        self._lost = True


def default_folder() -> str:
    """The first folder for a spool that is on a disk."""
    folders = [tempfile.gettempdir(), "/var/tmp", user_cache()]
    for folder in folders:
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK) and not is_in_memory(folder):
            return folder
    raise OSError(
        errno.ENOENT,
        f"none of {', '.join(folders)} is a writable folder on a disk (not tmpfs); set TMPDIR or storage.spool.path",
    )


def shortage(settings: SpoolSettings, size: int) -> str:
    """Why a spool can't take this many bytes on this machine; empty if it can."""
    try:
        folder = os.path.abspath(settings.path or default_folder())
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        disk, in_memory = os.statvfs(folder), is_in_memory(folder)
    except OSError as error:
        return describe_os_error(error)
    if in_memory:
        return f"{folder} is in memory (tmpfs)"
    room = max(0, disk.f_bavail - int(disk.f_blocks * KEPT_FREE)) * disk.f_frsize
    return f"{folder} has room for {room / 1e6:,.0f}MB" if room < size else ""


def is_in_memory(folder: str) -> bool:
    """Whether the files of a folder are in memory. False if the system does not say."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = {mount.partition(" - ")[2].split(" ")[0] for mount in mounts if mount.split(" ", 3)[2] == number}
    return bool(kinds & IN_MEMORY)


def _reason(error: OSError | ValueError) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else str(error)


_spools: "weakref.WeakSet[Spool]" = weakref.WeakSet()


def _forked() -> None:
    for spool in _spools:
        spool.forget()


os.register_at_fork(after_in_child=_forked)
