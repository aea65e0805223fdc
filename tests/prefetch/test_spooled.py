"""Windows that are larger than the memory budget: from the spool, the same stream, and nothing is fetched twice."""

import gc
import os
import signal
import time
import warnings
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fmsdata
from fmsdata.corpus.index import write_index
from fmsdata.storage import spool as module
from fmsdata.storage.settings import SpoolSettings
from tests.helpers import documents, write_source
from tests.servers.fault_proxy import FaultProxy, faulty
from tests.servers.object_store import ObjectStore

BUDGET = 300_000
STEPS = 1700  # more than a window of each lane


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("spooled") / "corpus"
    rng = np.random.default_rng(11)
    write_source(root / "web", documents(rng, 6000, 600, 100), shards=5, rows=64, dtype=np.int32)
    write_source(root / "wiki", documents(rng, 5000, 500), shards=3, layout="batch")
    write_index(root)
    return root


@pytest.fixture(scope="module")
def url(local: Path, object_store: ObjectStore) -> str:
    url = object_store.bucket("spooled") + "/tokens"
    object_store.upload(local, url)
    return url


def config(path: str, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The window of a lane holds a good part of its epoch: 2 MB for all lanes, many times the budget."""
    return {
        "seed": 5,
        "path": path,
        "storage_options": options or {},
        "sources": {"web": {"weight": 6}, "wiki": {"weight": 3}},
        "documents": {"eos": 0},
        "pack": {"seq_len": 64},
        "shuffle": {"window": 2000},
        "lanes": 6,
        "loader": {"batch_size": 8, "prefetch": 1},
        **more,
    }


def rows(loader: fmsdata.StatefulDataLoader, steps: int = STEPS) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in islice(loader, steps)]


@pytest.fixture(scope="module")
def expected(local: Path) -> list[Any]:
    loader = fmsdata.build_loader(config(str(local)))
    try:
        return rows(loader)
    finally:
        loader.close()


def twice(proxy: FaultProxy) -> tuple[int, int]:
    """Bytes of shards that were requested, and how many of them were requested before."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in proxy.asked(ending=".arrow"):
        assert record.request.range is not None
        first, last = record.request.range.removeprefix("bytes=").split("-")
        ranges[record.request.path].append((int(first), int(last) + 1))
    total = sum(stop - start for some in ranges.values() for start, stop in some)
    distinct = 0
    for some in ranges.values():
        end = 0
        for start, stop in sorted(some):
            distinct += max(0, stop - max(start, end))
            end = max(end, stop)
    return total, total - distinct


@pytest.mark.parametrize("workers", [0, 2])
def test_a_window_larger_than_the_budget_is_fetched_once(
    url: str, expected: list[Any], proxy: FaultProxy, tmp_path: Path, workers: int
) -> None:
    storage = {"prefetch_bytes": BUDGET, "spool": {"path": str(tmp_path / "spool")}}
    loader = fmsdata.build_loader(
        config(url, proxy.options, storage=storage, loader={"batch_size": 8, "prefetch": 1, "num_workers": workers})
    )
    given, most = [], 0
    for batch in islice(loader, STEPS):
        given.append(batch["input_ids"].tolist())
        stats = loader.stats().storage
        most = max(most, stats.spooled_bytes)
        assert stats.held_bytes < max(1, workers) * (BUDGET + 100_000)
    assert given == expected
    assert stats.again_bytes == 0
    assert most > 1_000_000, "the budget was enough"
    loader.close()
    assert loader.stats().storage.spooled_bytes == 0
    total, again = twice(proxy)
    assert total > 3_000_000
    layouts = (workers - 1) * 8 * 25_000 if workers else 0  # each process reads the end of each shard
    assert again <= layouts, (again, total)
    assert not list((tmp_path / "spool").iterdir())


def test_without_a_spool_it_is_fetched_again(url: str, expected: list[Any], proxy: FaultProxy) -> None:
    """So the test above can fail."""
    loader = fmsdata.build_loader(config(url, proxy.options, storage={"prefetch_bytes": BUDGET, "spool": None}))
    assert rows(loader, 300) == expected[:300]
    assert loader.stats().storage.again_bytes
    loader.close()
    _, again = twice(proxy)
    assert again > 8 * 25_000


@pytest.mark.parametrize("why", ["limit", "full disk", "no folder"])
def test_what_the_spool_cannot_take_is_fetched_again_with_one_warning(
    url: str, expected: list[Any], object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    spool: dict[str, Any] = {}
    if why == "limit":
        spool, words = {"limit": 200_000}, r"storage.spool.limit \(200,000 bytes\) is reached"
    elif why == "full disk":
        write = os.pwrite

        def full(fd: int, data: Any, place: int) -> int:
            if place + len(data) > 500_000:
                raise OSError(28, "No space left on device")
            return write(fd, data, place)

        monkeypatch.setattr(os, "pwrite", full)
        words = "No space left on device"
    else:
        monkeypatch.setattr(module, "is_in_memory", lambda _: True)
        words = "none of .* is a writable folder on a disk"
    loader = fmsdata.build_loader(
        config(
            url,
            object_store.options,
            storage={"prefetch_bytes": BUDGET, "spool": spool},
            loader={"batch_size": 8, "prefetch": 0},
        )
    )
    with pytest.warns(fmsdata.FmsdataWarning, match=rf"can't be kept on the disk \({words}") as warned:
        assert rows(loader, 20) == expected[:20]
    assert len(warned) == 1
    assert loader.stats().storage.again_bytes
    loader.close()


def test_a_spool_that_becomes_unreadable_loses_nothing(
    url: str, expected: list[Any], object_store: ObjectStore, tmp_path: Path
) -> None:
    storage = {"prefetch_bytes": BUDGET, "spool": {"path": str(tmp_path)}}
    loader = fmsdata.build_loader(
        config(url, object_store.options, storage=storage, loader={"batch_size": 8, "prefetch": 0})
    )
    batches = iter(loader)
    given = [next(batches)["input_ids"].tolist() for _ in range(3)]
    fd, *_ = [  # mmap has another for the same file
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if os.path.lexists(link) and os.readlink(link).startswith(str(tmp_path))
    ]
    os.ftruncate(fd, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fmsdata.FmsdataWarning)
        given += [next(batches)["input_ids"].tolist() for _ in range(17)]
    assert given == expected[:20]
    assert loader.stats().storage.again_bytes
    loader.close()


def test_faults_and_a_resume_change_nothing(url: str, expected: list[Any], proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rule = faulty(0.05, seed=3)
    storage = {"prefetch_bytes": BUDGET, "timeout": 1.0, "spool": {"path": str(tmp_path)}}
    first = fmsdata.build_loader(config(url, proxy.options, storage=storage))
    assert rows(first, 40) == expected[:40]
    state = first.state_dict()
    first.close()
    second = fmsdata.build_loader(config(url, proxy.options, storage=storage))
    second.load_state_dict(state)
    assert rows(second, 20) == expected[40:60]
    second.close()


def test_the_disk_is_free_again_when_the_loader_is(url: str, object_store: ObjectStore, tmp_path: Path) -> None:
    storage = {"prefetch_bytes": BUDGET, "spool": {"path": str(tmp_path)}}
    loader = fmsdata.build_loader(config(url, object_store.options, storage=storage))
    rows(loader, 5)
    assert _open_in(tmp_path)
    loader.close()
    del loader
    end = time.monotonic() + 10
    while _open_in(tmp_path) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert not _open_in(tmp_path)
    assert not any(str(tmp_path) in mapped.path for mapped in psutil.Process().memory_maps())


def _open_in(folder: Path) -> list[str]:
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    return [link for link in links if link.startswith(str(folder))]


def test_a_worker_that_is_killed_leaves_nothing(url: str, object_store: ObjectStore, tmp_path: Path) -> None:
    storage = {"prefetch_bytes": BUDGET, "spool": {"path": str(tmp_path)}}
    loader = fmsdata.build_loader(
        config(url, object_store.options, storage=storage, loader={"batch_size": 8, "num_workers": 1})
    )
    rows(loader, 5)
    assert loader.stats().storage.spooled_bytes
    (worker,) = loader.worker_pids
    assert not list(tmp_path.iterdir())
    os.kill(worker, signal.SIGKILL)
    loader.close()
    assert not list(tmp_path.iterdir())


def test_the_setting_is_part_of_the_storage() -> None:
    assert fmsdata.Storage().spool == SpoolSettings() == fmsdata.SpoolSettings()
    assert fmsdata.Storage().spool == SpoolSettings(path=None, limit=64 << 30)
