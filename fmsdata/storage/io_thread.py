"""The thread in which a process talks to filesystems: one asyncio event loop, created on first use.

Event loops, sockets and threads do not survive a fork. A forked process never touches those of its
parent, and creates its own. Nothing here keeps a process from ending: all threads are daemons.
"""

import asyncio
import atexit
import ctypes
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fmsdata.core import fork_gate
from fmsdata.core.limits import start_thread
from fmsdata.errors import WorkerError

T = TypeVar("T")
Kept = TypeVar("Kept")
THREADS = 64  # at most, for blocking filesystems
CLOSING_SECONDS = 2.0
PAUSE_SECONDS = 30.0  # at most, while another thread forks


class IoThread:
    """The event loop of this process, and everything to close before it ends."""

    _current: "IoThread | None" = None
    _lock = threading.RLock()  # reentrant: a signal handler may need it while it is held

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_DaemonThreads())
        self._kept: dict[object, Any] = {}
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._thread = threading.Thread(target=self._serve, name="fmsdata-io", daemon=True)
        try:
            start_thread(self._thread)
        except WorkerError:
            self.loop.close()
            raise
        self._resume = threading.Event()
        fork_gate.register(self)

    @classmethod
    def current(cls) -> "IoThread":
        """The IoThread of this process."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            return cls._current

    @classmethod
    def close_current(cls) -> None:
        """End the event loop of this process, if there is one, and cancel what runs in it."""
        with cls._lock:
            if cls._current is not None and threading.current_thread() is cls._current._thread:
                raise RuntimeError("the event loop can't end itself; call this from another thread")
            current, cls._current = cls._current, None
        if current is not None:  # from here on, nobody can start anything in it
            current._close()

    def keep(self, key: object, make: Callable[[], Kept], close: Callable[[Kept], Awaitable[None]]) -> Kept:
        """The object under this key, created if necessary. It is closed when the loop ends."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = kept = make()
                self._closing.append(lambda: close(kept))
            found: Kept = self._kept[key]
            return found

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop, without waiting."""
        future: Future[T] = Future()
        self.start_all([(coroutine, future)])
        return future

    def start_all(self, work: Sequence[tuple[Coroutine[Any, Any, T], Future[T]]]) -> None:
        """Run many coroutines in the loop, which is woken once. Each sets its future."""
        with self._lock:
            if self is IoThread._current:
                self.loop.call_soon_threadsafe(self._begin, work)
                return
        for coroutine, future in work:
            coroutine.close()
            future.cancel()  # so that nobody waits for it
        raise RuntimeError("this connection was closed, or belongs to a parent process; create it again")

    def _begin(self, work: Sequence[tuple[Coroutine[Any, Any, T], Future[T]]]) -> None:
        for coroutine, future in work:
            if future.cancelled():
                coroutine.close()
                continue
            task = self.loop.create_task(coroutine)
            task.add_done_callback(partial(_resolve, future))
            future.add_done_callback(partial(self._cancel_task, task))

    def _cancel_task(self, task: "asyncio.Task[T]", future: Future[T]) -> None:
        if future.cancelled():
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(task.cancel)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it. An interrupt ends both at once."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the event loop can't wait for itself; use await")
        future = self.start(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # if the waiting was interrupted
            del future  # an error refers to this frame, and the future to the error

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def shut(self, timeout: float) -> bool:
        """Before a fork: let the loop pause between two steps of its work."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return True
        paused, self._resume = threading.Event(), threading.Event()
        try:
            self.loop.call_soon_threadsafe(_pause, paused, self._resume)
        except RuntimeError:  # the loop has ended
            return True
        if not paused.wait(timeout):
            self.reopen()
            return False
        return True

    def reopen(self) -> None:
        """After the fork."""
        self._resume.set()

    def forget(self) -> None:
        """In the child, which leaves this loop alone: see `_forked`."""

    def _close(self) -> None:
        """Takes a few seconds at most, even if requests stall."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._wind_up(), self.loop).result(3 * CLOSING_SECONDS)
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    async def _wind_up(self) -> None:
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        closing = {asyncio.ensure_future(close()) for close in self._closing}
        if closing:
            await _cancel((await asyncio.wait(closing, timeout=CLOSING_SECONDS))[1])
        self._kept.clear()
        for _ in range(3):  # transports are closed in the next iterations of the loop
            await asyncio.sleep(0)

    @classmethod
    def _forked(cls) -> None:
        """Leave the parent's loop alone, and keep it from being collected.

        Destroying it would unregister the parent's sockets in the parent, too.
        """
        if cls._current is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(cls._current))
        cls._current = None
        cls._lock = threading.RLock()


def _pause(paused: threading.Event, resume: threading.Event) -> None:
    paused.set()
    resume.wait(PAUSE_SECONDS)


def _resolve(future: Future[T], task: "asyncio.Task[T]") -> None:
    """Copy the outcome of a task to a future."""
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    error = task.exception()
    if error is None:
        future.set_result(task.result())
    else:
        future.set_exception(error)


async def _cancel(tasks: set[Any]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSING_SECONDS)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    The first failure cancels the others.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class _DaemonThreads(ThreadPoolExecutor):
    """At most THREADS threads.

    Unlike those of its base class, they don't keep the process alive.
    """

    def __init__(self) -> None:
        super().__init__(THREADS)
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._started = self._idle = 0
        self._guard = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._guard:
            if self._idle:
                self._idle -= 1
            elif self._started < THREADS:
                self._start_thread()
            self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        try:
            start_thread(threading.Thread(target=self._serve, name="fmsdata-io-pool", daemon=True))
            self._started += 1
        except WorkerError:
            if not self._started:  # else the others do it
                raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        with self._guard:
            for _ in range(self._started):
                self._jobs.put(None)
            self._started = THREADS

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del job, future, call
            with self._guard:
                self._idle += 1


os.register_at_fork(after_in_child=IoThread._forked)


atexit.register(IoThread.close_current)
