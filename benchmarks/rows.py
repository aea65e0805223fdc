"""Rows per second of map-style rows, beside torch's DataLoader with a DistributedSampler.

    python benchmarks/rows.py [--rows 20000] [--rounds 5] [--batch 32]

Rows are dicts of two tensors, `tokens` of int64 and a label, of three kinds: 16 tokens, 512 tokens, and
512 tokens with a transform that draws from torch's generator. Both loaders take turns in one process, for
an epoch each, with 0 and 2 workers; the median of each counts. Workers are persistent, and started before.
"""

import argparse
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fmsdata


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int, length: int, random: bool) -> None:
        self._tokens = torch.randint(0, 50_000, (rows, length))
        self._random = random

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[row]
        if self._random:
            tokens = torch.where(torch.rand(len(tokens)) < 0.1, 0, tokens)
        return {"tokens": tokens, "label": tokens[0]}


def seconds(loader: Iterable[Any]) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    for length, random in ((16, False), (512, False), (512, True)):
        rows = Tokens(args.rows, length, random)
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
            times: dict[str, list[float]] = {"torch": [], "fmsdata": []}
            for _ in range(args.rounds + 1):
                times["torch"].append(seconds(theirs))
                times["fmsdata"].append(seconds(ours))
            rates = {name: args.rows / median(found[1:]) for name, found in times.items()}  # without the start
            what = f"{length} tokens" + (", random" if random else "")
            print(
                f"{what:20} {workers} workers: torch {rates['torch']:9,.0f} rows/s, "
                f"fmsdata {rates['fmsdata']:9,.0f} rows/s, ratio {rates['fmsdata'] / rates['torch']:.2f}",
                flush=True,
            )
            ours.close()
            del theirs


if __name__ == "__main__":
    main()
