"""Small corpora of every kind, made anew for each test."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fault_proxy import FaultProxy
from object_store import ObjectStore, Server, SwiftStore

import fmsdata
from fmsdata.config import build_data, make_loader, read_config
from fmsdata.prepare import Layout, write_shard
from fmsdata.testing import MakeLoader

WriteSource = Callable[..., Path]


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


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two sources of different size and layout, some documents of them empty."""
    rng = np.random.default_rng(1)
    write_source(tmp_path / "web", documents(rng, 60), layout="list")
    write_source(tmp_path / "wiki", documents(rng, 23), layout="batch", dtype=np.int32, shards=2)
    return tmp_path


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A real object store on loopback. Each test makes buckets of its own in it."""
    with ObjectStore(tmp_path_factory.mktemp("object-store")) as store:
        yield store


@pytest.fixture(scope="session")
def swift_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftStore]:
    """Another one that shares no code with it."""
    with SwiftStore(tmp_path_factory.mktemp("swift")) as store:
        yield store


@pytest.fixture(params=["object_store", "swift_store"])
def any_store(request: pytest.FixtureRequest) -> Server:
    """First the one, then the other."""
    store = request.getfixturevalue(request.param)
    assert isinstance(store, Server)
    return store


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[FaultProxy]:
    """A proxy in front of the store that passes everything, until the test gives it a rule."""
    with FaultProxy(object_store.endpoint) as proxy:
        yield proxy


CONFIG: dict[str, Any] = {
    "seed": 3,
    "sources": {"web": {"weight": 7}, "wiki": {"weight": 3}},
    "documents": {"eos": 0},
    "pack": {"seq_len": 16},
    "shuffle": {"window": 8},
    "lanes": 24,
    "loader": {"batch_size": 1, "outputs": ["provenance", "epochs"], "prefetch": 1},
}


def maker(root: Path, **overrides: Any) -> MakeLoader:
    """A factory of loaders over a corpus; `pack__mode="pad"` overrides `pack.mode`."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = read_config({**CONFIG, "path": str(root)}, dotted)
    data = build_data(config)

    def make(rank: int, world_size: int) -> fmsdata.StatefulDataLoader:
        return make_loader(config, data, rank=rank, world_size=world_size)

    return make


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
