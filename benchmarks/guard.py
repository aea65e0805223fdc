"""A quick look at speed: how much of a plain copy the loader reaches, beside what it reached before.

    python benchmarks/guard.py [--record]

For each setup it measures the processor time of a batch and of a streaming copy of as many tokens, in turns in
one process, and prints the ratio of their means. (Medians would leave out what is planned in few of the slices.)
Processor time is used since other programs disturb it less than the clock. It fails only below half of the ratio
in `guard.json`, which `--record` writes: a machine may well be a third slower than another for reasons of its own,
and half is a change that somebody made.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

import fmsdata

BATCH, LENGTH, TOKENS = 8, 4096, 12_000_000
SOURCES = {"web": 70, "code": 20, "wiki": 10}
SETUPS: dict[str, dict[str, Any]] = {
    "192 lanes, the default": {"lanes": 192},
    "4 lanes, the default": {"lanes": 4},
    "4 lanes, no thread": {"lanes": 4, "loader.prefetch": 0},
    "4 lanes, 1 worker": {"lanes": 4, "loader.num_workers": 1},
}
SLICES, STEPS, WARM_UP = 12, 200, 600
RECORDED = Path(__file__).with_suffix(".json")


def write_corpus(root: Path) -> None:
    rng = np.random.default_rng(0)
    for source, weight in SOURCES.items():
        for shard in range(2):
            lengths = (rng.lognormal(-0.32, 0.8, TOKENS * weight // 200_000) * 1000).astype(np.int64) + 1
            tokens = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
            documents = np.split(tokens, np.cumsum(lengths)[:-1])
            fmsdata.write_shard(root / source / f"{shard}.arrow", documents, dtype=np.uint16)


def open_loader(root: Path, overrides: dict[str, Any]) -> fmsdata.StatefulDataLoader:
    config = {
        "path": str(root),
        "sources": {name: {"weight": weight} for name, weight in SOURCES.items()},
        "documents": {"eos": 0},
        "pack": {"seq_len": LENGTH},
        "loader": {"batch_size": BATCH},
    }
    return fmsdata.build_loader(config, overrides, rank=0, world_size=1)


def processor_seconds() -> float:
    """Of this process and of its workers."""
    workers = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in workers)


def seconds_of_copies(source: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    began = time.process_time()
    for at in range(0, len(source), BATCH * LENGTH):
        batch = np.empty(BATCH * LENGTH, np.int64)
        batch[:] = source[at : at + BATCH * LENGTH]
    return (time.process_time() - began) / (len(source) // (BATCH * LENGTH))


def seconds_of_batches(batches: Iterator[Any]) -> float:
    began = processor_seconds()
    for _ in range(STEPS):
        next(batches)
    return (processor_seconds() - began) / STEPS


def measure(root: Path) -> dict[str, float]:
    """The ratio of each setup."""
    source = np.ones(BATCH * LENGTH * 200, np.int64)
    ratios = {}
    for name, overrides in SETUPS.items():
        loader = open_loader(root, overrides)
        batches = iter(loader)
        for _ in range(WARM_UP):
            next(batches)
        pairs = [(seconds_of_copies(source), seconds_of_batches(batches)) for _ in range(SLICES)]
        copies, made = (fmean(column) for column in zip(*pairs, strict=True))
        ratios[name] = round(copies / made, 3)
        loader.close()
    return ratios


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        ratios = measure(Path(folder))
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(ratios, indent=2) + "\n")
    recorded: dict[str, float] = json.loads(RECORDED.read_text())
    print("part of a plain copy, by processor time (recorded before):")
    for name, ratio in ratios.items():
        print(f"  {name:24} {ratio:.3f} ({recorded[name]:.3f})")
    if slow := [name for name, ratio in ratios.items() if ratio < recorded[name] / 2]:
        sys.exit(f"less than half of what was recorded: {', '.join(slow)}; profile it, or record it with --record")


if __name__ == "__main__":
    main()
