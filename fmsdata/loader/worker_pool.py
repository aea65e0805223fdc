"""The trainer's side of its worker processes.

It starts them, sends requests, receives replies, notices when one dies, and ends them.

Each worker has a pipe of its own. A worker that dies closes its end, which is noticed at once; its
exit code is checked now and then as well, because another process that was forked in between may
keep the pipe open.
"""

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fmsdata.errors import ConfigError, WorkerError
from fmsdata.loader.fork_server import ForkServer, describe_exit
from fmsdata.loader.limits import limit_error
from fmsdata.loader.reply import ReplySize
from fmsdata.loader.shared_memory import SharedMemory
from fmsdata.loader.worker import Channel, Spec, Surroundings, run_worker
from fmsdata.loader.worker_note import WorkerNote, describe_state

DEFAULT_METHOD = "forkserver"
CHECK_SECONDS = 0.5  # how often exit codes are checked while waiting for a reply
PATIENCE_SECONDS = 2.0  # how long workers may take to end by themselves
EXIT_CODE_SECONDS = 10.0  # how long the exit code of a worker that is gone may take, on a busy machine
SPARE_DESCRIPTORS = 8  # that must be left before a worker is forked
MOST_REPORTED = 4  # silent workers whose stacks are shown


class Worker(NamedTuple):
    """A worker process that was started."""

    spec: Spec
    process: Any  # of multiprocessing, or a ServedProcess
    channel: Channel

    def describe(self) -> str:
        """Which worker this is, and what it read last."""
        note = self.channel.note.read()
        name = f"worker {self.spec.index} of {self.spec.workers}"
        return f"{name}, which was reading {note}" if note else f"{name}, before it read anything"

    def release(self) -> None:
        """Close everything that belongs to a worker that was ended."""
        self.channel.close()
        with suppress(ValueError):  # a process of multiprocessing that is still alive can't be closed
            self.process.close()


def start_worker(spec: Spec, method: str, *, memories: int, inherited: Sequence[Connection] = ()) -> Worker:
    """Start a worker process.

    `memories` is the number of its memories for replies. `inherited` are the trainer's pipe ends so
    far, which a forked worker must close.
    """
    opened: list[Callable[[], None]] = []  # what to close after a failure
    try:
        shared = []
        for _ in range(memories + 1):
            shared.append(SharedMemory())
            opened.append(shared[-1].close)
        ours, theirs = multiprocessing.Pipe()
        opened += [ours.close, theirs.close]
        channel = Channel(ours, WorkerNote(shared[0]), shared[1:])
        if method == "fork":
            process = _fork_worker(spec, channel, theirs, inherited)
        else:
            process = _serve_worker(spec, channel, theirs, method)
        theirs.close()
        return Worker(spec, process, channel)
    except BaseException as error:
        for close in opened:
            close()
        if isinstance(error, OSError):
            raise limit_error(error, f"worker {spec.index} of {spec.workers} could not be started") from None
        raise


def _fork_worker(spec: Spec, channel: Channel, theirs: Connection, inherited: Sequence[Connection]) -> Any:
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            "multiprocessing_context is 'fork', but this is a daemon process of multiprocessing, which may not fork "
            f"others that way; use {DEFAULT_METHOD!r}, which is the default"
        )
    process = multiprocessing.get_context("fork").Process(
        target=run_worker,
        args=(spec, channel._replace(requests=theirs), (*inherited, channel.requests)),
        name=f"fmsdata-worker-{spec.index}",
        daemon=True,
    )
    # `start` makes two pipes, and leaves them open if that or the fork fails. The worker needs some to begin with.
    _require_descriptors(SPARE_DESCRIPTORS)
    _require_process()
    process.start()
    return process


def _require_descriptors(count: int) -> None:
    """Raise OSError if this process can't open that many files more."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for fd in opened:
            os.close(fd)


def _require_process() -> None:
    """Raise OSError if this process can't start another one.

    The system creates the process before it finds that there is no such program.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        os.posix_spawn(f"{os.devnull}/none", ["none"], {})


def _serve_worker(spec: Spec, channel: Channel, theirs: Connection, method: str) -> Any:
    import cloudpickle  # for lambdas, and for functions and classes of a script or notebook

    try:
        text: bytes = cloudpickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the pipeline can't be sent to worker processes that are started by {method!r}: {error}; create such "
            "objects inside the function that uses them, when it is first called, or use multiprocessing_context='fork'"
        ) from None
    server = ForkServer.shared() if method == DEFAULT_METHOD else ForkServer()
    memories = [channel.note.memory, *channel.memories]
    try:
        process = server.start([theirs.fileno(), *(memory.fileno() for memory in memories)])
    except BaseException:
        if method != DEFAULT_METHOD:
            server.end()
        raise
    theirs.close()  # if the worker dies early, writing to it must fail
    with suppress(ConnectionError):  # it died: `receive` finds out
        channel.requests.send(Surroundings.of_trainer(spec.index, spec.workers))
        channel.requests.send_bytes(text)
    return process


class WorkerPool:
    """The workers of a loader.

    One thread uses it; `check`, `wake` and `abort` may be called from others.
    """

    def __init__(self, specs: Sequence[Spec], method: str, *, memories: int) -> None:
        self._owner = os.getpid()
        self._workers: list[Worker] = []
        self._ending = False
        self._death: str | None = None  # of the first worker that died
        try:
            for spec in specs:
                inherited = [worker.channel.requests for worker in self._workers]
                self._workers.append(start_worker(spec, method, memories=memories, inherited=inherited))
        except BaseException:
            self.close()
            raise

    def memory(self, index: int, number: int) -> SharedMemory:
        """One of the memories that a worker writes its replies to."""
        return self._workers[index].channel.memories[number]

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, as far as they are known."""
        return [worker.process.pid for worker in list(self._workers) if worker.process.pid is not None]

    def request(self, batches: int) -> None:
        """Ask all workers for a round of this many batches."""
        for index in range(len(self._workers)):
            self.send(index, batches)

    def send(self, index: int, request: Any) -> None:
        """Send a request to one worker."""
        with suppress(ConnectionError):  # it died: `receive` finds out
            self._workers[index].channel.requests.send(request)

    def receive(self, index: int) -> ReplySize:
        """Wait for the next reply of a worker. Raises `WorkerError` if that can't come any more."""
        worker = self._workers[index]
        requests = worker.channel.requests
        while True:
            wait([requests, worker.process.sentinel], CHECK_SECONDS)
            if self._ending:
                raise WorkerError("the loader was closed while it waited for its workers")
            try:
                if requests.poll():
                    size: ReplySize = requests.recv()
                    return size
            except (EOFError, ConnectionError):  # it is gone, and its exit code comes a moment later
                worker.process.join(EXIT_CODE_SECONDS)
                self._report_death(worker)
            self.check()

    def describe(self, index: int) -> str:
        """Which worker this is, and what it read last."""
        return self._workers[index].describe()

    def silent(self) -> list[str]:
        """The workers whose reply has not come: which, what they read, and where they are in their code.

        Called from another thread, while `receive` waits.
        """
        silent = [worker for worker in list(self._workers) if not _has_reply(worker)]
        reports = []
        for worker in silent[:MOST_REPORTED]:
            pid = worker.process.pid
            if pid is None:
                server = worker.process.started_by
                state = describe_state(server) or "it imports what workers need"
                reports.append(
                    f"{worker.describe()}: has not been started yet by its fork server, process {server}: {state}"
                )
            else:
                reports.append(f"process {pid}: {worker.describe()}: {worker.channel.note.stack(pid)}")
        return reports

    def check(self) -> None:
        """Raise if a worker died. The others are ended too: their lines are of no use alone."""
        for worker in list(self._workers):
            if self._death is not None or worker.process.exitcode is not None:
                self._report_death(worker)

    def _report_death(self, worker: Worker) -> None:
        if self._ending:  # it died because it was ended
            return
        if self._death is None:
            process = worker.process
            name = "a process" if process.pid is None else f"process {process.pid}"
            self._death = f"{name} {describe_exit(process.exitcode)}: {worker.describe()}"
            self._kill()
        raise WorkerError(
            f"{self._death}. The loader's position has not changed: "
            "iterate again to start new workers, or resume from its state"
        )

    def wake(self) -> None:
        """Let `receive` raise instead of waiting."""
        self._ending = True

    def abort(self) -> None:
        """Kill all workers."""
        self._ending = True
        self._kill()

    def _kill(self) -> None:
        if os.getpid() == self._owner:
            for worker in list(self._workers):
                worker.process.kill()

    def close(self) -> None:
        """End all workers. A worker finishes its current round, or is killed if that takes long."""
        self._ending = True
        if os.getpid() != self._owner:  # a fork of the trainer: the workers are not its children
            return
        for worker in self._workers:
            with suppress(ConnectionError):
                worker.channel.requests.send(None)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(PATIENCE_SECONDS)  # more than a killed process needs
            worker.release()
        self._workers = []


def _has_reply(worker: Worker) -> bool:
    try:
        return worker.channel.requests.poll()
    except (OSError, EOFError):  # it died, or the pool was closed meanwhile
        return True
