"""A lease on a folder of checkpoints: which run saves there, so that no other overwrites it.

Rank 0 writes `in-use.json` after its first save: host, process, and a count that a thread raises
every 30 seconds. Before every save it reads the file. The lease of another run that is alive is an
error. A run that was killed leaves its file behind, which must not stop the next one:

- Same machine: the process is looked up, with the time of its start, because numbers are reused.
- Another machine: the run is alive if its count changes, and over if that does not happen for 90
  seconds. So clocks are not compared, unless they differ by more than ten minutes.

Looking at a folder neither needs nor takes a lease.
"""

import atexit
import logging
import secrets
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace

from fmsdata.core.fork_gate import ForkGate
from fmsdata.core.limits import start_thread
from fmsdata.errors import CheckpointError
from fmsdata.run.lease_holder import Holder, is_first_process, launch
from fmsdata.storage.location import Location

log = logging.getLogger("fmsdata")

NAME = "in-use.json"
BEAT_SECONDS = 30.0
SILENCE_SECONDS = 90.0  # a run on another machine whose count stays the same for so long is over
LONG_AGO_SECONDS = 600.0  # older by the clock: it is over, without watching it
POLL_SECONDS = 5.0
TRUSTED_SECONDS = 45.0  # after a beat, in which no other run can have taken the lease
CLOSING_SECONDS = 2.0


class _UnreadableError(CheckpointError):
    """The file of a lease that can't be read."""


class Lease:
    """The lease of one loader on a folder."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._file = folder / NAME
        self._token = secrets.token_hex(8)
        self._heart: _Heart | None = None
        self._watched: tuple[str, int, float] | None = None  # a holder, its count, and since when that is unchanged
        self._rank_checked = False

    def __reduce__(self) -> tuple[type["Lease"], tuple[Location]]:
        """A copy, or one that is sent to another process, is the lease of another loader."""
        return Lease, (self._folder,)

    def other_run(self) -> Holder | None:
        """The live run that holds the folder, if that is known for sure without waiting.

        Also begins to watch a run on another machine, for the first save.
        """
        found = _read(self._folder)
        if found is None or self._is_ours(found):
            return None
        if found.is_here():
            return found if found.is_alive() else None
        self._watch(found)
        return None

    def check(self, rank: int) -> bool:
        """Raise if another live run saves to the folder. Returns whether to hold the lease.

        Only rank 0 holds it, and of the processes that share its data the first one. The others
        have no way to tell that process from another run, unless both say to which process group
        they belong.
        """
        if rank != 0 or not is_first_process():
            self._check_beside_rank_0()
            return False
        heart = self._heart
        if heart is not None and _HOLDERS.get(self._file.url, self._token) != self._token:
            raise CheckpointError(
                f"{self._folder}: another loader of this process has saved there since this one did; "
                "give each loader a folder of its own, or close the one that is no longer used"
            )
        holding = heart is not None and heart.is_alive()
        if holding and heart is not None and time.monotonic() - heart.verified < TRUSTED_SECONDS:
            return True
        try:
            return self._is_free()
        except _UnreadableError:
            if holding:  # storage does not answer: the save itself will say so
                return True
            raise

    def _is_free(self) -> bool:
        """Raise if another live run holds the lease.

        Returns whether it can be taken, or is held already.
        """
        waiting = False
        while True:
            found = _read(self._folder)
            if found is None or found.token == self._token or found.is_this_process():
                return True
            if found.is_here():
                if found.is_alive() and not self._is_ours(found):
                    raise self._refusal(found)
                return not found.is_alive()  # if alive, it is a rank that shares the data of this one
            if self._is_ours(found) or time.time() - found.time > LONG_AGO_SECONDS:
                return True
            silent = self._watch(found)
            if silent is None:
                raise self._refusal(found)
            if silent >= SILENCE_SECONDS:
                return True
            if not waiting:
                waiting = True
                log.warning(
                    "%s was last in use by another run: %s; waiting up to %.0f s to see whether it is alive",
                    self._folder,
                    found,
                    SILENCE_SECONDS - silent,
                )
            time.sleep(max(0.01, min(POLL_SECONDS, SILENCE_SECONDS - silent)))

    def _check_beside_rank_0(self) -> None:
        if self._rank_checked or not launch():
            return
        found = _read(self._folder)
        if found and found.launch and not self._is_ours(found) and found.is_here() and found.is_alive():
            raise self._refusal(found)
        self._rank_checked = True

    def hold(self) -> None:
        """Write the lease, and renew it from a thread, until `release` or the end of the process.

        If it cannot be written now, the thread tries again.
        """
        if self._heart is None or not self._heart.is_alive():  # a forked process has no thread
            self._heart = _Heart(self._folder, self._token, weakref.ref(self))
            self._heart.beat()
            _HEARTS.add(self._heart)
            start_thread(self._heart)
        _HOLDERS[self._file.url] = self._token

    def release(self) -> None:
        """Remove the lease. Does not wait for storage that does not answer."""
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.end()
            if _HOLDERS.get(self._file.url) == self._token:
                del _HOLDERS[self._file.url]

    def _is_ours(self, found: Holder) -> bool:
        """Whether it belongs to this process, or to the process group of this run."""
        return (
            found.token == self._token or found.is_this_process() or (bool(found.launch) and found.launch == launch())
        )

    def _watch(self, found: Holder) -> float | None:
        """Seconds since the count last changed; None if it changed now: the run is alive."""
        now = time.monotonic()
        if self._watched is None or self._watched[0] != found.token:
            self._watched = found.token, found.beat, now
        return now - self._watched[2] if self._watched[1] == found.beat else None

    def _refusal(self, found: Holder) -> CheckpointError:
        return CheckpointError(
            f"{self._folder} is in use by another run: {found}; nothing was written. End that run, or give this one "
            "a folder of its own; to look at the folder, use read_only=True. "
            f"If that run has ended for sure, remove {self._file}"
        )


class _Heart(threading.Thread):
    """The thread that raises the count, and removes the lease at the end.

    A daemon: it keeps no process alive. It ends when its lease is gone, or taken over by another
    run, and does not exist in a forked process.
    """

    def __init__(self, folder: Location, token: str, lease: "weakref.ref[Lease]") -> None:
        super().__init__(name="fmsdata-lease", daemon=True)
        self._folder, self._file, self._lease = folder, folder / NAME, lease
        self._holder = Holder.here(token)
        self._ending = threading.Event()
        self._gate = ForkGate()
        self.verified = 0.0  # when the file was last seen to be this one's

    def beat(self) -> None:
        self._holder = replace(self._holder, beat=self._holder.beat + 1, time=time.time())
        with suppress(Exception):  # the next one may succeed
            self._file.write_bytes(self._holder.to_bytes())
            self.verified = time.monotonic()

    def run(self) -> None:
        while not self._ending.wait(BEAT_SECONDS) and self._lease() is not None:
            with self._gate:
                if not self._is_mine():
                    return
                self.beat()
        with self._gate:
            if self._is_mine():
                with suppress(Exception):
                    self._file.remove()

    def _is_mine(self) -> bool:
        """Whether the file is there, as this thread wrote it.

        A file that can't be read may still be its own.
        """
        try:
            found = _read(self._folder)
        except Exception:
            return not self._ending.is_set()
        return found is not None and found.token == self._holder.token and found.pid == self._holder.pid

    def end(self) -> None:
        if self.is_alive():  # not in a forked process
            self._ending.set()
            self.join(CLOSING_SECONDS)


def _read(folder: Location) -> Holder | None:
    """Who holds the lease.

    Lists the folder first: a request for a missing file counts as a failure.
    """
    try:
        if not _is_there(folder):
            return None
        try:
            return Holder.parse((folder / NAME).read_bytes())
        except CheckpointError:
            if _is_there(folder):
                raise
            return None  # it was removed since
    except CheckpointError as error:
        raise _UnreadableError(str(error)) from error.__cause__


def _is_there(folder: Location) -> bool:
    return any(entry.name == NAME for entry in folder.level().files)


_HEARTS: "weakref.WeakSet[_Heart]" = weakref.WeakSet()
_HOLDERS: dict[str, str] = {}  # the loader of this process that last took the lease of a folder


@atexit.register
def _end_all() -> None:
    for heart in list(_HEARTS):
        heart.end()
