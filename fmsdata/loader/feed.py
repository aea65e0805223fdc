"""Feeds: where a loader's batches come from, and the thread that makes them ahead of time.

A feed gives batch after batch, together with the samples that are in it and the anchors and tallies that were passed on
the way. The loader keeps account of those when it hands a batch out, so whatever was read ahead does not count.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fmsdata.planning.schedule import Turns
from fmsdata.run.lanes import Lanes, Passed
from fmsdata.storage.stats import StorageStats
from fmsdata.tasks.batch import Batch, collect
from fmsdata.tasks.collate import Collate

PATIENCE_SECONDS = 2.0  # for a thread to end by itself
CHECK_SECONDS = 0.5  # how often who waits for a batch looks whether one can still come


class Taken(NamedTuple):
    """Lines for a batch: which samples they are, and what their lanes passed."""

    batch: Batch
    samples: list[int]
    passed: list[Passed]


class Made(NamedTuple):
    """A batch as the trainer gets it."""

    fields: dict[str, Any]
    samples: list[int]
    passed: list[Passed]


class Feed(Protocol):
    """Gives the lines of one batch after the other."""

    def next(self) -> Taken: ...

    def check(self) -> None:
        """Raise if nothing more can come."""

    def wake(self) -> None:
        """Nobody wants what comes next: whoever waits for storage need not, called from another thread."""

    def traffic(self) -> StorageStats:
        """What was fetched of remote shards so far."""

    def close(self) -> None:
        """End all that works for this feed."""

    def abort(self) -> None:
        """The same at once, called from another thread, perhaps while `next` waits for something."""


class LocalFeed:
    """Lines that this process reads itself."""

    def __init__(self, lanes: Lanes, turns: Turns, batch_size: int, extra_tokens: int) -> None:
        self._lanes, self._turns = lanes, turns
        self._batch_size, self._extra_tokens = batch_size, extra_tokens

    def next(self) -> Taken:
        samples = self._turns.take(self._batch_size)
        rows, passed = self._lanes.take(samples)
        return Taken(collect(rows, self._extra_tokens), samples, passed)

    def check(self) -> None:
        pass

    def wake(self) -> None:
        self.close()

    def traffic(self) -> StorageStats:
        return self._lanes.files.stats()

    def close(self) -> None:
        self._lanes.files.close()

    def abort(self) -> None:
        self.close()


@dataclass(frozen=True)
class Make:
    """Turns lines into what the trainer gets."""

    collate: Collate
    pin_memory: bool

    def __call__(self, taken: Taken) -> Made:
        fields = self.collate.fields(taken.batch)
        if self.pin_memory:
            fields = {name: one.pin_memory() if isinstance(one, torch.Tensor) else one for name, one in fields.items()}
        return Made(fields, taken.samples, taken.passed)


class Direct:
    """Makes each batch when it is asked for."""

    def __init__(self, open_feed: Callable[[], Feed], make: Make) -> None:
        self._feed, self._make = open_feed(), make

    def next(self) -> Made:
        return self._make(self._feed.next())

    def traffic(self) -> StorageStats:
        return self._feed.traffic()

    def stop(self) -> None:
        self._feed.close()

    def close(self) -> None:
        self._feed.close()


class ReadAhead:
    """Makes batches in a thread, up to `depth` ahead of who takes them."""

    def __init__(self, open_feed: Callable[[], Feed], make: Make, depth: int) -> None:
        self._ready: queue.SimpleQueue[Made | BaseException] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each batch that may be made
        for _ in range(depth):
            self._room.put(None)
        self._stop = threading.Event()
        self._feed: Feed | None = None
        self._broken = False
        # A thread must not keep the interpreter from ending; it is closed before that, in good order.
        self._thread = threading.Thread(
            target=self._run, args=(open_feed, make), name="fmsdata-read-ahead", daemon=True
        )
        self._thread.start()
        _RUNNING.add(self)

    def _run(self, open_feed: Callable[[], Feed], make: Make) -> None:
        try:
            self._feed = open_feed()
            while not self._stop.is_set():
                self._room.get()
                self._ready.put(make(self._feed.next()))
        except BaseException as error:
            self._ready.put(error)
        finally:
            if self._feed is not None:
                self._feed.close()

    def next(self) -> Made:
        while True:
            try:
                made = self._ready.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                self._check()
                continue
            if isinstance(made, BaseException):
                raise made
            self._room.put(None)
            return made

    def _check(self) -> None:
        try:
            if self._feed is not None:
                self._feed.check()
        except BaseException:
            self._broken = True
            raise

    def traffic(self) -> StorageStats:
        return StorageStats() if self._feed is None else self._feed.traffic()

    def stop(self) -> None:
        """Have the thread and its feed end soon, without waiting for that."""
        self._stop.set()
        self._room.put(None)  # the thread may wait for it
        if self._feed is not None:
            self._feed.wake()

    def close(self) -> None:
        """End the thread and its feed. One that takes long, because somebody's function does, ends later by itself."""
        self.stop()
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.02)
            if self._feed is not None and (self._broken or time.monotonic() > began + PATIENCE_SECONDS):
                self._feed.abort()
            if time.monotonic() > began + 2 * PATIENCE_SECONDS:
                return


_RUNNING: "weakref.WeakSet[ReadAhead]" = weakref.WeakSet()  # a thread at work keeps its object alive


@atexit.register
def _close_all() -> None:
    for one in list(_RUNNING):
        one.close()
