"""Locks on files of this user, which end with the process that holds them (flock).

A forked child must not keep a lock when its parent is killed. So descriptors of locked files are
closed in the child.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fmsdata.storage.own_folder import open_own_file, open_own_folder

_open: set[int] = set()  # descriptors of files that may be locked


def _close_in_child() -> None:
    for fd in _open:
        with suppress(OSError):
            os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def closed_in_forks(fd: int) -> Iterator[None]:
    """A descriptor that a child which is forked meanwhile does not keep.

    It is closed at the end.
    """
    _open.add(fd)
    try:
        yield
    finally:
        _open.discard(fd)
        os.close(fd)


@contextmanager
def locked(path: str, patience: float, create: bool = True) -> Iterator[int | None]:
    """The file, open and locked, or None if another process holds the lock.

    The wait is limited: the process that holds the lock may be stopped.
    """
    with open_own_folder(os.path.dirname(path)) as folder:
        fd = open_own_file(os.path.basename(path), os.O_RDWR | (os.O_CREAT if create else 0), folder)
    with closed_in_forks(fd):
        try:
            yield fd if _lock(fd, patience) else None
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if another thread forks at this moment


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


def is_free(path: str) -> bool:
    """Whether no process holds the lock of a file."""
    try:
        with locked(path, patience=0, create=False) as fd:
            return fd is not None
    except OSError as error:  # a link, or no file of ours
        if not isinstance(error, PermissionError) and error.errno != errno.ELOOP:
            raise
        return True
