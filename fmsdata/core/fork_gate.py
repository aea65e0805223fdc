"""Fork gates: threads of this package are quiet at the moment of a fork.

A forked process has one thread, and a copy of every lock. A lock that another thread held at that
moment stays locked forever in the child: whatever needs it there waits silently. Locks are
everywhere, in `functools.cached_property` of Python 3.11, in loggers, in memory allocators. So a
thread of this package works inside a gate, and a fork first closes all gates: it waits until no
thread is inside one.

Threads of other libraries are not covered. That is why worker processes come from a fork server,
see `fmsdata/loader/fork_server.py`.
"""

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol

PATIENCE_SECONDS = 10.0  # how long a fork waits for a gate, if a thread is inside a slow function


class Gate(Protocol):
    """Something that can be kept from working while a fork happens."""

    def shut(self, timeout: float) -> bool:
        """Wait until nothing works inside, and keep it so.

        Returns whether that succeeded in time.
        """

    def reopen(self) -> None:
        """The fork has happened. Called in the parent only, if `shut` succeeded."""

    def forget(self) -> None:
        """The fork has happened. Called in the child, which has none of the threads."""


class ForkGate:
    """A gate for one thread, which works inside a `with` block.

    >>> gate = ForkGate()
    >>> with gate:
    ...     pass  # no fork of this process happens here
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a thread may fork from inside its own gate
        self._entered = 0
        self._stuck_at = -1  # the value of `_entered` at which a fork stopped waiting
        register(self)

    def __enter__(self) -> None:
        if _Forks.pending:  # it goes first: locks are not fair
            with _Forks.lock:
                pass
        self._lock.acquire()
        self._entered += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def shut(self, timeout: float) -> bool:
        if self._stuck_at == self._entered:  # still inside the same call: don't wait for it again
            timeout = 0
        if self._lock.acquire(timeout=timeout):
            return True
        self._stuck_at = self._entered
        return False

    def reopen(self) -> None:
        self._lock.release()

    def forget(self) -> None:
        self._lock = threading.RLock()


def register(gate: Gate) -> None:
    """Close this gate at every fork of the process, as long as it exists."""
    with _Forks.lock:
        _Forks.gates[id(gate)] = weakref.ref(gate)


class _Forks:
    """The gates of this process, and those that the fork in progress has closed."""

    lock = threading.RLock()
    pending = 0  # forks that wait or happen
    gates: "dict[int, weakref.ref[Gate]]" = {}  # noqa: RUF012
    shut: "list[Gate]" = []  # noqa: RUF012

    @classmethod
    def before(cls) -> None:
        cls.pending += 1
        cls.lock.acquire()
        for key, reference in list(cls.gates.items()):
            gate = reference()
            if gate is None:
                del cls.gates[key]
            elif gate.shut(PATIENCE_SECONDS):
                cls.shut.append(gate)

    @classmethod
    def in_parent(cls) -> None:
        while cls.shut:
            cls.shut.pop().reopen()
        cls.pending -= 1
        cls.lock.release()

    @classmethod
    def in_child(cls) -> None:
        cls.lock, cls.pending = threading.RLock(), 0
        cls.shut.clear()
        for reference in list(cls.gates.values()):
            if (gate := reference()) is not None:
                gate.forget()


os.register_at_fork(before=_Forks.before, after_in_parent=_Forks.in_parent, after_in_child=_Forks.in_child)
