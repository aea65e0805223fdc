"""One run at a time for each output folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fmsdata.corpus.prepare.work_folder import FOLDER
from fmsdata.errors import ConfigError, DataError
from fmsdata.storage.location import Location

LOCK = "lock"


@contextmanager
def only_run(output: Location) -> Iterator[None]:
    """Raise if another run writes to the folder. The lock of a local folder ends with its process."""
    if output.local is None:
        yield
        return
    folder = output.local / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError(f"{output} can't be written to: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{output}: another run of `fmsdata prepare` writes there; wait for its end, or use another folder"
            ) from None
        yield
    finally:
        os.close(lock)
