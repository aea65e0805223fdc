"""One thread at a time makes a batch, so that a loader may be shared by threads.

Every batch goes to one of them, and the state is that after the last batch that any of them got.
"""

import os
import threading
from contextlib import AbstractContextManager


class Turns:
    """A lock that each process has for itself: a fork does not wait for threads that it does not have.

    >>> turns = Turns()
    >>> with turns.mine():
    ...     pass  # no other thread of this process is here
    """

    def __init__(self) -> None:
        self.process, self._lock = os.getpid(), threading.RLock()  # a signal handler may ask for a batch, too

    def mine(self) -> AbstractContextManager[bool]:
        """The lock, to be entered."""
        process = os.getpid()
        if self.process != process:
            self.process, self._lock = process, threading.RLock()
        return self._lock
