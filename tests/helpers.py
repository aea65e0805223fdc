"""Small corpora and loaders over them, for the tests of every folder."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

import fmsdata
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.corpus.shard_writer import Layout, write_shard
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.storage.mapped import MappedFile
from fmsdata.testing import MakeLoader

CONFIG: dict[str, Any] = {
    "seed": 3,
    "sources": {"web": {"weight": 7}, "wiki": {"weight": 3}},
    "documents": {"eos": 0},
    "pack": {"seq_len": 16},
    "shuffle": {"window": 8},
    "lanes": 24,
    "loader": {"batch_size": 1, "outputs": ["provenance", "epochs"], "prefetch": 1},
}


def documents(
    rng: np.random.Generator, count: int, longest: int = 40, shortest: int = 0
) -> list[npt.NDArray[np.int64]]:
    """Documents with tokens from 10 up, so that the small numbers are free for special tokens."""
    return [rng.integers(10, 250, rng.integers(shortest, longest + 1)) for _ in range(count)]


def write_source(
    folder: Path,
    some: Sequence[npt.ArrayLike],
    *,
    shards: int = 3,
    layout: Layout = "list",
    dtype: Any = np.uint16,
    stream: bool = False,
    rows: int = 7,
) -> Path:
    for shard in range(shards):
        path = folder / f"part-{shard}.arrow"
        write_shard(path, some[shard::shards], layout=layout, dtype=dtype, stream=stream, rows=rows)
    return folder


def write_corpus(folder: Path) -> Path:
    """Two sources of different size and layout, some documents of them empty."""
    rng = np.random.default_rng(1)
    write_source(folder / "web", documents(rng, 60), layout="list")
    write_source(folder / "wiki", documents(rng, 23), layout="batch", dtype=np.int32, shards=2)
    return folder


def open_file(path: Path, column: str | None = None) -> ArrowShard:
    """A shard on the disk."""
    return ArrowShard(MappedFile(path), str(path), column)


def maker(root: Path, **overrides: Any) -> MakeLoader:
    """A factory of loaders over a corpus; `pack__mode="pad"` overrides `pack.mode`."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = read_config({**CONFIG, "path": str(root)}, dotted)
    data = build_data(config)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        return make_loader(config, data, rank=rank, world_size=world_size)

    return make


def worker_processes() -> list[psutil.Process]:
    """The worker processes of all loaders of this process, however they were started."""
    servers = [child for child in psutil.Process().children() if _is(child, "fmsdata.loader.fork_server")]
    served = [worker for server in servers for worker in _children(server)]
    forked = [child.pid for child in multiprocessing.active_children() if child.name.startswith("fmsdata-worker")]
    return [worker for worker in served if worker.is_running()] + [psutil.Process(pid) for pid in forked if pid]


def _is(process: psutil.Process, word: str) -> bool:
    try:
        return any(word in part for part in process.cmdline())
    except psutil.Error:  # it has ended
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """A state whose JSON texts are data, so that a test can look into it and change it."""
    lanes = {lane: json.loads(text) for lane, text in state["lanes"].items()}
    return {**state, "pipeline": json.loads(state["pipeline"]), "lanes": lanes}


def closed(state: dict[str, Any]) -> dict[str, Any]:
    """The reverse, as far as there is still something to turn into text."""
    lanes = state["lanes"]
    if isinstance(lanes, dict):
        lanes = {lane: json.dumps(one) for lane, one in lanes.items()}
    return {**state, "pipeline": json.dumps(state["pipeline"]), "lanes": lanes}
