"""Starts the processes of a job in the loader's environment, and watches them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
# loader: module, environment (a folder of .bench/, or the project's own)
LOADERS = {
    "memcpy": ("copying", ""),
    "fmsdata": ("fms", ""),
    "fmsdata (record batches)": ("fms_batches", ""),
    "memmap + DataLoader": ("memmap", ""),
    "MosaicML Streaming": ("mosaic", "mosaic"),
    "LitData": ("lit", "peers"),
    "Grain": ("grain_packs", "peers"),
    "HF datasets": ("hf", ""),
    "torchdata nodes": ("nodes", ""),
    "WebDataset": ("web", "peers"),
}


def python_of(loader: str) -> str:
    environment = LOADERS[loader][1]
    return str(ROOT / ".bench" / environment / "bin" / "python") if environment else sys.executable


def start(loader: str, job: dict[str, Any], work: Path, extra: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run one process per rank to the end, or to the job's limit of seconds. Returns what each found."""
    world = job["setup"].get("world", 1)
    if not Path(python_of(loader)).exists():
        return [{"error": f"no environment {python_of(loader)}; `make bench` makes it", "steps": 0}] * world
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TMPDIR": str(work),
        "HF_HOME": str(work / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    processes, results = [], []
    for rank in range(world):
        path = work / f"job-{rank}.json"
        result = work / f"result-{rank}.json"
        killed = Path(f"{result}.killed")  # when a worker was killed
        for old in (result, killed):
            old.unlink(missing_ok=True)
        mine = job | {"module": LOADERS[loader][0], "result": str(result), "started": time.time()}
        mine["setup"] = job["setup"] | {"rank": rank}
        if "rows" in job:
            mine["rows"] = f"{job['rows']}-{rank}.npz"
            Path(mine["rows"]).unlink(missing_ok=True)
        path.write_text(json.dumps(mine))
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOBAL_RANK": str(rank)} | (extra or {})
        log = (work / f"log-{rank}.txt").open("w")
        command = [python_of(loader), "-m", "peers.child", str(path)]
        processes.append(
            subprocess.Popen(command, env=own, cwd=work, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        )
        results.append(result)
    memory = watch(processes, job.get("limit", 120))
    found = []
    for rank, result in enumerate(results):
        if result.exists():
            found.append(json.loads(result.read_text()) | {"memory": memory})
        else:
            text = (work / f"log-{rank}.txt").read_text().strip().splitlines()
            hung = processes[rank].returncode == -signal.SIGKILL
            error = f"no end within {job.get('limit', 120)} s" if hung else (text or ["ended without a word"])[-1]
            killed = Path(f"{result}.killed")
            silent = time.time() - float(killed.read_text()) if killed.exists() else None
            found.append(
                {"error": error, "hung": hung, "silent": silent, "steps": 0, "memory": memory, "log": text[-30:]}
            )
    return found


def watch(processes: list[subprocess.Popen[bytes]], limit: float) -> int:
    """Wait for the processes, and end those that take longer. Returns the most memory that they had together."""
    most, end = 0, time.monotonic() + limit
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            most = max(most, sum(map(memory_of, processes)))
            for process in processes:
                try:
                    process.wait(0.3 / len(processes))
                except subprocess.TimeoutExpired:
                    continue
    finally:
        for process in processes:
            for late in tree(process.pid):
                late.kill()
            process.wait()
    return most


def tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """Bytes of memory that are not pages of files: what is shared counts once."""
    total = 0
    for each in tree(process.pid):
        try:
            for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total
