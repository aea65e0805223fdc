"""Folders and files that belong to the user of this process: nobody else can have written them.

What is read from such a folder becomes training data, and what is written there must not end up
elsewhere. So a folder is refused if another user owns it or can write to it, no link is followed,
and everything is checked again after it was opened. That holds also if somebody
who can write to a parent exchanges the folder for another.
"""

import errno
import logging
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fmsdata.errors import ConfigError

NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
log = logging.getLogger("fmsdata")


def user_cache() -> str:
    """The folder of this package in the user's cache folder. It need not exist yet."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fmsdata")


def make_own_folder(path: str) -> None:
    """Create a folder that only its user can enter, with its parents, or check an existing one.

    A folder of this user that others may read but not write, as earlier versions made it, is closed
    to them. Raises `ConfigError` if others could have put something into it.
    """
    _make_parents(os.path.dirname(path))
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise _refused(path, link, f"is a link that {_name(link.st_uid)} made")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = os.stat(fd)
        if info.st_uid != os.geteuid():
            raise _refused(path, info, f"belongs to {_name(info.st_uid)}")
        if info.st_mode & OTHERS_WRITE:
            raise _refused(path, info, "can be written by others")
        if info.st_mode & 0o077:
            log.warning(
                "cache %s: others could read it (mode %s); it is closed to them now (mode 700)", path, _mode(info)
            )
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def _make_parents(path: str) -> None:
    if not os.path.isdir(path):
        _make_parents(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, 0o755)


def _refused(path: str, info: os.stat_result, problem: str) -> ConfigError:
    me = _name(os.geteuid())
    own = "" if info.st_uid != os.geteuid() else f"if nobody else has put files there, `chmod 700 {path}`, or "
    return ConfigError(
        f"{path}: can't be used as a cache: it {problem} (owner {_name(info.st_uid)}, mode {_mode(info)}, and this "
        f"process runs as {me}), so others could make it hold forged training data; {own}"
        f"give each user a folder of their own, such as {path}/{me}"
    )


def _mode(info: os.stat_result) -> str:
    return f"{stat.S_IMODE(info.st_mode):o}"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # as in a container
        return f"user {user}"


@contextmanager
def open_own_folder(path: str) -> Iterator[int]:
    """A descriptor of a folder below one that `make_own_folder` made, to open files in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
    try:
        info = os.stat(fd)
        _require_own(info)
        if info.st_mode & OTHERS_WRITE:  # made by an earlier version; its files are checked on their own
            os.fchmod(fd, 0o700)
        yield fd
    finally:
        os.close(fd)


def open_own_file(name: str, flags: int, folder: int) -> int:
    """Open a file in a folder. It must be a plain file of this user, under no second name.

    A file that others can write to is good enough for a lock, but not to be read: see `is_private`.
    """
    fd = os.open(name, flags | NO_LINK | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        info = os.stat(fd)
        _require_own(info)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise PermissionError(errno.EPERM, "it is not a plain file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_private(info: os.stat_result) -> bool:
    """Whether only its owner can write to a file."""
    return not info.st_mode & OTHERS_WRITE


def _require_own(info: os.stat_result) -> None:
    if info.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to {_name(info.st_uid)}")
