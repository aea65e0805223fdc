"""Decoding speed of fetched byte ranges, compared with the same file mapped: MB of tokens per second.

    python benchmarks/ranges.py [--tokens 4194304]

Blocks have 2^18 tokens, as the reader cuts them. The bytes are already in memory, so this is what a
worker pays per block on top of fetching it: finding the documents in the bytes. The two ways alternate
in one process, and the best of all rounds counts for each block, because timings on shared machines
are noisy.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.tokens import Tokens
from fmsdata.corpus.shard_writer import Layout, write_shard
from fmsdata.formats import open_shard, read_layout
from fmsdata.formats.base import Layout as Ranges
from fmsdata.formats.base import read_from
from fmsdata.stages.shard_reader import BLOCK_TOKENS
from fmsdata.storage.mapped import MappedFile


def seconds(read: Callable[[int, int], Any], bounds: list[int]) -> list[float]:
    """The time that each block takes."""
    times = []
    for first, stop in pairwise(bounds):
        start = time.perf_counter()
        read(first, stop)
        times.append(time.perf_counter() - start)
    return times


def read_block(data: bytes, layout: Ranges, first: int, stop: int) -> Block[Tokens]:
    return read_from(data, layout.block(first, stop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    layouts: tuple[Layout, ...] = ("batch", "list")
    print("layout  type    document   ranges MB/s (us a block)   mapped MB/s (us a block)")
    for layout in layouts:
        for dtype in (np.uint16, np.int32):
            for mean in (100, 1000, 10_000):
                lengths = np.maximum(1, rng.exponential(mean, args.tokens // mean)).astype(int)
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "part-0.arrow"
                    write_shard(path, (np.arange(n) % 50_000 for n in lengths), dtype=dtype, layout=layout)
                    data = path.read_bytes()
                    mapped = open_shard(MappedFile(path), str(path))
                per_block = max(1, BLOCK_TOKENS // mean)
                bounds = [*range(0, len(lengths), per_block), len(lengths)]
                ranges = read_from(data, read_layout("part-0.arrow", len(data), None, bounds))
                fetched = partial(read_block, data, ranges)
                rounds = [(seconds(fetched, bounds), seconds(mapped.read, bounds)) for _ in range(args.rounds)]
                best = np.array(rounds).min(axis=0).sum(axis=1).tolist()
                size = int(lengths.sum()) * np.dtype(dtype).itemsize / 1e6
                figures = [f"{size / total:10.0f} ({total / (len(bounds) - 1) * 1e6:.0f})" for total in best]
                print(f"{layout:7} {np.dtype(dtype).name:7} {mean:8} {figures[0]:>26} {figures[1]:>26}")


if __name__ == "__main__":
    main()
