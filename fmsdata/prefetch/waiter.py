"""Waiting for what is fetched, until it arrives or the loader is closed."""

import time
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from fmsdata.errors import StorageError

Value = TypeVar("Value")
CHECK_SECONDS = 0.2  # how often a waiting thread checks whether the loader was closed


class Waiter:
    """Waits for fetches in the thread that reads, and adds up the time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._closed = False

    def wait(self, future: "Future[Value]") -> Value:
        """The result. Raises if the loader is closed meanwhile."""
        began = time.perf_counter()
        try:
            while True:
                if self._closed:
                    raise StorageError("the loader was closed while it waited for remote shards")
                try:
                    return future.result(CHECK_SECONDS)
                except TimeoutError:
                    if future.done():
                        raise
                except CancelledError:
                    if not self._closed:
                        raise
        except BaseException:
            future.cancel()
            raise
        finally:
            self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stop waiting, from any thread."""
        self._closed = True
