"""Kills a training run twice, resumes on other numbers of ranks, and compares it with an uninterrupted run.

It starts examples/train.py under torchrun on 2 ranks, kills all processes in the middle, resumes on 4
ranks, kills them again, and lets 3 ranks finish. Every step must have the same batch as on 1 rank, and
the same loss up to rounding.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from fmsdata.cli.demo import write_corpus

HERE = Path(__file__).parent
STEPS, EVERY = 40, 10
CHAIN = ((2, 14), (4, 26), (3, None))  # ranks, and the step at which they are killed
TOLERANCE = 1e-4
POLL = 0.01  # seconds


@dataclass(frozen=True)
class Step:
    """One step in the log of a run."""

    step: int
    loss: float
    sha256: str
    world_size: int


class Failed(Exception):
    """The demo did not show what it promises."""


def train(ranks: int, folder: Path, data: Path, *options: str, kill_when: Callable[[], bool] | None = None) -> None:
    """Run the example to its end, or kill it when `kill_when` says so."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(HERE / "train.py")]
    command += ["--config", str(HERE.parent / "configs" / "train-demo.yaml"), "--data", str(data), "--out", str(folder)]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TMPDIR": str(folder.parent)}
    log = folder.with_suffix(".txt")
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [*command, *options],
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
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


def steps_of(folder: Path) -> list[Step]:
    """The steps in the log of a run so far."""
    try:
        lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]


def has_done(folder: Path, step: int) -> bool:
    return any(entry.step == step for entry in steps_of(folder))


def compare(chain: Sequence[Step], alone: Sequence[Step], console: Console) -> None:
    """Print both runs side by side, and raise if they differ."""
    for name, run in (("killed", chain), ("uninterrupted", alone)):
        if sorted({entry.step for entry in run}) != list(range(STEPS)):
            raise Failed(f"the {name} run did not do each of the steps 0 to {STEPS - 1}")
    expected = {entry.step: entry for entry in alone}
    table = Table(title="The losses, side by side", title_justify="left")
    for name in ("step", "ranks", "loss", "on 1 rank, uninterrupted", "difference", "same batch"):
        table.add_column(name, justify="right")
    for before, entry in zip([None, *chain], chain, strict=False):
        resumed = before is not None and entry.world_size != before.world_size
        if resumed:
            table.add_section()
        if resumed or entry.step % 5 == 0 or entry.step == STEPS - 1:
            other = expected[entry.step]
            same = "yes" if entry.sha256 == other.sha256 else "NO"
            difference = f"{abs(entry.loss - other.loss):.1e}"
            cells = str(entry.step), str(entry.world_size), f"{entry.loss:.6f}", f"{other.loss:.6f}"
            table.add_row(*cells, difference, same)
    console.print(table)

    again = len(chain) - STEPS
    if not again:
        raise Failed("no step was run twice, so nothing was killed between two checkpoints")
    wrong = sorted({entry.step for entry in chain if entry.sha256 != expected[entry.step].sha256})
    if wrong:
        raise Failed(f"steps {wrong} had a different batch than on 1 rank")
    largest = max(abs(entry.loss - expected[entry.step].loss) for entry in chain)
    console.print(
        f"{STEPS} steps, {again} of them run twice after a kill: every batch is the same, bit for bit. "
        f"The largest difference in loss is {largest:.1e}."
    )
    if not largest <= TOLERANCE:
        raise Failed(f"that is more than {TOLERANCE}")


def demo(console: Console) -> None:
    with temporary_folder() as folder:
        data, chain, alone = (folder / name for name in ("corpus", "chain", "alone"))
        options = "--steps", str(STEPS), "--every", str(EVERY)
        with console.status("building a corpus from the standard library"):
            write_corpus(data)
        for ranks, kill_at in CHAIN:
            kill_when = None if kill_at is None else partial(has_done, chain, kill_at)
            with console.status(f"training on {ranks} ranks"):
                train(ranks, chain, data, *options, kill_when=kill_when)
            done = [entry.step for entry in steps_of(chain) if entry.world_size == ranks]
            how = "finished" if kill_at is None else "killed with SIGKILL"
            console.print(f"{ranks} ranks: steps {done[0]} to {done[-1]}, {how}")
        with console.status("training on 1 rank, uninterrupted"):
            train(1, alone, data, *options)
        compare(steps_of(chain), steps_of(alone), console)
        console.print("[green]Killed twice, rescaled twice, and the training is the same.[/]")


def main() -> int:
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


if __name__ == "__main__":
    sys.exit(main())
