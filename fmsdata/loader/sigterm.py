"""SIGTERM: how schedulers end a job, and how a loader saves itself then.

The first signal saves at once, at the step that the trainer has finished. The loader then saves
again and ends the run when the trainer asks for the next batch. Ranks that step together are at
most one step apart, so one of the two steps is saved by all of them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fmsdata.errors import ConfigError

EXIT_CODE = 128 + signal.SIGTERM


class Sigterm:
    """Whether SIGTERM was received while it was handled."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def handled(self, save: Callable[[], None]) -> Iterator[None]:
        """Within this context the first SIGTERM calls `save`, and a second one exits."""
        process = os.getpid()

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a forked child: the signal is not for the loader
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self.received:
                raise SystemExit(EXIT_CODE)
            self.received = True
            save()
            if callable(previous):
                previous(number, frame)

        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("on_sigterm works in the main thread only: iterate there, or leave it off")
        previous = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
