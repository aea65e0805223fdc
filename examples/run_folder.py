"""The folder of a training run: locked by one run at a time, with checkpoints that are complete or absent.

A checkpoint is a folder `step-<n>`. It is written under another name, and renamed when every rank is
done. Rank 0 holds a lock on the folder as long as it lives, and the lock names its process. Ranks
also end by themselves when their launcher is gone: killing torchrun with SIGKILL does not end them.
"""

import fcntl
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

WATCH_SECONDS = 0.5


class RunFolder:
    """Opens a folder for this run, on all ranks, or ends all of them if another run has it."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self.keep = path, keep
        self.rank = dist.get_rank()
        found: list[str | None] = [self._lock() if self.rank == 0 else None]
        dist.broadcast_object_list(found)
        if found[0] is not None:
            end(f"{path} is in use by {found[0]}; stop that run, or choose another folder")
        if self.rank == 0:
            for leftover in path.glob("unfinished-*"):
                shutil.rmtree(leftover)

    def newest(self) -> Path | None:
        """The newest checkpoint. All ranks get the one that rank 0 sees."""
        newest = [next(iter(self._checkpoints()), None)]
        dist.broadcast_object_list(newest)
        return newest[0]

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A new folder for all ranks to write to. It counts as a checkpoint when all of them are done."""
        unfinished = self.path / f"unfinished-{step}"
        unfinished.mkdir(exist_ok=True)
        yield unfinished
        dist.barrier()  # every rank has written its part
        if self.rank == 0:
            unfinished.rename(self.path / f"step-{step}")
            for old in self._checkpoints()[self.keep :]:
                shutil.rmtree(old.rename(old.with_name(f"unfinished-{old.name}")))

    def _checkpoints(self) -> list[Path]:
        """The complete checkpoints, newest first."""
        return sorted(self.path.glob("step-*"), key=lambda folder: int(folder.name[5:]), reverse=True)

    def _lock(self) -> str | None:
        """Lock the folder until this process ends. Returns who has it, if another process does."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(lock, 1000).decode().strip() or "another process"
        os.ftruncate(lock, 0)
        os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        return None


def end(message: str) -> NoReturn:
    """End all ranks with exit code 1 and one line. All of them must call it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the others when the first has ended
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)
    dist.barrier()  # none is still waiting for another one
    dist.destroy_process_group()
    sys.exit(1)


def end_at_once() -> NoReturn:
    """End this process, which has done everything, without the end of the interpreter.

    A thread of gloo may still hold a tensor then. It needs the interpreter to drop it, and aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_with_torchrun() -> None:
    """From now on, end this process when torchrun has ended in any way. Without torchrun, end now."""
    if "RANK" not in os.environ:
        sys.exit(f"start it with torchrun: torchrun --standalone --nproc-per-node 2 {' '.join(sys.argv)}")
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:  # that of an orphan is another one
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="watch torchrun", daemon=True).start()
