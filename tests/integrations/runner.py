"""Run scripts as the ranks of a training, one after the other. Started by the Python of `.trainers`.

Each rank is a fork of this process, which has imported the trainer once: importing takes seconds. What the
ranks train on is recorded where it reaches a model, at the layer that embeds the tokens, so that scripts
run as they are. A rank can be killed there, by the signal that no process can handle.
"""

import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

EMBEDDINGS = ("Embedding", "FSDPEmbedding", "VocabParallelEmbedding")
IMPORTS = ("fmsdata.config.build", "torch._dynamo")  # what every rank would import, the second for its optimizer
GRACE = 20.0  # seconds that ranks have to end when another one has failed


class Recorder:
    """Writes the first token of each row that a model embeds, and kills the process if it is time."""

    def __init__(self, path: Path, kill_after: int | None) -> None:
        self._file = path.open("w")
        self._kill_after = kill_after
        self._trained = 0

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if type(module).__name__ not in EMBEDDINGS or not inputs or inputs[0].ndim != 2:
            return
        if module.training:
            if self._trained == self._kill_after:
                self.kill()
            self._trained += 1
        record = {"training": module.training, "rows": inputs[0][:, 0].tolist()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(rank: int, port: int, job: dict[str, Any], folder: Path) -> None:
    """One rank, as torchrun starts it. Does not return."""
    code = 1
    try:
        name, world_size = job["name"], job["world_size"]
        log = os.open(folder / f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(120, exit=True)  # what hangs is named
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ["REPORT"] = str(folder / f"{name}-{rank}.json")
        os.chdir(folder / job["folder"])
        torch.set_num_threads(1)
        register_module_forward_pre_hook(Recorder(folder / f"{name}-{rank}.jsonl", job["kill_after"]))
        sys.argv = [job["script"], *job["arguments"]]
        runpy.run_path(job["script"], run_name="__main__")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def report(found: Any) -> None:
    """What a test is to know of a rank. Called by programs of tests."""
    Path(os.environ["REPORT"]).write_text(json.dumps(found))


def run(job: dict[str, Any], folder: Path) -> list[int]:
    """The exit codes of all ranks of a job. If one fails, the others end soon."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    ranks = {}
    for rank in range(job["world_size"]):
        pid = os.fork()
        if not pid:
            run_rank(rank, port, job, folder)
        ranks[pid] = rank
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[pid]] and deadline is None:
                deadline = time.monotonic() + GRACE
        elif deadline is not None and time.monotonic() > deadline:
            for waiting in [pid for pid, rank in ranks.items() if rank not in codes]:
                os.kill(waiting, signal.SIGKILL)
            deadline = None
        else:
            time.sleep(0.01)
    return [codes[rank] for rank in range(job["world_size"])]


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "jobs.json").read_text())
    for module in [*IMPORTS, *plan["imports"]]:
        importlib.import_module(module)
    codes = {job["name"]: run(job, folder) for job in plan["jobs"]}
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
