"""Places used and tokens per second of best-fit packing beside `split`, and tokens lost by cropping.

    python benchmarks/packing.py [--tokens 60000000] [--rounds 9] [--mean 1000]

Documents have lognormal lengths (sigma 1). `split` and `bestfit` take turns in one process, first the
packing stage alone over the same mixture, which reads no tokens of most documents, then the whole
loader up to batches; the median of each counts. Both have BOS and EOS around each document.

"crop from a buffer" is a simulation of a common way to align lines with BOS: of a buffer of 1,000
documents, the longest that fits goes into the line; when none fits, the shortest is cut to fill the
line and its rest is thrown away. Only lengths are simulated.
"""

import argparse
import tempfile
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fmsdata
from fmsdata.corpus.shard_writer import write_shard

BOS, EOS, PAD = 1, 2, 0
LENGTHS = (1024, 2048, 8192)
BUFFER = 1000  # documents
OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"mode": "split"},
    "bestfit": {"mode": "bestfit", "bol": BOS, "pad": PAD},
    "bestfit, crop": {"mode": "bestfit", "bol": BOS, "crop": True},
}


def write_corpus(root: Path, tokens: int, mean: int) -> None:
    rng = np.random.default_rng(0)
    for shard in range(4):
        lengths = rng.lognormal(np.log(mean) - 0.5, 1, max(10, tokens // 4 // mean)).astype(np.int64) + 1
        pool = rng.integers(10, 50_000, int(lengths.sum()), dtype=np.uint16)
        write_shard(root / "web" / f"{shard}.arrow", np.split(pool, np.cumsum(lengths)[:-1]), dtype=np.uint16)


def lines(root: Path, seq_len: int, options: dict[str, Any]) -> fmsdata.Pack:
    mixture = fmsdata.Mixture({"web": fmsdata.ShardReader(root / "web")}, {"web": 1})
    return fmsdata.Pack(fmsdata.Delimit(mixture, bos=BOS, eos=EOS), seq_len=seq_len + 1, **options)


def packing(root: Path, seq_len: int, options: dict[str, Any]) -> Callable[[], tuple[float, float, float]]:
    """A round of the packing stage alone: tokens per second, places used, and tokens thrown away."""
    stage = lines(root, seq_len, options)

    def run() -> tuple[float, float, float]:
        iterator, places, padding = stage.open(fmsdata.Lane()), 0, 0
        start = time.perf_counter()
        while places < 20_000_000:
            chunk = iterator.read()
            places += len(chunk) * chunk.line_length
            padding += sum(chunk.padding)
        seconds = time.perf_counter() - start
        cropped = iterator.state(len(chunk)).get("cropped", 0)
        return places / seconds, 1 - padding / places, cropped / (places - padding + cropped)

    return run


def loading(root: Path, seq_len: int, options: dict[str, Any]) -> Callable[[], float]:
    """A round of the whole loader: tokens per second."""
    data = fmsdata.Rescalable(fmsdata.Shuffle(lines(root, seq_len, options), window=512), lanes=2, seed=0)
    batch = 8 * 8192 // seq_len
    loader = fmsdata.StatefulDataLoader(data, batch_size=batch, prefetch=0, rank=0, world_size=1)
    batches = iter(loader)
    steps = 20_000_000 // (batch * seq_len)

    def run() -> float:
        start = time.perf_counter()
        tokens: int = sum(fields["input_ids"].numel() for fields in islice(batches, steps))
        return tokens / (time.perf_counter() - start)

    return run


def lost_by_cropping(root: Path, line: int, rows: int = 20_000_000) -> float:
    """The part of the tokens that cropping from a buffer throws away."""
    iterator = fmsdata.Delimit(fmsdata.ShardReader(root / "web"), bos=BOS, eos=EOS).open(fmsdata.Lane())
    waiting: list[int] = []
    buffer: list[int] = []  # lengths, sorted
    used = lost = 0
    for _ in range(rows // line):
        room = line
        while room:
            while len(buffer) < BUFFER:
                if not waiting:
                    waiting = iterator.read().lengths().tolist()
                insort(buffer, waiting.pop())
            fitting = bisect_right(buffer, room)
            length = buffer.pop(fitting - 1 if fitting else 0)
            taken = min(length, room)
            used, lost, room = used + taken, lost + length - taken, room - taken
    return lost / (used + lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mean", type=int, default=1000, help="mean tokens of a document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_corpus(root, args.tokens, args.mean)
        for seq_len in LENGTHS:
            packs = {name: packing(root, seq_len, options) for name, options in OPTIONS.items()}
            loads = {name: loading(root, seq_len, options) for name, options in OPTIONS.items()}
            for load in loads.values():
                load()
            packed = {name: [] for name in OPTIONS}  # type: dict[str, list[tuple[float, float, float]]]
            loaded = {name: [] for name in OPTIONS}  # type: dict[str, list[float]]
            for _ in range(args.rounds):
                for name in OPTIONS:
                    packed[name].append(packs[name]())
                    loaded[name].append(loads[name]())
            split = median(rate for rate, _, _ in packed["split"]), median(loaded["split"])
            for name in OPTIONS:
                rate = median(one[0] for one in packed[name]), median(loaded[name])
                _, used, lost = packed[name][0]
                print(
                    f"{seq_len:5} {name:14} {used:8.3%} of places used, {lost:7.3%} thrown away; "
                    f"packing {rate[0] / 1e6:7.0f} M tokens/s ({rate[0] / split[0]:.2f} of split), "
                    f"loader {rate[1] / 1e6:6.0f} M tokens/s ({rate[1] / split[1]:.2f} of split)"
                )
            print(f"{seq_len:5} crop from a buffer: {lost_by_cropping(root, seq_len + 1):.1%} thrown away")


if __name__ == "__main__":
    main()
