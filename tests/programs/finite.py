"""Passes of an uneven corpus, in which every rank makes a collective call at each step. Started by torchrun.

`finite.py CONFIG OUTPUT` reads a pass in each packing mode, with and without workers, stops in the middle and
resumes; then trains and evaluates in turn. What rank 0 knows of all ranks goes to OUTPUT.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fmsdata

MODES: dict[str, dict[str, Any]] = {
    "split": {},
    "pad": {"pack.mode": "pad", "pack.pad": 1},
    "bestfit": {"pack.mode": "bestfit", "pack.pad": 1, "pack.bol": 2},
}


def together(batch: dict[str, Any]) -> list[int]:
    """Of all ranks: the rows in a batch that are samples, and one for each rank."""
    sums = torch.tensor([int((~batch["is_padding"]).sum()), 1])
    dist.all_reduce(sums)
    counts: list[int] = sums.tolist()
    return counts


def main() -> None:
    config, output = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for mode, options in MODES.items():
        for workers in (0, 2) if mode == "split" else (0,):
            loader = fmsdata.build_loader(config, {**options, "epochs": 1, "loader.num_workers": workers})
            steps = [together(next(loader)) for _ in range(3)]
            state = loader.state_dict(gather=True)
            loader.close()
            loader = fmsdata.build_loader(config, {**options, "epochs": 1})
            loader.load_state_dict(state)
            steps += [together(batch) for batch in loader]
            found[f"{mode}-{workers}"] = {"steps": steps, "length": len(loader), "samples": sum(loader.pass_lines)}
    endless = fmsdata.build_loader(config)
    evaluation = fmsdata.build_loader(config, {"evaluation": True, "loader.num_workers": 1})
    found["evaluations"] = []
    for _ in range(2):
        next(endless)
        found["evaluations"].append([together(batch) for batch in evaluation])
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found))
    endless.close()
    evaluation.close()
    dist.barrier()
    os._exit(0)  # destroying a group waits forever for a gloo thread that needs the interpreter to drop a tensor


if __name__ == "__main__":
    main()
