"""Who runs the tasks: this process, worker processes of this machine, or a Ray cluster."""

import os
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, Self

from fmsdata.corpus.prepare.processes import Processes
from fmsdata.corpus.prepare.ray_cluster import RayCluster
from fmsdata.corpus.prepare.tasks import Job, Result, Task, run_task
from fmsdata.corpus.tokenizer_threads import SWITCH, THREADS
from fmsdata.errors import ConfigError

EngineName = Literal["processes", "ray"]
ENGINES = ("processes", "ray")


class Engine(Protocol):
    """Runs tasks, until the context ends."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """The tasks and their results, as they are done."""


def open_engine(name: EngineName, job: Job, processes: int | None) -> Engine:
    """An engine of this name. By default it uses all processors."""
    if name not in ENGINES:
        raise ConfigError(f"engine is {name!r}; it must be one of {', '.join(ENGINES)}")
    if name == "ray":
        return RayCluster(job, processes)
    count = processes or THREADS.count
    return ThisProcess(job) if count == 1 else Processes(job, count)


class ThisProcess:
    """Runs tasks one after the other, on one core."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> "ThisProcess":
        self._switch, self._threads = os.environ.get(SWITCH), THREADS.count
        os.environ[SWITCH], THREADS.count = "false", 1
        return self

    def __exit__(self, *error: object) -> None:
        THREADS.count = self._threads
        if self._switch is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = self._switch

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        for task in tasks:
            yield task, run_task(self._job, task)
