"""Kills a training run twice, goes on with other numbers of ranks, and compares it with a run that was left alone.

It starts examples/train.py under torchrun on 2 ranks, kills all of it in the middle, goes on with 4, kills it again,
and lets 3 finish. Every step must have had the very batch that it has on 1 rank, and the same loss but for rounding.
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
    """What a run tells of one step."""

    step: int
    loss: float
    sha256: str
    world_size: int


class Failed(Exception):
    """The demo did not show what it promises."""


def train(ranks: int, folder: Path, data: Path, *options: str, kill_when: Callable[[], bool] | None = None) -> None:
    """Run the example to its end, or kill it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(HERE / "train.py")]
    command += ["--config", str(HERE.parent / "configs" / "train-demo.yaml"), "--data", str(data), "--out", str(folder)]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TMPDIR": str(folder.parent)}
    told = folder.with_suffix(".txt")
    with told.open("w") as output:
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
        raise Failed(f"the run on {ranks} ranks ended with code {launcher.returncode}:\n{told.read_text()[-3000:]}")


def kill(launcher: subprocess.Popen[bytes]) -> None:
    """SIGKILL for torchrun and its ranks, which have sessions of their own. No one gets to finish anything."""
    with undisturbed(), suppress(psutil.NoSuchProcess):
        parent = psutil.Process(launcher.pid)
        parent.suspend()  # so that it starts no more of them meanwhile
        everyone = [parent, *parent.children(recursive=True)]
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone, timeout=10)
    launcher.wait()


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is inside is not left half done if someone presses Ctrl-C once more."""
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
    """All that a run has told so far."""
    try:
        lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]


def has_done(folder: Path, step: int) -> bool:
    return any(one.step == step for one in steps_of(folder))


def compare(chain: Sequence[Step], alone: Sequence[Step], console: Console) -> None:
    """Show both runs side by side, and raise if they are not the same."""
    for name, run in (("killed", chain), ("left alone", alone)):
        if sorted({one.step for one in run}) != list(range(STEPS)):
            raise Failed(f"the run that was {name} did not do each of the steps 0 to {STEPS - 1}")
    expected = {one.step: one for one in alone}
    table = Table(title="The losses, side by side", title_justify="left")
    for name in ("step", "ranks", "loss", "on 1 rank, left alone", "difference", "the same batch"):
        table.add_column(name, justify="right")
    for before, one in zip([None, *chain], chain, strict=False):
        goes_on = before is not None and one.world_size != before.world_size
        if goes_on:
            table.add_section()
        if goes_on or one.step % 5 == 0 or one.step == STEPS - 1:
            other = expected[one.step]
            same = "yes" if one.sha256 == other.sha256 else "NO"
            difference = f"{abs(one.loss - other.loss):.1e}"
            table.add_row(str(one.step), str(one.world_size), f"{one.loss:.6f}", f"{other.loss:.6f}", difference, same)
    console.print(table)

    again = len(chain) - STEPS
    if not again:
        raise Failed("no step was run twice, so nothing was killed between two checkpoints")
    wrong = sorted({one.step for one in chain if one.sha256 != expected[one.step].sha256})
    if wrong:
        raise Failed(f"steps {wrong} had another batch than on 1 rank")
    largest = max(abs(one.loss - expected[one.step].loss) for one in chain)
    console.print(
        f"{STEPS} steps, {again} of them run twice after a kill: every batch is the same, bit for bit. "
        f"The largest difference of a loss is {largest:.1e}."
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
            done = [one.step for one in steps_of(chain) if one.world_size == ranks]
            how = "finished" if kill_at is None else "killed with SIGKILL"
            console.print(f"{ranks} ranks: steps {done[0]} to {done[-1]}, {how}")
        with console.status("training on 1 rank, left alone"):
            train(1, alone, data, *options)
        compare(steps_of(chain), steps_of(alone), console)
        console.print("[green]Killed twice, rescaled twice, and the same training.[/]")


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
