"""One run at a time for each output folder.

A local folder is locked by the system, which ends the lock with its process. On other storage, a run
writes a small file with a count that a thread raises. A file whose count stays the same belongs to a
run that was killed.
"""

import fcntl
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fmsdata.core.fork_gate import ForkGate
from fmsdata.core.limits import start_thread
from fmsdata.corpus.listing import UNFINISHED
from fmsdata.corpus.prepare.work_folder import read_if_there
from fmsdata.errors import ConfigError, DataError
from fmsdata.storage.location import Location

LOCK, IN_USE = "lock", "in-use.json"
BEAT_SECONDS = 10.0
SILENCE_SECONDS = 30.0  # a run whose count stays the same for so long is over
SETTLING_SECONDS = 1.0  # in which a run that started at the same moment has written its file
log = logging.getLogger("fmsdata")


@contextmanager
def only_run(output: Location) -> Iterator[None]:
    """Raise if another run writes to the folder."""
    if output.local is None:
        with _Heart(output / UNFINISHED, output):
            yield
        return
    folder = output.local / UNFINISHED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError(f"{output} can't be written to: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(output) from None
        yield
    finally:
        os.close(lock)


def _refusal(output: Location) -> ConfigError:
    return ConfigError(
        f"{output}: another run of `fmsdata prepare` writes there; wait for its end, or use another folder"
    )


class _Heart:
    """The file of this run, and the thread that shows that the run is alive."""

    def __init__(self, folder: Location, output: Location) -> None:
        self._folder, self._file, self._output = folder, folder / IN_USE, output
        self._token = secrets.token_hex(8)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fmsdata-prepare-lock", daemon=True)
        self._gate = ForkGate()
        self._beat = 0

    def __enter__(self) -> None:
        self._require_silence()
        self._write()
        time.sleep(SETTLING_SECONDS)
        found = self._read()
        if found is None or found[0] != self._token:
            raise _refusal(self._output)
        start_thread(self._thread)

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        with suppress(DataError):
            found = self._read()
            if found is not None and found[0] == self._token:
                self._file.remove()

    def _require_silence(self) -> None:
        first = self._read()
        if first is None:
            return
        log.warning("%s: waiting %.0f s to see whether another run is alive", self._output, SILENCE_SECONDS)
        began = time.monotonic()
        while time.monotonic() - began < SILENCE_SECONDS:
            time.sleep(min(BEAT_SECONDS, SILENCE_SECONDS) / 4)
            now = self._read()
            if now is None:
                return
            if now != first:
                raise _refusal(self._output)

    def _run(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            with self._gate, suppress(DataError):  # the next one may succeed
                self._write()

    def _write(self) -> None:
        self._beat += 1
        self._file.write_bytes(json.dumps([self._token, self._beat]).encode())

    def _read(self) -> tuple[str, int] | None:
        data = read_if_there(self._folder, IN_USE)
        try:
            token, beat = json.loads(data or b"null") or ("", 0)
        except (ValueError, TypeError):
            token, beat = "", 0
        return (str(token), int(beat)) if data is not None else None
