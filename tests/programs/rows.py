"""A rank that reads map-style rows.

`rows.py saving FOLDER`: with RANK and WORLD_SIZE, trains and writes what it got and its state after
each step, until it is killed. `rows.py collectives FOLDER`: under torchrun, makes a collective call
in each step of three epochs of uneven rows, and writes what it got.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fmsdata
from tests.epochs.helpers import Rows, samples

ROWS, GLOBAL_BATCH, SEED = 37, 4, 11
EXCLUDED_AT, EXCLUDED = 2, [3, 5, 20, 36]


def loader(rows: int, global_batch: int, **options: Any) -> fmsdata.StatefulDataLoader:
    data = Rows(rows)
    sampler = fmsdata.EpochSampler(data, global_batch=global_batch, seed=SEED, drop_last=False)
    return fmsdata.StatefulDataLoader(
        data, sampler=sampler, batch_size=global_batch // sampler.world_size, **options
    )  # fmt: skip


def saving(folder: Path) -> None:
    rows = loader(ROWS, GLOBAL_BATCH, num_workers=1)
    for step in range(10_000):
        if step == EXCLUDED_AT:
            rows.sampler.exclude(EXCLUDED)
        got = samples(next(rows))
        path = folder / f"{step}-{rows.rank}.json"
        path.with_suffix(".part").write_text(json.dumps({"got": got, "state": rows.state_dict()}))
        path.with_suffix(".part").replace(path)
        time.sleep(0.05)


def collectives(folder: Path) -> None:
    dist.init_process_group("gloo")
    rows = loader(10, 6)
    sampler: fmsdata.EpochSampler = rows.sampler
    got: list[Any] = []
    for epoch in range(3):
        for batch in rows:
            step = torch.tensor([len(got)])
            dist.all_reduce(step)
            assert int(step) == len(got) * rows.world_size
            got.append(samples(batch))
        sampler.exclude([epoch])
    state = rows.state_dict(gather=True)
    if rows.rank == 1:
        sampler.exclude([7])
    try:
        rows.state_dict(gather=True)
        error = "none"
    except fmsdata.StateError as failure:
        error = str(failure)
    (folder / f"{rows.rank}.json").write_text(json.dumps({"got": got, "state": state, "error": error}))
    dist.destroy_process_group()


if __name__ == "__main__":
    {"saving": saving, "collectives": collectives}[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)
