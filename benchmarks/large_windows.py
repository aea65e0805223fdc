"""Windows larger than memory, on remote shards: what is fetched, how much memory that takes, and the stream.

    python benchmarks/large_windows.py [--million 2000] [--lanes 2] [--seconds 300]

`shuffle: {window: auto}` on a corpus that is large enough for windows of 30,000 lines, in a real object
store (the one of the tests) behind the proxy of `cloud.py`, with 30 ms of latency and 50 MB/s per
connection. The batches of two windows of each lane are read, in processes of their own: from the
disk, from the store with the spool, without it, and without it with memory for everything. A run that
takes longer than `--seconds` is ended. A digest of each part of the stream is compared.

Memory is the peak of the private memory of the process, without pages of mapped files.
"""

import argparse
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from cloud import BATCH, Corpus, Proxy, Requested, apart, corpus, print_row

import fmsdata
from tests.servers.object_store import ObjectStore

EVERY = 500  # steps of a digest


def private_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def read(config: dict[str, Any], steps: int, seconds: float) -> dict[str, Any]:
    """Read batches: how long each took, digests of what came, and memory."""
    warnings.simplefilter("ignore", fmsdata.FmsdataWarning)
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, private_memory())

    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    before = private_memory()
    watcher = threading.Thread(target=watch)
    watcher.start()
    digests: list[str] = []
    digest, times, spooled = blake2b(digest_size=16), [], 0
    began = last = time.monotonic()
    for step, batch in enumerate(islice(loader, steps), 1):
        now = time.monotonic()
        times.append(now - last)
        digest.update(np.ascontiguousarray(batch["input_ids"].numpy()).data)
        if step % EVERY == 0:
            digests.append(digest.hexdigest())
            spooled = max(spooled, loader.stats().storage.spooled_bytes)
        if now > began + seconds:
            break
        last = time.monotonic()
    took, stats = time.monotonic() - began, loader.stats().storage
    over.set()
    watcher.join()
    loader.close()
    return {
        "steps": len(times),
        "seconds": took,
        "first": times[0],
        "times": times,
        "digests": digests,
        "memory": most - before,
        "spooled": spooled,
        "again": stats.again_bytes,
    }


def fetched_twice(requested: Sequence[Requested]) -> int:
    """Bytes that were requested before."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in requested:
        start = int(one.range.removeprefix("bytes=").split("-")[0])
        ranges[one.path].append((start, start + one.size))
    twice = 0
    for some in ranges.values():
        end = 0
        for start, stop in sorted(some):
            twice += max(0, min(stop, end) - start)
            end = max(end, stop)
    return twice


def compare(data: Corpus, proxy: Proxy, lanes: int, steps: int, seconds: float) -> None:
    print_row(
        *("run", "batches", "seconds", "first batch s", "M tokens/s", "p50, p99, max ms", "private MB", "spooled MB"),
        *("requests", "MB fetched", "MB twice", "same stream"),
    )
    more = {"lanes": lanes, "shuffle": {"window": "auto"}}
    runs: dict[str, tuple[str | None, dict[str, Any]]] = {
        "the disk": (None, {}),
        "the store, 256 MiB": (proxy.endpoint, {}),
        "without a spool, 256 MiB": (proxy.endpoint, {"spool": None}),
        "without a spool, 8 GiB": (proxy.endpoint, {"spool": None, "prefetch_bytes": 8 << 30}),
    }
    expected: list[str] = []
    for name, (endpoint, storage) in runs.items():
        proxy.begin("slow")
        config = data.config(endpoint, **more, storage=storage)
        run = apart(read, config=config, steps=steps, seconds=seconds)
        requested = proxy.end()
        expected = expected or run["digests"]
        times = np.array(run["times"][1:]) * 1e3
        tokens = run["steps"] * BATCH * 4096 / (run["seconds"] - run["first"]) / 1e6
        print_row(
            *(name, f"{run['steps']:,}", f"{run['seconds']:.0f}", f"{run['first']:.1f}", f"{tokens:.1f}"),
            f"{np.median(times):.2f}, {np.quantile(times, 0.99):.2f}, {times.max():.0f}",
            *(f"{run['memory'] / 1e6:.0f}", f"{run['spooled'] / 1e6:.0f}", f"{len(requested):,}"),
            f"{sum(one.size for one in requested) / 1e6:,.0f}",
            f"{fetched_twice(requested) / 1e6:,.1f}",
            run["digests"] == expected[: len(run["digests"])],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=2000, help="tokens of the corpus")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--windows", type=float, default=2, help="windows of each lane that are read")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ObjectStore(Path(folder)) as store,
        corpus(store, {"web": 3, "books": 1}, args.million, 1000, shards=16) as data,
    ):
        config = data.config(None, lanes=args.lanes, shuffle={"window": "auto"})
        lines = fmsdata.build_loader(config, rank=0, world_size=1).data.lines
        window = lines.window if isinstance(lines, fmsdata.Shuffle) else 0
        print(f"\n{args.million:,.0f} M tokens, {args.lanes} lanes, windows of {window:,} lines", flush=True)
        proxy = Proxy(store.endpoint)
        compare(data, proxy, args.lanes, int(args.windows * window * args.lanes / BATCH), args.seconds)
        proxy.close()


if __name__ == "__main__":
    main()
