"""Local files that are written completely or not at all.

The data goes to a hidden temporary file beside the target. When all of it is on the disk, the file
gets its real name. A reader sees the old file or the new one, also after a crash or a power
failure. The disk cache writes in its own way: it checks every entry that it reads, so it needs no
fsync.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It replaces `path` at the end, or is removed after a failure.

    The temporary name is random, so several processes can write the same file. The folder is
    created if necessary.

    >>> with replacing(Path("corpus/part-0.arrow")) as unfinished:     # doctest: +SKIP
    ...     unfinished.write_bytes(b"...")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield unfinished
        _sync(unfinished)
        unfinished.replace(path)
        _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, completely or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
