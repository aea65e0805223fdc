"""Tokens per second of text that is tokenized on the fly, memory, and the longest wait of a trainer.

    python benchmarks/tokenizing.py [--seconds 10] [--lanes 24] [--rate 100000]

The texts are those of Python's standard library, cut into documents of 200 to 6,000 characters, as
JSON lines in 8 files. A byte-level BPE tokenizer with 8,000 tokens is trained on a part of them.

First, the library's own speed: `encode_batch` of all texts in one call. Then loaders with 0, 1 and 2
workers, in turn with it, in the same process. Their first windows are left out. Tokens per second of
CPU time, of all processes together, are less noisy on a machine that others use too.

Then a trainer that takes a batch of 10,000 tokens every 100 ms (`--rate` is tokens a second): how
long its longest wait for a batch is, and how many steps waited longer than 10 ms, after a warm-up of
20 steps. Peak memory is that of each process and its children, measured in processes of their own.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

import fmsdata

SEQ_LEN = 2048
EOS = 0
SHARDS = 8


class Speed(NamedTuple):
    """Tokens per second, and per second of CPU time."""

    wall: float
    cpu: float


def texts() -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    whole = "".join(path.read_text(errors="ignore") for path in paths[::2])
    cuts = np.cumsum(np.random.default_rng(0).integers(200, 6000, len(whole) // 3000))
    return [whole[begin:end] for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]


def write_corpus(root: Path) -> list[str]:
    documents = texts()
    for shard in range(SHARDS):
        path = root / "web" / f"part-{shard}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[shard::SHARDS]))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents[::6], trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    return documents


def pipeline(root: Path, lanes: int) -> fmsdata.Rescalable:
    source = fmsdata.Tokenize(fmsdata.ShardReader(root / "web"), root / "tokenizer.json")
    mix = fmsdata.Delimit(fmsdata.Mixture({"web": source}, {"web": 1}), eos=EOS)
    return fmsdata.Rescalable(fmsdata.Shuffle(fmsdata.Pack(mix, seq_len=SEQ_LEN + 1)), lanes=lanes, seed=0)


def cpu_seconds() -> float:
    """CPU time of this process and its workers."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def timed(seconds: float, tokens_of_next: Callable[[], int]) -> Speed:
    start = time.perf_counter()
    while time.perf_counter() < start + seconds / 4:  # what was made while others had their turn does not count
        tokens_of_next()
    start, cpu, tokens = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < start + seconds:
        tokens += tokens_of_next()
    return Speed(tokens / (time.perf_counter() - start), tokens / (cpu_seconds() - cpu))


def library_speed(root: Path, documents: list[str]) -> Callable[[float], Speed]:
    tokenizer = tokenizers.Tokenizer.from_file(str(root / "tokenizer.json"))

    def encode() -> int:
        return sum(map(len, tokenizer.encode_batch(documents[:1000], add_special_tokens=False)))

    return lambda seconds: timed(seconds, encode)


def loader_speed(root: Path, lanes: int, workers: int) -> Callable[[float], Speed]:
    loader = fmsdata.StatefulDataLoader(pipeline(root, lanes), batch_size=8, num_workers=workers, rank=0, world_size=1)
    batches: Iterator[dict[str, Any]] = iter(loader)
    for _ in range(60):
        next(batches)

    return lambda seconds: timed(seconds, lambda: next(batches)["input_ids"].numel())


def paced_trainer(root: Path, lanes: int, workers: int, rate: int, seconds: float) -> dict[str, float]:
    """Take a batch every 100 ms, as a trainer does, and measure the waits."""
    rows = max(1, round(rate / 10 / SEQ_LEN))
    step = rows * SEQ_LEN / rate
    began = time.perf_counter()
    loader = fmsdata.StatefulDataLoader(
        pipeline(root, lanes), batch_size=rows, num_workers=workers, rank=0, world_size=1
    )
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    waits = []
    for _ in range(int(seconds / step)):
        time.sleep(step)
        start = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - start)
    steady = waits[20:]
    shuffle: Any = loader.data.lines
    return {
        "window": shuffle.window,
        "windows": len(waits) * rows / lanes / shuffle.window,
        "first": first,
        "longest": max(steady),
        "late": sum(wait > 0.01 for wait in steady),
        "steps": len(steady),
    }


def peak_memory() -> float:
    """MB of this process and of the largest of its children so far."""
    return sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1e3


def _apart(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Run a function in a process of its own, and return its result and its peak memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (function, *args))


def _measured(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    result = function(*args)
    return result, peak_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--lanes", type=int, default=24)
    parser.add_argument("--rate", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        documents = write_corpus(root)
        size = sum(len(text.encode()) for text in documents)
        print(f"{len(documents):,} documents, {size / 1e6:.1f} MB of text, {os.cpu_count()} cores, {args.lanes} lanes")
        runs = {"encode_batch": library_speed(root, documents)}
        runs |= {f"{workers} workers": loader_speed(root, args.lanes, workers) for workers in args.workers}
        speeds: dict[str, list[Speed]] = {name: [] for name in runs}
        for _ in range(3):
            for name, run in runs.items():
                speeds[name].append(run(args.seconds / 3))
        own = Speed(*(median(values) for values in zip(*speeds["encode_batch"], strict=True)))
        for name, measured in speeds.items():
            wall, cpu = (median(values) for values in zip(*measured, strict=True))
            print(
                f"{name:13} {wall:>10,.0f} tokens/s, {wall / own.wall:.2f} of the library; "
                f"{cpu:>10,.0f} per second of CPU time, {cpu / own.cpu:.2f} of the library"
            )
        del runs
        for workers in args.workers:
            found, memory = _apart(paced_trainer, root, args.lanes, workers, args.rate, args.seconds)
            print(
                f"{workers} workers, {args.rate:,} tokens/s: first batch after {found['first']:.2f} s, longest wait "
                f"{1000 * found['longest']:.0f} ms, {found['late']} of {found['steps']} steps waited above 10 ms, "
                f"{found['windows']:.1f} windows of {found['window']} lines, {memory:,.0f} MB at most"
            )


if __name__ == "__main__":
    main()
