"""What reading from object storage costs: throughput, the first batch, memory, bytes and requests.

    python benchmarks/cloud.py [--parts throughput,first,memory,bytes,cache] [--rounds 5]

A real object store (the one of the tests) serves a corpus on loopback. In front of it, in a process of
its own, a proxy delays each response by 30 ms and sends 50 MB/s per connection. Every run of a loader is
a fresh process.

The bandwidth is measured with a bare client that makes the same requests: the same number of connections,
the same ranges in the same order, URLs signed in advance, bytes discarded. Loader and bare client take
turns, and the median of the rounds counts, because timings on shared machines are noisy.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import fmsdata
from fmsdata.corpus.index import write_index
from fmsdata.corpus.shard_writer import Layout, write_shard
from tests.servers.fault_proxy import PASS, FaultProxy, Request, throttle
from tests.servers.object_store import ObjectStore, client, storage_options

LATENCY, RATE = 0.03, 50e6
LENGTH, BATCH, WINDOW = 4096, 8, 256
SPAWN = multiprocessing.get_context("spawn")


class Requested(NamedTuple):
    """A range that was requested, and when."""

    path: str
    range: str
    when: float

    @property
    def size(self) -> int:
        start, stop = self.range.removeprefix("bytes=").split("-")
        return int(stop) - int(start) + 1


def _serve(target: str, pipe: "Pipe[Any, Any]") -> None:
    requested: list[tuple[str, str, float]] = []
    action = PASS

    def rule(request: Request) -> Any:
        if request.method == "GET" and request.range is not None:
            requested.append((request.path, request.range, time.monotonic()))
        return action

    with FaultProxy(target, rule) as proxy:
        pipe.send(proxy.endpoint)
        while (kind := pipe.recv()) is not None:
            action = throttle(RATE, LATENCY) if kind == "slow" else PASS
            pipe.send(requested.copy())
            requested.clear()
            proxy.clear()


class Proxy:
    """The proxy, and the requests that it received."""

    def __init__(self, target: str) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(target, theirs), daemon=True)
        self._process.start()
        self.endpoint: str = self._pipe.recv()

    def begin(self, kind: str) -> list[Requested]:
        """Be `slow` or `fast` from now on. Returns the ranges of shards that were requested before."""
        self._pipe.send(kind)
        return [Requested(*entry) for entry in self._pipe.recv() if entry[0].endswith(".arrow")]

    def end(self) -> list[Requested]:
        return self.begin("fast")

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)


def _work(work: Callable[..., Any], arguments: dict[str, Any], pipe: "Pipe[Any, Any]") -> None:
    pipe.send(work(**arguments))


def apart(work: Callable[..., Any], **arguments: Any) -> Any:
    """Run a function in a fresh process, and return its result."""
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_work, args=(work, arguments, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join()


# What runs in processes of its own


def read_steps(config: dict[str, Any], warm_up: int, steps: int) -> dict[str, Any]:
    """Read batches as fast as possible: when that began and ended, and how long the pipeline waited."""
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(warm_up):
        next(batches)
    waited, cpu, began = loader.stats().storage.waited, time.process_time(), time.monotonic()
    tokens = sum(next(batches)["input_ids"].numel() for _ in range(steps))
    ended = time.monotonic()
    result = {
        "began": began,
        "ended": ended,
        "tokens": tokens,
        "waited": loader.stats().storage.waited - waited,
        "cpu": time.process_time() - cpu,
    }
    loader.close()
    return result


def fetch_bare(endpoint: str, requested: Sequence[Requested], connections: int) -> float:
    """Seconds that a client takes to fetch these ranges, and do nothing else."""
    signer = client(endpoint)
    work = []
    for request in requested:
        bucket, _, key = request.path.lstrip("/").partition("/")
        url = signer.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}, ExpiresIn=3600)
        work.append((url, request.range, request.size))
    work.reverse()

    async def take(session: aiohttp.ClientSession) -> None:
        while work:
            url, byte_range, size = work.pop()
            async with session.get(url, headers={"Range": byte_range}) as response:
                if len(await response.read()) != size:
                    raise RuntimeError(f"{response.status} for {url}")

    async def take_all() -> float:
        connector = aiohttp.TCPConnector(limit=connections)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
            began = time.monotonic()
            await asyncio.gather(*(take(session) for _ in range(connections)))
            return time.monotonic() - began

    return asyncio.run(take_all())


def first_batch(config: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    planned = time.monotonic()
    next(iter(loader))
    ended = time.monotonic()
    fetched = loader.stats().storage
    loader.close()
    return {"planning": planned - began, "first": ended - planned, "bytes": fetched.bytes, "requests": fetched.requests}


def memory(config: dict[str, Any], steps: int, seconds: float) -> dict[str, Any]:
    """The peak of the private memory of the process (without mapped files)."""
    most, over = 0, threading.Event()

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, now())

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = now()
    loader = fmsdata.build_loader(config, rank=0, world_size=1)
    began, done, held = time.monotonic(), 0, 0
    for done, _ in enumerate(islice(loader, steps), 1):  # noqa: B007
        held = max(held, loader.stats().storage.held_bytes)
        if time.monotonic() > began + seconds:
            break
    again, threads = loader.stats().storage.again_bytes, threading.active_count()
    over.set()
    watcher.join()
    loader.close()
    took = time.monotonic() - began
    return {
        "most": most,
        "before": before,
        "steps": done,
        "held": held,
        "again": again,
        "threads": threads,
        "seconds": took,
    }


def read_rank(config: dict[str, Any], steps: Sequence[int], rank: int, world_size: int) -> dict[str, Any]:
    """When each of these numbers of steps was done, and how many bytes were prefetched by then."""
    loader = fmsdata.build_loader(config, rank=rank, world_size=world_size)
    batches = iter(loader)
    done = []
    for count in steps:
        for _ in range(count):
            next(batches)
        done.append(time.monotonic())
    held = loader.stats().storage.held_bytes
    loader.close()
    return {"done": done, "held": held}


# The corpora


def write_source(folder: Path, tokens: int, mean: int, shards: int, layout: Layout = "list") -> None:
    rng = np.random.default_rng(len(folder.name))
    for shard in range(shards):
        lengths = (rng.lognormal(-0.32, 0.8, max(1, tokens // shards // mean)) * mean).astype(np.int64) + 1
        pool = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
        write_shard(folder / f"{shard}.arrow", np.split(pool, np.cumsum(lengths)[:-1]), dtype=np.uint16, layout=layout)


class Corpus(NamedTuple):
    """Sources in the store, and on the disk."""

    folder: Path
    url: str
    weights: dict[str, int]

    def config(self, endpoint: str | None, **more: Any) -> dict[str, Any]:
        return {
            "path": str(self.folder) if endpoint is None else self.url,
            "storage_options": {} if endpoint is None else storage_options(endpoint),
            "sources": {name: {"weight": weight} for name, weight in self.weights.items()},
            "documents": {"eos": 0},
            "pack": {"seq_len": LENGTH},
            "shuffle": {"window": WINDOW},
            "loader": {"batch_size": BATCH},
            **more,
        }


@contextmanager
def corpus(store: ObjectStore, weights: dict[str, int], million: float, mean: int, **how: Any) -> Iterator[Corpus]:
    """A corpus of `million` million tokens in total, in documents of this mean length."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, weight in weights.items():
            write_source(root / name, int(million * 1e6 * weight / sum(weights.values())), mean, **how)
        write_index(root)
        url = store.bucket("bench")
        store.upload(root, url)
        yield Corpus(root, url, weights)


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# The parts


def throughput(store: ObjectStore, proxy: Proxy, rounds: int) -> None:
    """Four lanes of two sources, as one rank of a large run has: blocks of 2^18 tokens."""
    warm_up, steps = 4 * WINDOW // BATCH, 1600
    print("\nThroughput: 4 lanes x 2 sources, 200 M tokens")
    print_row(
        "connections", "bare MB/s", "loader MB/s", "M tokens/s", "of bare", "x without", "waited", "CPU", "KB / request"
    )
    with corpus(store, {"web": 3, "books": 1}, 200, 1000, shards=4) as data:
        for connections in (4, 6, 8):
            storage = {"prefetch_bytes": 64 << 20, "connections": connections}
            rows: dict[str, list[float]] = {}
            for _ in range(rounds):
                proxy.begin("slow")
                run = apart(
                    read_steps,
                    config=data.config(proxy.endpoint, lanes=4, storage=storage),
                    warm_up=warm_up,
                    steps=steps,
                )
                requested = [range_ for range_ in proxy.begin("slow") if run["began"] <= range_.when < run["ended"]]
                bare = apart(fetch_bare, endpoint=proxy.endpoint, requested=requested, connections=connections)
                without = apart(
                    read_steps,
                    config=data.config(proxy.endpoint, lanes=4, storage={**storage, "prefetch_bytes": 0}),
                    warm_up=warm_up,
                    steps=steps // 8,
                )
                size, seconds = sum(range_.size for range_ in requested), run["ended"] - run["began"]
                slow = without["tokens"] / (without["ended"] - without["began"])
                found = {
                    "bare": size / bare / 1e6,
                    "loader": size / seconds / 1e6,
                    "tokens": run["tokens"] / seconds / 1e6,
                    "of bare": bare / seconds,
                    "x without": run["tokens"] / seconds / slow,
                    "waited": run["waited"] / seconds,
                    "cpu": run["cpu"] / seconds,
                    "block": size / len(requested) / 1e3,
                }
                for name, value in found.items():
                    rows.setdefault(name, []).append(value)
            print_row(connections, *(spread(rows[name]) for name in found))
    proxy.end()


class Start(NamedTuple):
    """A mix whose first batch is timed."""

    million: int  # tokens
    mean: int  # of a document
    length: int
    window: int


STARTS = (
    Start(4, 500, 512, 256),
    Start(40, 500, 1024, 256),
    Start(300, 1000, 4096, 64),
    Start(300, 1000, 4096, 256),
    Start(300, 1 << 18, 4096, 256),
)


def first(store: ObjectStore, proxy: Proxy, rounds: int) -> None:
    print("\nThe first batch: 64 lanes x 4 sources")
    print_row(
        *("M tokens", "mean document", "line x window", "batch size", "planning s", "first batch s", "together s"),
        *("from local files s", "MB", "requests"),
    )
    for start in STARTS:
        mix = {"web": 4, "books": 3, "code": 2, "wiki": 1}
        with corpus(store, mix, start.million, start.mean, shards=4) as data:
            for batch_size in (8, 64):
                more: dict[str, Any] = {
                    "lanes": 64,
                    "pack": {"seq_len": start.length},
                    "shuffle": {"window": start.window},
                    "loader": {"batch_size": batch_size},
                }
                proxy.begin("slow")
                runs = [apart(first_batch, config=data.config(proxy.endpoint, **more)) for _ in range(rounds)]
                local = [apart(first_batch, config=data.config(None, **more))["first"] for _ in range(rounds)]
                both = (spread([run[name] for run in runs]) for name in ("planning", "first"))
                fetched = (median([run[name] for run in runs]) for name in ("bytes", "requests"))
                print_row(
                    *(start.million, start.mean, f"{start.length} x {start.window}", batch_size, *both),
                    spread([run["planning"] + run["first"] for run in runs]),
                    *(spread(local), f"{next(fetched) / 1e6:.1f}", f"{next(fetched):.0f}"),
                )
    proxy.end()


def memory_of_a_worker(store: ObjectStore) -> None:
    """Documents of 20,000 tokens, so that blocks are large although the corpus is small."""
    print("\nMemory: 500 lanes x 13 sources, 520 M tokens, straight from the store")
    print_row(
        "run",
        "window",
        "batches",
        "seconds",
        "peak MB",
        "above one lane",
        "above one lane and budget",
        "held MB",
        "MB fetched again",
    )
    sources = {f"source-{i:02}": 1 for i in range(13)}
    with corpus(store, sources, 520, 20_000, shards=2) as data:
        one_source = Corpus(data.folder, data.url, {"source-00": 1})
        least = apart(
            memory,
            config=one_source.config(store.endpoint, lanes=1, storage={"prefetch_bytes": 0}),
            steps=100,
            seconds=60,
        )["most"]
        for window in (8, 64):
            for budget in (None, 32 << 20, 256 << 20):
                more: dict[str, Any] = {"lanes": 500, "shuffle": {"window": window}}
                if budget is not None:
                    more["storage"] = {"prefetch_bytes": budget}
                config = data.config(None if budget is None else store.endpoint, **more)
                run = apart(memory, config=config, steps=500 * window * 5 // 4 // BATCH, seconds=150)
                above = run["most"] - least
                numbers = (run["most"], above, above - (budget or 0), run["held"], run["again"])
                name = "local" if budget is None else f"{budget >> 20} MB"
                print_row(
                    name, window, run["steps"], f"{run['seconds']:.0f}", *(f"{number / 1e6:.0f}" for number in numbers)
                )
        print_row("one lane, one source", WINDOW, 100, "", f"{least / 1e6:.0f}", "", "", "", "")


def bytes_of_an_epoch(store: ObjectStore, proxy: Proxy) -> None:
    print("\nBytes fetched for each byte stored, when nine tenths of an epoch are read: one source, 16 lanes")
    print_row("layout", "ranks", "MB stored", "MB fetched", "fetched / stored", "requests / MB", "KB / request")
    layouts: tuple[Layout, ...] = ("list", "batch")
    for layout in layouts:
        with corpus(store, {"web": 1}, 48, 1000, shards=3, layout=layout) as data:
            tokens = fmsdata.ShardReader(data.folder / "web").size().tokens
            stored = sum(file.stat().st_size for file in (data.folder / "web").glob("*.arrow"))
            config = data.config(
                proxy.endpoint, lanes=16, documents={}, shuffle={"window": 4}, loader={"batch_size": 4, "prefetch": 1}
            )
            for world_size in (1, 4, 16):
                steps = tokens * 9 // 10 // (LENGTH + 1) // 4 // world_size
                proxy.begin("fast")
                for rank in range(world_size):
                    apart(read_rank, config=config, steps=[steps], rank=rank, world_size=world_size)
                requested = proxy.begin("fast")
                fetched = sum(range_.size for range_ in requested)
                print_row(
                    *(layout, world_size, f"{stored / 1e6:.1f}", f"{fetched / 1e6:.1f}", f"{fetched / stored:.3f}"),
                    *(f"{len(requested) / fetched * 1e6:.1f}", f"{fetched / len(requested) / 1e3:.0f}"),
                )


def from_the_cache(store: ObjectStore, proxy: Proxy) -> None:
    print("\nWith the cache on the node's disk: one source, 16 lanes, one rank")
    print_row("epoch", "MB from the server", "requests", "seconds")
    with corpus(store, {"web": 1}, 48, 1000, shards=3) as data, tempfile.TemporaryDirectory() as folder:
        tokens = fmsdata.ShardReader(data.folder / "web").size().tokens
        storage = {"cache": {"path": folder, "limit": "1GB"}}
        config = data.config(proxy.endpoint, lanes=16, documents={}, shuffle={"window": 4}, storage=storage)
        steps = tokens // (LENGTH + 1) // BATCH
        proxy.begin("slow")
        began = time.monotonic()
        done = apart(read_rank, config=config, steps=[steps, steps], rank=0, world_size=1)["done"]
        again = time.monotonic()
        done += apart(read_rank, config=config, steps=[steps], rank=0, world_size=1)["done"]
        requested = proxy.end()
        for name, start, end in (
            ("first", began, done[0]),
            ("second", done[0], done[1]),
            ("first, run again", again, done[2]),
        ):
            within = [range_ for range_ in requested if start <= range_.when < end]
            print_row(name, f"{sum(range_.size for range_ in within) / 1e6:.2f}", len(within), f"{end - start:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="throughput,first,memory,bytes,cache")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parts = args.parts.split(",")
    with tempfile.TemporaryDirectory() as folder, ObjectStore(Path(folder)) as store:
        proxy = Proxy(store.endpoint)
        if "throughput" in parts:
            throughput(store, proxy, args.rounds)
        if "first" in parts:
            first(store, proxy, args.rounds)
        if "memory" in parts:
            memory_of_a_worker(store)
        if "bytes" in parts:
            bytes_of_an_epoch(store, proxy)
        if "cache" in parts:
            from_the_cache(store, proxy)
        proxy.close()


if __name__ == "__main__":
    main()
