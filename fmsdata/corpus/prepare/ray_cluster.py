"""Tasks on a Ray cluster.

Nodes share nothing but the storage: SOURCE and OUTPUT must be reachable from all of them under the
same path, and so must the file of the tokenizer. A task that was running on a node that died is run
again on another.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fmsdata.corpus.prepare.tasks import Job, Result, Task, doing, run_task
from fmsdata.corpus.tokenizer_threads import SWITCH
from fmsdata.errors import ConfigError, FmsdataError, WorkerError

RETRIES = 10  # of a task whose node or process died
AHEAD = 2  # tasks that are handed out for each processor of the cluster


class RayCluster:
    """The Ray cluster that this process is connected to, or that RAY_ADDRESS names; else one on this machine."""

    def __init__(self, job: Job, most: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("--engine ray needs the package ray: pip install 'fmsdata[ray]'") from None
        self._ray: Any = ray
        self._job, self._most = job, most

    def __enter__(self) -> "RayCluster":
        ray = self._ray
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._ray.shutdown()

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
        """The tasks and their results, as they are done."""
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_quietly)
        shared = ray.put(self._job)
        waiting = list(reversed(tasks))
        running: dict[Any, Task] = {}
        try:
            while waiting or running:
                most = self._most or AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
                while waiting and len(running) < most:
                    task = waiting.pop()
                    running[remote.remote(shared, task)] = task
                for done in ray.wait(list(running), num_returns=1)[0]:
                    yield running[done], self._result(done, running.pop(done))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _result(self, done: Any, task: Task) -> Result:
        try:
            result, error = self._ray.get(done)
        except self._ray.exceptions.RayError as failure:
            raise WorkerError(f"Ray failed while {doing(task)}: {failure}; run again to continue") from None
        if error is not None:
            raise error
        found: Result = result
        return found


def _run_quietly(job: Job, task: Task) -> tuple[Result | None, Exception | None]:
    """Errors of ours are results: Ray would wrap them."""
    os.environ.setdefault(SWITCH, "false")  # one processor for each task
    try:
        return run_task(job, task), None
    except (FmsdataError, OSError) as error:
        return None, error
