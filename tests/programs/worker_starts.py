"""Starts workers again and again beside threads that never stop: two loaders, a reader of an object store, a logger.

Prints a digest of what each loader with workers read, one line per start. All lines must be the same. With `foreign`,
threads also hold locks that are not of this package: a logging queue, the import lock, a cached property.
"""

import functools
import hashlib
import importlib
import json
import logging
import logging.handlers
import queue
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import fmsdata

STEPS = 4


class Held:
    """A class whose property takes long, under a lock that all its instances share."""

    @functools.cached_property
    def value(self) -> int:
        return sum(range(2000))


def build(sources: dict[str, Any], workers: int, method: str | None) -> fmsdata.StatefulDataLoader:
    documents = fmsdata.Map(fmsdata.Mixture(sources, weights=dict.fromkeys(sources, 1)), lambda item: item)
    lines = fmsdata.Shuffle(fmsdata.Pack(fmsdata.Delimit(documents, eos=0), seq_len=65), window=16)
    data = fmsdata.Rescalable(lines, lanes=12, seed=1)
    return fmsdata.StatefulDataLoader(
        data, batch_size=3, num_workers=workers, multiprocessing_context=method, rank=0, world_size=1
    )


def main() -> None:
    folder, remote, method, starts, foreign = json.loads(sys.argv[1])
    stop = threading.Event()
    local = {name: fmsdata.ShardReader(Path(folder) / name) for name in ("web", "wiki")}
    everything = [local, local]
    if remote is not None:
        everything.append({"web": fmsdata.ShardReader(remote["url"], storage_options=remote["options"])})
    log = logging.getLogger("beside")
    log.setLevel(logging.INFO)
    log.propagate = False
    records: queue.Queue[Any] = queue.Queue(-1)
    log.addHandler(logging.handlers.QueueHandler(records) if foreign else logging.NullHandler())

    def read(loader: fmsdata.StatefulDataLoader) -> None:
        for _ in loader:
            if stop.is_set():
                break

    def busy(work: Callable[[], Any]) -> None:
        while not stop.is_set():
            work()

    def write_log() -> None:
        log.info("still here")
        if foreign:
            records.get()  # a queue that nobody empties would fill the memory in 200 starts

    works: list[Callable[[], Any]] = [write_log]
    if foreign:
        works += [lambda: importlib.reload(importlib.import_module("colorsys")), lambda: Held().value]
    beside = [build(sources, 0, None) for sources in everything]
    threads = [threading.Thread(target=read, args=(loader,)) for loader in beside]
    threads += [threading.Thread(target=busy, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        for _ in range(starts):
            loader = build(local, 2, method)
            digest = hashlib.sha256()
            for batch in islice(loader, STEPS):
                digest.update(batch["input_ids"].numpy().tobytes())
            loader.close()
            print(digest.hexdigest(), flush=True)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for loader in beside:
            loader.close()


if __name__ == "__main__":
    main()
