"""The fork server: a process without threads, from which worker processes are forked.

A trainer has threads, of this package and of others. A worker that is forked from it inherits
whatever locks they hold at that moment, and may wait for one forever. So workers are forked from
another process: a new interpreter that imports what workers need and then only waits for requests.
There is one per trainer process, which all its loaders share. With the start method `spawn`, each
worker gets a server of its own.

Python's own fork server would run the trainer's script again in every worker, so that a script
without `if __name__ == "__main__"` fails. Here the worker gets everything through its pipe, see
`fmsdata/loader/worker.py`.

A request is one byte and some file descriptors. The last is the write end of a status pipe: the
server writes the worker's process id to it, and later its exit status.
"""

import atexit
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from fmsdata.core.limits import PROCESS_LIMITS, describe_os_error
from fmsdata.errors import WorkerError

STATUS = struct.Struct("<q")
MOST_DESCRIPTORS = 128  # of a request
UNKNOWN_EXIT = 1 << 20  # the exit code of a worker whose server is gone
FORK_FAILED = 1 << 16  # an exit code of -FORK_FAILED * errno: the worker was never forked
BOOT = "import sys; sys.path[:] = {path!r}; from fmsdata.loader.fork_server import serve; serve({fd}, {trainer})"


class ForkServer:
    """The trainer's side of a fork server."""

    _shared: ClassVar["ForkServer | None"] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self) -> None:
        if not sys.executable:
            raise WorkerError(
                "the Python interpreter is embedded (sys.executable is empty), so worker processes can't be started "
                "from it; set sys.executable, or use num_workers=0"
            )
        self._control, theirs = socket.socketpair()
        with theirs:
            code = BOOT.format(path=sys.path, fd=theirs.fileno(), trainer=os.getpid())
            # Ctrl-C goes to all processes of a terminal, and is for the trainer only. The signal stays blocked
            # in the new process until it ignores it.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            except BaseException:
                self._control.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @classmethod
    def shared(cls) -> "ForkServer":
        """The server of this process, started on first use, or again if it died."""
        with cls._lock:
            if cls._shared is not None and cls._shared._process.poll() is not None:
                cls.end_shared()
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    def start(self, descriptors: Sequence[int]) -> "ServedProcess":
        """Fork a worker that has these descriptors. They may be closed here afterwards."""
        read, write = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._control, [b"w"], [*descriptors, write])
        except OSError as error:
            os.close(read)
            if isinstance(error, ConnectionError):
                raise WorkerError(
                    f"the process that starts workers {describe_exit(self._process.poll())}; "
                    "the standard error of this process shows why"
                ) from None
            raise
        finally:
            os.close(write)
        return ServedProcess(read, self._process.pid, None if self is ForkServer._shared else self)

    def end(self) -> None:
        """End the server. Its workers are not affected: they end when their pipes are closed."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    @classmethod
    def end_shared(cls) -> None:
        """Called when the interpreter exits."""
        with cls._lock:
            shared, cls._shared = cls._shared, None
        if shared is not None:
            shared.end()

    @classmethod
    def _forked(cls) -> None:
        """A fork of the trainer starts a server of its own."""
        cls._lock = threading.RLock()
        if cls._shared is not None:
            cls._shared._control.close()
            cls._shared._process.returncode = 0  # not a child of this process
        cls._shared = None


class ServedProcess:
    """A worker that a server forked. It has those methods of `multiprocessing.Process` that are needed.

    `server` is its own server, if it has one.
    """

    def __init__(self, status: int, started_by: int, server: ForkServer | None) -> None:
        self.started_by = started_by  # the process id of its server
        self.sentinel = status  # becomes readable when there is news
        self._server = server
        self._received = b""
        self._lock = threading.Lock()  # several threads look, and one of them closes it
        os.set_blocking(status, False)

    @property
    def pid(self) -> int | None:
        """None until the server has forked it."""
        self._receive()
        pid = self._number(0)
        return pid if pid is not None and pid > 0 else None

    @property
    def exitcode(self) -> int | None:
        """None while it is alive, negative if it was killed by a signal."""
        self._receive()
        pid = self._number(0)
        return pid if pid is not None and pid < 0 else self._number(1)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.sentinel], [], [], left)[0]:
                return

    def kill(self) -> None:
        if (pid := self.pid) is not None and self.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Release what belongs to it. Call it when it has ended."""
        self._receive()
        with self._lock:
            sentinel, self.sentinel = self.sentinel, -1
        if sentinel >= 0:
            os.close(sentinel)
        if self._server is not None:
            self._server.end()
            self._server = None

    def _number(self, which: int) -> int | None:
        part = self._received[which * STATUS.size : (which + 1) * STATUS.size]
        return STATUS.unpack(part)[0] if len(part) == STATUS.size else None

    def _receive(self) -> None:
        with self._lock:
            while self.sentinel >= 0 and len(self._received) < 2 * STATUS.size:
                try:
                    more = os.read(self.sentinel, 2 * STATUS.size - len(self._received))
                except BlockingIOError:
                    return
                # The server writes both numbers, unless it is gone.
                self._received += more or STATUS.pack(UNKNOWN_EXIT) * (2 - len(self._received) // STATUS.size)


def serve(control_fd: int, trainer: int) -> None:
    """Be a fork server until the trainer, or the last worker after that, has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    import fmsdata.loader.worker  # noqa: F401  # what workers need

    control: socket.socket | None = socket.socket(fileno=control_fd)
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    poll = select.poll()
    poll.register(control_fd, select.POLLIN)
    poll.register(woken, select.POLLIN)
    watched = watch_process(trainer)
    if watched is not None:
        poll.register(watched, select.POLLIN)
    workers: dict[int, int] = {}  # the write end of the status pipe of each, by process id
    while control is not None or workers:
        for fd, _ in poll.poll():
            if fd == watched:
                return
            if fd == woken:
                os.read(woken, 1 << 12)
                _reap(workers)
            elif control is not None:
                message, descriptors, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
                if message:
                    _fork(descriptors, workers, [control_fd, woken, wake, *([] if watched is None else [watched])])
                else:
                    poll.unregister(control_fd)
                    control.close()
                    control = None


def watch_process(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _fork(descriptors: list[int], workers: dict[int, int], own: list[int]) -> None:
    *given, status = descriptors
    try:
        pid = os.fork()
    except OSError as error:
        for fd in given:
            os.close(fd)
        _write(status, -(error.errno or 1) * FORK_FAILED)
        os.close(status)
        return
    if pid:
        for fd in given:
            os.close(fd)
        _write(status, pid)
        workers[pid] = status
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in [*own, *workers.values(), status]:
            os.close(fd)
        code = _run(given)
    finally:  # whatever happens, this process must not continue as a second server
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(descriptors: list[int]) -> int:
    from fmsdata.loader.worker import serve_worker

    try:
        serve_worker(descriptors)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _reap(workers: dict[int, int]) -> None:
    for pid in list(workers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pipe = workers.pop(pid)
            _write(pipe, os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _write(status: int, number: int) -> None:
    with suppress(OSError):  # the trainer is gone, or no longer interested
        os.write(status, STATUS.pack(number))


def describe_exit(code: int | None) -> str:
    """How a process ended, in words.

    >>> describe_exit(5), describe_exit(-11)
    ('exited with code 5', 'was killed by SIGSEGV')
    """
    if code is None:
        return "ended"
    if code == UNKNOWN_EXIT:
        return "ended in an unknown way, since the process that started it is gone"
    if code <= -FORK_FAILED:
        number = -code // FORK_FAILED
        return f"could not be forked: {describe_os_error(OSError(number, os.strerror(number)), PROCESS_LIMITS)}"
    if code >= 0:
        return f"exited with code {code}"
    known = -code in set(signal.Signals)
    name = signal.Signals(-code).name if known else f"signal {-code}"
    return f"was killed by {name}" + (", perhaps because the system ran out of memory" if name == "SIGKILL" else "")


os.register_at_fork(after_in_child=ForkServer._forked)
atexit.register(ForkServer.end_shared)
