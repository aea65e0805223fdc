"""One process of a measurement or a scenario, in the environment of its loader.

    python -m peers.child JOB.json

The job names the loader's module, what to do, the setup, and the file for the result.
"""

import ctypes
import importlib
import importlib.metadata
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from peers.corpus import make
from peers.protocol import Setup

Job = dict[str, Any]
WARM_UP = 20_000  # batches at most
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def processor_seconds() -> float:
    """Of this process and all that it started, alive or not."""
    used = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used += times.user + times.system + times.children_user + times.children_system
    return used


def prepare(module: Any, job: Job) -> Job:
    folder = Path(job["setup"]["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    module.prepare(make(**job["corpus"]), folder, job["setup"]["length"])
    return {"version": importlib.metadata.version(module.PACKAGE), "does": module.DOES}


def measure(module: Any, job: Job) -> Job:
    """Speed, waits, and what a state costs. With states: only the time to the next batch."""
    states = load_states(job)
    loader = module.open_loader(Setup(**job["setup"]), states)
    batches = iter(loader)
    next(batches)
    found: Job = {"first_batch": time.time() - job["started"]}
    if states is not None:
        return found
    waits: list[float] = []
    spent: list[float] = []
    state = None
    tokens, clock, cpu = 0, 0.0, 0.0
    batch = warm_up(batches, job["seconds"])
    late = time.perf_counter() + 4 * job["seconds"]  # short passes: most of the time is their start
    while clock < job["seconds"] and time.perf_counter() < late:
        if batch is None:
            batches = iter(loader)
            next(batches)
        used = processor_seconds()
        while clock < job["seconds"]:
            start = time.perf_counter()
            batch = next(batches, None)
            wait = time.perf_counter() - start
            if batch is None:  # the start of the next pass is start-up, and not counted
                break
            waits.append(wait)
            clock += wait
            tokens += batch["input_ids"].numel()
        cpu += processor_seconds() - used
    while len(spent) < 20:
        if next(batches, None) is None:
            batches = iter(loader)
            continue
        start = time.perf_counter()
        state = loader.state()
        spent.append(time.perf_counter() - start)
    save_state(job, state)
    try:
        size = len(json.dumps(state))
    except TypeError:
        size = len(pickle.dumps(state))
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    found |= {"tokens": tokens, "clock": clock, "cpu": cpu, "p50": float(p50), "p99": float(p99), "batches": len(waits)}
    return found | {"state_bytes": None if state is None else size, "state_seconds": median(spent)}


def warm_up(batches: Any, seconds: float) -> Any:
    """Take the first batches, until windows, buffers and processes are in use. Returns the last, or none at an end."""
    used, began = processor_seconds(), time.perf_counter()
    batch = None
    for _ in range(WARM_UP):
        batch = next(batches, None)
        if batch is None or processor_seconds() - used > seconds or time.perf_counter() - began > 4 * seconds:
            break
    return batch


def run(module: Any, job: Job) -> Job:
    """Batches up to the end or a number of steps. Keeps all rows, and a state on the way."""
    rows: list[Any] = []
    found: Job = {"error": None}
    killed = None
    try:
        loader = module.open_loader(Setup(**job["setup"]), load_states(job))
        for batch in loader:
            ids, labels = (np.asarray(batch[name]) for name in ("input_ids", "labels"))
            rows.append(np.concatenate([ids, labels[:, -1:]], axis=1).astype(np.int32))
            if len(rows) == job.get("save_at"):
                save_state(job, loader.state())
            if len(rows) == job.get("kill_at"):
                killed = time.monotonic()
                kill_worker()
                Path(f"{job['result']}.killed").write_text(str(time.time()))
            if len(rows) == job.get("steps"):
                break
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise again, anywhere
        found |= failure(error)
    found["seconds_after_kill"] = time.monotonic() - killed if killed else None
    np.savez(job["rows"], *rows)
    found["steps"] = len(rows)
    return found


def kill_worker() -> None:
    """SIGKILL of the worker process that used the most CPU time."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        if not process.children() and "resource_tracker" not in command:
            workers.append((sum(process.cpu_times()[:2]), process.pid))
    if not workers:
        raise LookupError("the loader has no worker process")
    os.kill(max(workers)[1], signal.SIGKILL)


def save_state(job: Job, state: Any) -> None:
    Path(f"{job['states']}.{job['setup']['rank']}").write_bytes(pickle.dumps(state))


def load_states(job: Job) -> list[Any] | None:
    """The states of all ranks, which the processes of this benchmark wrote."""
    if "resume" not in job:
        return None
    paths = sorted(Path(job["resume"]).parent.glob(Path(job["resume"]).name + ".*"))
    return [pickle.loads(path.read_bytes()) for path in paths]


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with the benchmark
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["setup"].get("world", 1) > 1:
        torch.distributed.init_process_group("gloo")  # as a trainer does
    try:
        module = importlib.import_module(f"peers.{job['module']}")
        found = {"prepare": prepare, "measure": measure, "run": run}[job["what"]](module, job)
    except Exception as error:
        found = failure(error)
    Path(job["result"]).write_text(json.dumps(found))


def failure(error: Exception) -> Job:
    """An error in its own words. Its last line says most: those of workers begin with a traceback."""
    name, words = type(error).__name__, str(error).strip().splitlines()[-1:] or ["without a message"]
    return {
        "error": f"{name}: {words[0].removeprefix(f'{name}: ')}",
        "traceback": traceback.format_exc()[-4000:],
        "steps": 0,
    }


if __name__ == "__main__":
    main()
