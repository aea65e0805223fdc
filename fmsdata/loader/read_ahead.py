"""When batches are made: each on demand, or a few ahead of the trainer in a thread.

Both classes open a batch source, finish its batches and close it. `ReadAhead` does so in a thread
of its own. That thread may wait for storage, for a worker or for room; `stop` and `close` end it in
each of these cases.
"""

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from fmsdata.core.fork_gate import ForkGate
from fmsdata.core.limits import start_thread
from fmsdata.errors import FmsdataError
from fmsdata.loader.batches import BatchFinisher, BatchSource, FinishedBatch
from fmsdata.loader.patience import Patience, StallLimits, Watcher, stack_of
from fmsdata.storage.stats import StorageStats

PATIENCE_SECONDS = 2.0  # how long a thread may take to end by itself
TOGETHER_SECONDS = 0.0003  # how long a batch may wait for others that are handed over with it
CHECK_SECONDS = 0.5  # how often a trainer that waits for a batch checks whether one can still come


class OnDemand:
    """Makes each batch when the trainer asks for it."""

    def __init__(self, open_source: Callable[[], BatchSource], finish: BatchFinisher, limits: StallLimits) -> None:
        self._source, self._finish = open_source(), finish
        self._watcher = Watcher(limits, lambda: "\n".join(self._source.silent()), self._source.wake)

    def next(self) -> FinishedBatch:
        try:
            with self._watcher:
                return self._finish(self._source.next())
        except FmsdataError as error:
            if self._watcher.stalled is not None:
                raise self._watcher.stalled from error
            raise

    def stats(self) -> StorageStats:
        return self._source.stats()

    @property
    def pids(self) -> list[int]:
        return self._source.pids

    def stop(self) -> None:
        self._watcher.stop()
        self._source.close()

    def close(self) -> None:
        self.stop()


class ReadAhead:
    """Makes batches in a thread, up to `depth` ahead of the trainer."""

    def __init__(
        self, open_source: Callable[[], BatchSource], finish: BatchFinisher, depth: int, limits: StallLimits
    ) -> None:
        # Batches that were made together are handed over together, and room is given back for several
        # at once: to change between two threads takes about as long as to make a batch.
        self._ready: queue.SimpleQueue[list[FinishedBatch] | BaseException] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[int] = queue.SimpleQueue()  # how many batches to make
        self._room.put(depth)
        self._taken: deque[FinishedBatch] = deque()  # that the trainer has taken over, but not used yet
        self._used, self._at_once = 0, max(1, depth // 2)  # batches for which no room was given back yet
        self._limits = limits
        self._stop = threading.Event()
        self._gate = ForkGate()
        self._source: BatchSource | None = None
        self._broken = False
        # A daemon thread does not keep the interpreter from exiting; `_close_all` ends it in good
        # order before that.
        self._thread = threading.Thread(
            target=self._run, args=(open_source, finish), name="fmsdata-read-ahead", daemon=True
        )
        start_thread(self._thread)
        _RUNNING.add(self)
        _THREADS.add(self._thread)

    def _run(self, open_source: Callable[[], BatchSource], finish: BatchFinisher) -> None:
        try:
            self._source, room = open_source(), 0
            while not self._stop.is_set():
                room += 0 if room else self._room.get()
                with self._gate:
                    room -= self._make_some(self._source, finish, room)
        except BaseException as error:
            if not self._stop.is_set():  # else nothing reads it, and its traceback keeps memory alive
                self._ready.put(error)
        finally:
            if self._source is not None:
                self._source.close()

    def _make_some(self, source: BatchSource, finish: BatchFinisher, room: int) -> int:
        """Make a batch, and those that were read with it, as far as there is room and it takes no time.

        Returns how many.
        """
        made: list[FinishedBatch] = []
        if not room:  # it was woken to stop
            return 0
        try:
            lines = source.next()
            began = time.perf_counter()
            made.append(finish(lines))
            while source.buffered and len(made) < room and time.perf_counter() - began < TOGETHER_SECONDS:
                made.append(finish(source.next()))
        finally:
            if made:
                self._ready.put(made)
        return len(made)

    def next(self) -> FinishedBatch:
        if not self._taken:
            self._wait()
        batch = self._taken.popleft()
        self._used += 1
        if self._used >= self._at_once:
            self._room.put(self._used)
            self._used = 0
        return batch

    def _wait(self) -> None:
        patience: Patience | None = None
        while True:
            try:
                made = self._ready.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                self._check()
                patience = patience or Patience(self._limits, waited=CHECK_SECONDS)
                patience.check(self._report)
                continue
            if isinstance(made, BaseException):
                try:
                    raise made
                finally:
                    del made  # the traceback holds this frame: without a cycle, all is freed at once
            self._taken.extend(made)
            return

    def _check(self) -> None:
        try:
            if self._source is not None:
                self._source.check()
        except BaseException:
            self._broken = True
            raise

    def _report(self) -> str:
        """What keeps the next batch from coming."""
        silent = [] if self._source is None else self._source.silent()
        return (
            "\n".join(silent) or f"The Python stack of the thread that makes batches:\n{stack_of(self._thread.ident)}"
        )

    def stats(self) -> StorageStats:
        return StorageStats() if self._source is None else self._source.stats()

    @property
    def pids(self) -> list[int]:
        return [] if self._source is None else self._source.pids

    def stop(self) -> None:
        """Ask the thread and its source to end soon, without waiting for that."""
        self._stop.set()
        self._room.put(0)  # in case the thread waits for room
        if self._source is not None:
            self._source.wake()

    def close(self) -> None:
        """End the thread and its source.

        A thread that is inside a slow function of the user ends later by itself.
        """
        self.stop()
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.02)
            if self._source is not None and (self._broken or time.monotonic() > began + PATIENCE_SECONDS):
                self._source.abort()
            if time.monotonic() > began + 2 * PATIENCE_SECONDS:
                return


# A running thread keeps its object alive, up to the moment when it frees what was read ahead.
_RUNNING: "weakref.WeakSet[ReadAhead]" = weakref.WeakSet()
_THREADS: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for read_ahead in list(_RUNNING):
        read_ahead.close()
    for thread in list(_THREADS):  # tensors must not be freed while the interpreter shuts down
        thread.join(PATIENCE_SECONDS)
