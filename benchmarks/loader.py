"""What worker processes, states and checkpoints cost.

Speeds are compared with torch's own queue, through which one worker process sends either the same
batches (`input_ids` and `labels`) or, as the least that can be sent, a tensor with the tokens that
was not even read from anywhere. All setups take turns.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pipeline import BATCH, LENGTH, WINDOW, config, pipeline_speed, write_corpus
from torch.utils.data import DataLoader, IterableDataset

import fmsdata
from fmsdata.corpus.shard_writer import write_shard
from fmsdata.loader.rounds import ROUND_TOKENS
from fmsdata.loader.worker_batches import PREFETCH


class ThroughTheQueue(IterableDataset[dict[str, Any]]):
    """The batches of a loader, sent by a worker of torch's DataLoader through its queue."""

    def __init__(self, make: Callable[[], fmsdata.StatefulDataLoader]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._make())


class OneTensor(IterableDataset[dict[str, Any]]):
    """A batch of tokens that were not read from anywhere."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {"input_ids": torch.zeros((BATCH, LENGTH + 1), dtype=torch.int64)}


def worker_speeds(root: Path, lanes: int, rounds: int) -> None:
    def make(**options: Any) -> fmsdata.StatefulDataLoader:
        overrides = {f"loader.{name}": value for name, value in options.items()}
        return fmsdata.build_loader(config(root, lanes), overrides, rank=0, world_size=1)

    def queued(dataset: IterableDataset[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return iter(DataLoader(dataset, batch_size=None, num_workers=1))

    setups: dict[str, Iterator[dict[str, Any]]] = {
        "queue, one tensor": queued(OneTensor()),
        "queue, the same batches": queued(ThroughTheQueue(partial(make, prefetch=0))),
        "no thread, no workers": iter(make(prefetch=0)),
        "a thread, no workers": iter(make()),
        "1 worker": iter(make(num_workers=1)),
        "2 workers": iter(make(num_workers=2)),
    }
    steps = 2 * lanes * WINDOW // BATCH
    ahead = (PREFETCH + 2) * ROUND_TOKENS // (BATCH * LENGTH)
    speeds: dict[str, list[float]] = {name: [] for name in setups}
    for batches in setups.values():
        pipeline_speed(batches, steps)
    for _ in range(rounds):
        for name, batches in setups.items():
            # What was made ahead while the others had their turn does not count.
            pipeline_speed(batches, ahead)
            speeds[name].append(pipeline_speed(batches, steps))
    for name, rates in speeds.items():
        alone, same = (
            median(rates) / median(speeds[f"queue, {which}"]) for which in ("one tensor", "the same batches")
        )
        print(
            f"{name:24} {median(rates) / 1e6:6.1f} M tokens/s, {alone:4.1f} x the queue with one tensor, "
            f"{same:4.1f} x with the same batches"
        )


def write_many_sources(root: Path, sources: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(sources):
        documents = [rng.integers(1, 50_000, rng.integers(100, 900)) for _ in range(2000)]
        write_shard(root / f"lang=en/dataset=source-{i:02}" / "part.arrow", documents, dtype=np.uint16)


def many_sources(root: Path, sources: int, lanes: int) -> dict[str, Any]:
    names = [f"lang=en/dataset=source-{i:02}" for i in range(sources)]
    return {
        "path": str(root),
        "sources": {name: {"weight": 1 + i} for i, name in enumerate(names)},
        "documents": {"eos": 0},
        "pack": {"seq_len": 1024},
        "shuffle": {"window": 16},
        "lanes": lanes,
        "loader": {"batch_size": 8},
    }


def timed(work: Callable[[], Any], times: int = 5) -> float:
    """The median of several runs, in seconds."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return median(spent)


def snapshot_cost(root: Path) -> None:
    loader = fmsdata.build_loader(many_sources(root, 13, 200), rank=0, world_size=1)
    for _ in islice(loader, 50):
        pass
    print(f"state_dict(), 13 sources x 200 lanes: {timed(loader.state_dict, 200) * 1e6:.0f} microseconds")
    print(f"stats(), 13 sources x 200 lanes: {timed(loader.stats, 200) * 1e6:.0f} microseconds")


def checkpoint_cost(root: Path, world_size: int) -> None:
    described = many_sources(root, 13, 1024)
    with tempfile.TemporaryDirectory() as folder:
        data = fmsdata.build_loader(described, rank=0, world_size=1).data
        checkpoints = fmsdata.Checkpoints(folder)

        def make(rank: int, **options: Any) -> fmsdata.StatefulDataLoader:
            return fmsdata.StatefulDataLoader(data, batch_size=8, rank=rank, world_size=world_size, **options)

        loaders = [make(rank, checkpoint=checkpoints) for rank in range(world_size)]
        for loader in loaders:
            next(iter(loader))
            saving = timed(loader.save, 1)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.json"))
        start = time.perf_counter()
        going_on = make(0, checkpoint=checkpoints)
        loading = time.perf_counter() - start
        start = time.perf_counter()
        next(iter(going_on))
        first = time.perf_counter() - start
        fresh = make(0)
        start = time.perf_counter()
        next(iter(fresh))
        print(
            f"13 sources x 1,024 lanes, {world_size} ranks: {size / 1e6:.2f} MB in all, a rank saves in "
            f"{saving * 1e3:.0f} ms, loads in {loading * 1e3:.0f} ms, has its next batch {first * 1e3:.0f} ms later "
            f"(the first batch of all: {(time.perf_counter() - start) * 1e3:.0f} ms)"
        )


def resume_cost(root: Path) -> None:
    """The time from a state to the next batch, early and late in a run."""
    described = {**many_sources(root, 4, 16), "pack": {"seq_len": 64}}
    loader = fmsdata.build_loader(described, {"loader.batch_size": 4}, rank=0, world_size=1)
    states = {}
    for step, _ in enumerate(loader, 1):
        if step in (10, 100_000):
            states[step] = json.loads(json.dumps(loader.state_dict()))
        if step == 100_000:
            break

    def resume(state: Any) -> None:
        again = fmsdata.StatefulDataLoader(loader.data, batch_size=4, rank=0, world_size=1)
        again.load_state_dict(state)
        next(iter(again))
        again.close()

    spent: dict[int, list[float]] = {step: [] for step in states}
    for _ in range(15):
        for step, state in states.items():
            spent[step].append(timed(partial(resume, state), 1))
    for step, seconds in spent.items():
        print(f"from a state of step {step:7,} to the next batch: {median(seconds) * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150_000_000)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "four", "list", args.tokens, None)
        write_many_sources(Path(folder) / "many", 13)
        worker_speeds(Path(folder) / "four", args.lanes, args.rounds)
        snapshot_cost(Path(folder) / "many")
        for world_size in (1, 8, 64):
            checkpoint_cost(Path(folder) / "many", world_size)
        resume_cost(Path(folder) / "many")


if __name__ == "__main__":
    main()
