"""Tokens per second of the whole pipeline in one process, as a fraction of copying the same tokens into batches.

    python benchmarks/pipeline.py [--tokens 150000000] [--document 550] [--profile]

The copy is the fastest way to fill the same batches: one streaming copy per batch from one array in memory
into a new int64 array. Pipeline and copy take turns in the same process, and the median of each counts,
because timings on shared machines are noisy. A round of the pipeline has enough steps to use up the window
of every lane once, so that each round does all of the work.

A batch of the pipeline is two tensors, input_ids and labels; "copy twice" copies into two. One rank of a
large run has about four lanes. With more lanes, a corpus as small as this one is cut into smaller blocks
than a real one would be.
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fmsdata
from fmsdata.corpus.shard_writer import Layout, write_shard

BATCH, LENGTH, WINDOW, COPIES = 8, 4096, 256, 500
WEIGHTS = {"web": 70, "books": 20, "code": 9, "wiki": 1}
MEAN_LENGTHS = {"web": 700, "books": 20_000, "code": 1200, "wiki": 600}  # tokens, typical of such corpora


def write_corpus(root: Path, layout: Layout, tokens: int, document: int | None) -> None:
    """Four sources of four shards, with documents of typical lengths, or of `document` tokens on average."""
    rng = np.random.default_rng(0)
    for source, weight in WEIGHTS.items():
        for shard in range(4):
            mean = document or MEAN_LENGTHS[source]
            count = max(100, tokens * weight // 100 // 4 // mean)
            lengths = (rng.lognormal(-0.32, 0.8, count) * mean).astype(np.int64) + 1
            pool = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
            documents = np.split(pool, np.cumsum(lengths)[:-1])
            write_shard(root / source / f"{shard}.arrow", documents, dtype=np.uint16, layout=layout)


def config(root: Path, lanes: int) -> dict[str, Any]:
    return {
        "path": str(root),
        "sources": {name: {"weight": weight} for name, weight in WEIGHTS.items()},
        "documents": {"eos": 0},
        "pack": {"seq_len": LENGTH},
        "shuffle": {"window": WINDOW},
        "lanes": lanes,
        "loader": {"batch_size": BATCH},
    }


def open_loader(root: Path, lanes: int) -> fmsdata.StatefulDataLoader:
    """Without a thread that would read ahead while the copy has its turn."""
    return fmsdata.build_loader(config(root, lanes), {"loader.prefetch": 0}, rank=0, world_size=1)


def copy_speed(dtype: Any, tensors: int = 1) -> float:
    """Tokens per second of a streaming copy from one array of this type into new int64 batches."""
    size = BATCH * LENGTH
    source = np.ones(size * COPIES, dtype)
    start = time.perf_counter()
    for step in range(COPIES):
        for _ in range(tensors):
            batch = np.empty(size, np.int64)
            batch[:] = source[step * size : (step + 1) * size]
    return size * COPIES / (time.perf_counter() - start)


def pipeline_speed(batches: Iterator[dict[str, Any]], steps: int) -> float:
    start = time.perf_counter()
    tokens: int = sum(next(batches)["input_ids"].numel() for _ in range(steps))
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150_000_000)
    parser.add_argument("--document", type=int, help="mean tokens of a document, in all sources")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layouts: tuple[Layout, ...] = ("list", "batch")
        loaders = {}
        for layout in layouts:
            write_corpus(Path(folder) / layout, layout, args.tokens, args.document)
            loaders[layout] = iter(open_loader(Path(folder) / layout, args.lanes))
        speeds: dict[str, list[float]] = {name: [] for name in ("copy int64", "copy twice", "list", "batch")}
        for layout in layouts:
            for _ in range(4):  # the first windows, and page faults of a cold map, are start-up
                pipeline_speed(loaders[layout], args.lanes * WINDOW // BATCH)
        for _ in range(args.rounds):
            speeds["copy int64"].append(copy_speed(np.int64))
            speeds["copy twice"].append(copy_speed(np.int64, tensors=2))
            for layout in layouts:
                speeds[layout].append(pipeline_speed(loaders[layout], args.lanes * WINDOW // BATCH))
        for name, rates in speeds.items():
            usual, best = (statistic(rates) / statistic(speeds["copy int64"]) for statistic in (median, max))
            print(
                f"{name:12} {median(rates) / 1e6:8.1f} M tokens/s, {usual:.3f} of the copy (best of each: {best:.3f})"
            )
        if args.profile:
            for layout in layouts:
                profile = cProfile.Profile()
                profile.runcall(pipeline_speed, loaders[layout], args.lanes * WINDOW // BATCH)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
