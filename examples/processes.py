"""Starts examples under torchrun, kills them in the middle, and reads their logs: for the demos."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

HERE = Path(__file__).parent
POLL = 0.01  # seconds


class Failed(Exception):
    """The demo did not show what it promises."""


def torchrun(
    ranks: int, script: str, folder: Path, *options: str | Path, kill_when: Callable[[], bool] | None = None
) -> None:
    """Run an example in a folder to its end, or kill it when `kill_when` says so."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(HERE / script), "--out", str(folder), *map(str, options)]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TMPDIR": str(folder.parent)}
    log = folder.with_suffix(".txt")
    with log.open("w") as output:
        launcher = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while launcher.poll() is None:
                if kill_when is not None and kill_when():
                    return
                time.sleep(POLL)
        finally:
            kill(launcher)
    if launcher.returncode or kill_when is not None:
        raise Failed(f"the run on {ranks} ranks ended with code {launcher.returncode}:\n{log.read_text()[-3000:]}")


def kill(launcher: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to torchrun and its ranks, which have sessions of their own."""
    with undisturbed(), suppress(psutil.NoSuchProcess):
        parent = psutil.Process(launcher.pid)
        parent.suspend()  # so that it starts no more ranks in the meantime
        processes = [parent, *parent.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
    launcher.wait()


def entries(folder: Path) -> list[dict[str, Any]]:
    """The complete lines in the log of a run so far."""
    try:
        lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def has_done(folder: Path, step: int) -> bool:
    """Whether a step is in the log of a run."""
    return any(entry["step"] == step for entry in entries(folder))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C inside, so that cleaning up is not interrupted."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="fmsdata-demo-"))
    try:
        yield made
    finally:
        with undisturbed():
            shutil.rmtree(made)


def run_demo(demo: Callable[[Console], None]) -> int:
    """Run a demo from the command line. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up like an interrupt
    try:
        demo(Console())
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
