"""Patience: how long a trainer waits for a batch before it hears why, and before it gives up.

Only the time in which the trainer waits counts, so a slow trainer never causes an alarm. A process
that was stopped and continued (a laptop that slept, a debugger) does not cause one either: the clock
is advanced by short waits, each of which counts for a second at most.
"""

import logging
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fmsdata.core.checks import seconds
from fmsdata.core.limits import start_thread
from fmsdata.errors import FmsdataWarning, StallError

log = logging.getLogger("fmsdata")
MOST_PER_WAIT = 1.0  # seconds that one wait counts for at most
GROWTH = 2  # each pause between two warnings is this many times the one before


@dataclass(frozen=True, kw_only=True)
class StallLimits:
    """After how many seconds without a batch the loader warns, and after how many it raises (None: never)."""

    warning: float = 30.0
    timeout: float | None = None

    @classmethod
    def checked(cls, warning: Any, timeout: Any) -> "StallLimits":
        return cls(
            warning=seconds("stall_warning", warning),
            timeout=None if timeout is None else seconds("stall_timeout", timeout),
        )


class Patience:
    """The wait for one batch."""

    def __init__(self, limits: StallLimits, waited: float = 0.0, began: float | None = None) -> None:
        self._limits, self._waited, self._next = limits, waited, limits.warning
        self._last = time.monotonic() if began is None else began

    def check(self, report: Callable[[], str]) -> None:
        """Called now and then while the trainer waits. `report` says what the loader is doing."""
        now = time.monotonic()
        self._waited += min(now - self._last, MOST_PER_WAIT)
        self._last = now
        timeout = self._limits.timeout
        if timeout is not None and self._waited >= timeout:
            raise StallError(
                f"no batch came for {self._waited:.0f} s, and stall_timeout is {timeout:g}. {report()}\n"
                "The loader's position has not changed: iterate again to retry, or resume from its state"
            )
        if self._waited >= self._next:
            self._next *= GROWTH
            after = f"The next warning comes after {self._next:g} s. To get an error instead, set stall_timeout"
            if timeout is not None:
                after = f"After {timeout:g} s it becomes an error (stall_timeout)"
            warnings.warn(
                f"no batch came for {self._waited:.0f} s. {report()}\n{after}",
                FmsdataWarning,
                stacklevel=2,
            )


class Watcher:
    """Watches calls that the trainer's own thread makes, from a thread that it starts.

    >>> watcher = Watcher(StallLimits(), lambda: "It reads web/part-0.arrow", give_up=lambda: None)
    >>> with watcher:
    ...     pass  # a warning comes if this takes too long
    >>> watcher.stop()
    """

    def __init__(self, limits: StallLimits, report: Callable[[], str], give_up: Callable[[], None]) -> None:
        self.stalled: StallError | None = None
        self._limits, self._report, self._give_up = limits, report, give_up
        self._began: float | None = None  # when the call in progress began
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="fmsdata-watcher", daemon=True)
            start_thread(thread)
            self._thread = thread
        self._began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._began = None

    def stop(self) -> None:
        """End the thread soon."""
        self._stop.set()

    def _run(self) -> None:
        watched, patience = 0.0, Patience(self._limits)
        while not self._stop.wait(min(MOST_PER_WAIT, self._limits.warning) / 2):
            began = self._began
            if began is None:
                continue
            if began != watched:  # another call
                watched, patience = began, Patience(self._limits, began=began)
            try:
                patience.check(self._report)
            except StallError as error:
                if self._began == began:
                    self.stalled = error
                    self._give_up()
                return
            except FmsdataWarning as warning:  # warnings are errors, and nothing catches them in this thread
                log.warning("%s", warning)


def stack_of(thread: int | None) -> str:
    """Where a thread of this process is in its code."""
    frame = sys._current_frames().get(thread or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-12:])
