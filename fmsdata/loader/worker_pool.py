"""The trainer's side of its worker processes.

It starts them, sends requests, receives replies, notices when one dies, and ends them.

Each worker has a pipe of its own. A worker that dies closes its end, which is noticed at once; its
exit code is checked now and then as well, because another process that was forked in between may
keep the pipe open.
"""

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fmsdata.errors import ConfigError, WorkerError
from fmsdata.loader.reply import ReplySize
from fmsdata.loader.worker import NOTE_BYTES, WorkerSpec, run_worker

CHECK_SECONDS = 0.5  # how often exit codes are checked while waiting for a reply
PATIENCE_SECONDS = 2.0  # how long workers may take to end by themselves


class Worker(NamedTuple):
    """A worker process that was started."""

    spec: WorkerSpec
    process: Any  # of multiprocessing: its classes differ by start method
    connection: Connection

    def describe(self) -> str:
        """Which worker this is, and what it read last."""
        note = bytes(self.spec.note.read(NOTE_BYTES)).decode(errors="replace").strip(" \0")
        name = f"worker {self.spec.index} of {self.spec.workers}"
        return f"{name}, which was reading {note}" if note else f"{name}, before it read anything"


def start_worker(spec: WorkerSpec, method: str, inherited: Sequence[Connection] = ()) -> Worker:
    """Start a worker process.

    `inherited` are the trainer's pipe ends so far, which a forked worker must close.
    """
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    try:
        process = context.Process(
            target=run_worker,
            args=(spec, theirs, (*inherited, ours) if method == "fork" else ()),
            name=f"fmsdata-worker-{spec.index}",
            daemon=True,
        )
        process.start()
    except BaseException as error:
        ours.close()
        if isinstance(error, pickle.PicklingError | AttributeError | TypeError):
            raise ConfigError(
                f"the pipeline can't be sent to worker processes that are started by {method!r}: {error}; "
                "define functions and classes in a module, or use multiprocessing_context='fork'"
            ) from None
        raise
    finally:
        theirs.close()
    return Worker(spec, process, ours)


class WorkerPool:
    """The workers of a loader.

    One thread uses it; `check`, `wake` and `abort` may be called from others.
    """

    def __init__(self, specs: Sequence[WorkerSpec], method: str) -> None:
        self._owner = os.getpid()
        self._workers: list[Worker] = []
        self._ending = False
        self._death: str | None = None  # of the first worker that died
        try:
            for spec in specs:
                inherited = [worker.connection for worker in self._workers]
                self._workers.append(start_worker(spec, method, inherited))
        except BaseException:
            self.close()
            raise

    def request(self, batches: int) -> None:
        """Ask all workers for a round of this many batches."""
        for worker in self._workers:
            with suppress(ConnectionError):  # it died: `receive` finds out
                worker.connection.send(batches)

    def receive(self, index: int) -> ReplySize:
        """Wait for the next reply of a worker. Raises `WorkerError` if that can't come any more."""
        worker = self._workers[index]
        while True:
            ready = wait([worker.connection, worker.process.sentinel], CHECK_SECONDS)
            if self._ending:
                raise WorkerError("the loader was closed while it waited for its workers")
            with suppress(EOFError, ConnectionError):
                if worker.connection.poll():
                    size: ReplySize = worker.connection.recv()
                    return size
            if ready:  # the worker is gone, and its exit code comes a moment later
                worker.process.join(PATIENCE_SECONDS)
                self._report_death(worker)
            self.check()

    def describe(self, index: int) -> str:
        """Which worker this is, and what it read last."""
        return self._workers[index].describe()

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
            self._death = f"process {process.pid} {_describe_exit(process.exitcode)}: {worker.describe()}"
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
                worker.connection.send(None)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
        for worker in self._workers:
            worker.connection.close()
        self._workers = []


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    known = -code in set(signal.Signals)
    name = signal.Signals(-code).name if known else f"signal {-code}"
    return f"was killed by {name}" + (", perhaps because the system ran out of memory" if name == "SIGKILL" else "")
