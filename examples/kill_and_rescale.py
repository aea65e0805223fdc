"""Kills a training run twice, resumes on other numbers of ranks, and compares it with an uninterrupted run.

It starts examples/train.py under torchrun on 2 ranks, kills all processes in the middle, resumes on 4
ranks, kills them again, and lets 3 ranks finish. Every step must have the same batch as on 1 rank, and
the same loss up to rounding.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from processes import HERE, Failed, entries, has_done, run_demo, temporary_folder, torchrun
from rich.console import Console
from rich.table import Table

from fmsdata.cli.demo import write_corpus

CONFIG = HERE.parent / "configs" / "train-demo.yaml"
STEPS, EVERY = 40, 10
CHAIN = ((2, 14), (4, 26), (3, None))  # ranks, and the step at which they are killed
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Step:
    """One step in the log of a run."""

    step: int
    loss: float
    sha256: str
    world_size: int
    evaluation: float | None = None  # the loss of the held-out set, if it was evaluated after this step


def train(ranks: int, folder: Path, data: Path, *options: str, kill_when: Callable[[], bool] | None = None) -> None:
    """Run the example to its end, or kill it when `kill_when` says so."""
    torchrun(ranks, "train.py", folder, "--config", CONFIG, "--data", data, *options, kill_when=kill_when)


def steps_of(folder: Path) -> list[Step]:
    """The steps in the log of a run so far."""
    return [Step(**entry) for entry in entries(folder)]


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
    if any((entry.evaluation is None) != (expected[entry.step].evaluation is None) for entry in chain):
        raise Failed("it was evaluated at other steps than on 1 rank")
    losses = [(entry.loss, expected[entry.step].loss) for entry in chain]
    losses += [(entry.evaluation or 0, expected[entry.step].evaluation or 0) for entry in chain]
    largest = max(abs(loss - other) for loss, other in losses)
    console.print(
        f"{STEPS} steps, {again} of them run twice after a kill: every batch is the same, bit for bit. "
        f"The largest difference in loss, of training and evaluation, is {largest:.1e}."
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


if __name__ == "__main__":
    sys.exit(run_demo(demo))
