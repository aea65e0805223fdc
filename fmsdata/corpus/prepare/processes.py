"""Tasks in worker processes of this machine.

Workers are started as programs of their own, so they inherit neither threads nor locks, and a script
that prepares a corpus needs no `if __name__ == "__main__"`. A worker that dies is an error that names
it. Workers end with the process that started them, however that ends.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from fmsdata.core.limits import start_thread
from fmsdata.corpus.prepare.tasks import Job, Result, Task, doing, run_task
from fmsdata.corpus.tokenizer_threads import THREADS
from fmsdata.errors import FmsdataError, WorkerError

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from fmsdata.corpus.prepare.processes import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""
PARENT_SECONDS = 0.5  # between two looks at the parent
ENDING_SECONDS = 5.0


class Processes:
    """Worker processes, started when there is work for them, until the context ends."""

    def __init__(self, job: Job, count: int) -> None:
        self._job, self._count = job, count
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """The tasks and their results, as they are done."""
        waiting = list(reversed(tasks))
        while len(self._workers) < min(self._count, len(tasks)):
            self._workers.append(_Worker(self._job))
        busy: dict[Connection[Any, Any], _Worker] = {}
        for worker in self._workers[: len(tasks)]:
            worker.give(waiting.pop())
            busy[worker.pipe] = worker
        while busy:
            ready = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                worker = busy.pop(pipe)
                result = worker.take()
                if waiting:
                    worker.give(waiting.pop())
                    busy[pipe] = worker
                yield result


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, job: Job) -> None:
        self.pipe, theirs = Pipe()
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._task: Task | None = None
        self._send(job)

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def give(self, task: Task) -> None:
        self._task = task
        self._send(task)

    def _send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self._died() from None

    def take(self) -> tuple[Task, Result]:
        task = self._task
        try:
            done, result = self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if not done:
            raise result
        if task is None:
            raise WorkerError(f"worker process {self._process.pid} answered without a task")
        return task, result

    def _died(self) -> WorkerError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        code = self._process.poll()
        how = "closed its pipe" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (perhaps there was not enough memory: use fewer --processes)" * (-code == signal.SIGKILL)
        task = f" while {doing(self._task)}" if self._task else ""
        return WorkerError(f"worker process {self._process.pid} {how}{task}; run again to continue")


def serve(pipe_number: int, parent: int) -> None:
    """The worker process: runs tasks until its parent closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    start_thread(threading.Thread(target=_end_with, args=(parent,), name="fmsdata-watch-parent", daemon=True))
    THREADS.share(os.cpu_count() or 1)  # one core for each worker
    pipe: Connection[Any, Any] = Connection(pipe_number)
    with suppress(EOFError, OSError):
        job: Job = pipe.recv()
        while True:
            pipe.send(_answer(job, pipe.recv()))


def _answer(job: Job, task: Task) -> tuple[bool, Any]:
    try:
        return True, run_task(job, task)
    except FmsdataError as error:
        return False, error
    except OSError as error:
        return False, OSError(error.errno, error.strerror, error.filename) if error.errno else OSError(str(error))
    except MemoryError:
        return False, WorkerError(f"not enough memory while {doing(task)}; use fewer --processes, and run again")
    except Exception:
        return False, WorkerError(f"failed while {doing(task)}:\n{traceback.format_exc()}")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        threading.Event().wait(PARENT_SECONDS)
    os._exit(1)
