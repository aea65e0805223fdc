"""Rows per second of map-style rows, beside torch's DataLoader with a DistributedSampler.

    python benchmarks/rows.py [--rows 20000] [--rounds 5] [--batch 32]

Rows are dicts of two tensors, of 512 tokens: views of a tensor, which cost next to nothing; tokens that are
stored in 16 bits; and the same with a transform that draws from torch's generator. Both loaders take turns
in one process, for an epoch each, with 0 and 2 workers; the median of each counts. Workers are persistent,
and started before. Without workers, the time is that of the processor, which other programs disturb less.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fmsdata

LENGTH = 512


class Slices(Dataset[dict[str, torch.Tensor]]):
    """Rows that cost next to nothing: views of a tensor."""

    def __init__(self, rows: int) -> None:
        self._tokens = torch.randint(0, 50_000, (rows, LENGTH))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[row]
        return {"input_ids": tokens, "label": tokens[0]}


class Stored(Dataset[dict[str, torch.Tensor]]):
    """Rows as they are stored, in 16 bits, which become `input_ids` and `labels`."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.random.default_rng(0).integers(0, 50_000, (rows, LENGTH + 1), np.uint16)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._tokens[row].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Random(Stored):
    """The same, with a tenth of the tokens masked at random."""

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        fields = super().__getitem__(row)
        return {**fields, "input_ids": torch.where(torch.rand(LENGTH) < 0.1, 0, fields["input_ids"])}


def seconds(loader: Iterable[Any], clock: Callable[[], float]) -> float:
    start = clock()
    for _ in loader:
        pass
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    for kind in (Slices, Stored, Random):
        rows = kind(args.rows)
        for workers in (0, 2):
            theirs: Any = DataLoader(
                rows,
                batch_size=args.batch,
                sampler=DistributedSampler(rows, num_replicas=1, rank=0, seed=0, drop_last=True),
                num_workers=workers,
                persistent_workers=workers > 0,
                drop_last=True,
            )
            sampler = fmsdata.EpochSampler(rows, global_batch=args.batch, rank=0, world_size=1)
            ours = fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=args.batch, num_workers=workers)
            clock = time.perf_counter if workers else time.thread_time
            times: dict[str, list[float]] = {"torch": [], "fmsdata": []}
            for _ in range(args.rounds + 1):
                times["torch"].append(seconds(theirs, clock))
                times["fmsdata"].append(seconds(ours, clock))
            rates = {name: args.rows / median(found[1:]) for name, found in times.items()}  # without the start
            print(
                f"{kind.__name__:8} {workers} workers: torch {rates['torch']:9,.0f} rows/s, "
                f"fmsdata {rates['fmsdata']:9,.0f} rows/s, ratio {rates['fmsdata'] / rates['torch']:.2f}",
                flush=True,
            )
            ours.close()
            del theirs


if __name__ == "__main__":
    main()
