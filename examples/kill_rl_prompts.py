"""Kills an RL run with prompts in flight, resumes on other ranks, and compares it with an uninterrupted run.

It starts examples/rl_prompts.py under torchrun on 2 ranks, kills all processes in the middle of an
epoch, and lets 3 ranks finish. Every batch must have the prompts that it has on 1 rank, and the same
prompts must be mastered in it.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from processes import Failed, entries, has_done, run_demo, temporary_folder, torchrun
from rich.console import Console

CHAIN = ((2, 15), (3, None))  # ranks, and the step at which they are killed
SAME = ("epoch", "prompts", "mastered")


def compare(chain: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> str:
    """What both runs have in common. Raises if they differ."""
    expected = {entry["step"]: entry for entry in alone}
    if {entry["step"] for entry in chain} != set(expected):
        raise Failed(f"the killed run has {chain[-1]['step'] + 1} steps, and the one on 1 rank {len(expected)}")
    again = len(chain) - len(expected)
    if again <= 0:
        raise Failed("no step was run twice, so nothing was killed between two checkpoints")
    for entry in chain:
        for name in SAME:
            if entry[name] != expected[entry["step"]][name]:
                raise Failed(f"step {entry['step']} has other {name} than on 1 rank")
    return (
        f"{len(expected)} batches in {alone[-1]['epoch'] + 1} epochs, {again} of them trained twice after the kill: "
        "the same prompts in each, and the same ones mastered, as on 1 rank, uninterrupted."
    )


def demo(console: Console) -> None:
    with temporary_folder() as folder:
        runs: dict[str, Path] = {name: folder / name for name in ("chain", "alone")}
        for ranks, kill_at in CHAIN:
            kill_when = None if kill_at is None else partial(has_done, runs["chain"], kill_at)
            with console.status(f"training on {ranks} ranks"):
                seconds = "0" if kill_at is None else "0.2"  # time to kill it between two checkpoints
                torchrun(ranks, "rl_prompts.py", runs["chain"], "--seconds", seconds, kill_when=kill_when)
            done = [entry for entry in entries(runs["chain"]) if entry["ranks"] == ranks]
            how = "all prompts mastered" if kill_at is None else f"killed with {done[-1]['in_flight']} more in flight"
            console.print(f"{ranks} ranks: batches {done[0]['step']} to {done[-1]['step']} trained, {how}")
        with console.status("training on 1 rank, uninterrupted"):
            torchrun(1, "rl_prompts.py", runs["alone"], "--seconds", "0")
        console.print(compare(entries(runs["chain"]), entries(runs["alone"])))
        console.print("[green]Killed and rescaled, and no prompt was lost, repeated or brought back.[/]")


if __name__ == "__main__":
    sys.exit(run_demo(demo))
