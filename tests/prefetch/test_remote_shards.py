"""Shards in object storage: the same stream as from local files, whatever the storage does."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pytest

import fmsdata
from fmsdata.core.blocks import Block
from fmsdata.corpus.index import write_index
from fmsdata.corpus.shard_writer import write_shard
from fmsdata.loader.read_ahead import OnDemand
from tests.helpers import documents, write_source
from tests.servers.fault_proxy import FaultProxy, Request, always, answer, delay, faulty, first, never, reset, stall
from tests.servers.object_store import ObjectStore

PROGRAM = Path(__file__).parents[1] / "programs" / "remote_run.py"
Samples = npt.NDArray[np.int64]


class Corpus(NamedTuple):
    local: Path
    url: str
    bytes: int

    def config(self, options: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """With the store's options from the store, else from the disk."""
        return {
            "seed": 5,
            "path": str(self.local) if options is None else self.url,
            "storage_options": options or {},
            "sources": {"web": {"weight": 6}, "wiki": {"weight": 3}, "code": {"weight": 1}},
            "documents": {"eos": 0},
            "pack": {"seq_len": 64},
            "shuffle": {"window": 16},
            "lanes": 12,
            "loader": {"batch_size": 2, "prefetch": 1},
            **more,
        }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, object_store: ObjectStore) -> Corpus:
    """Three sources of every layout, in the store and on the disk."""
    root = tmp_path_factory.mktemp("cloud") / "corpus"
    rng = np.random.default_rng(11)
    write_source(root / "web", documents(rng, 2500, 200), shards=5, rows=64)
    write_source(root / "wiki", documents(rng, 900, 150), shards=3, layout="batch", dtype=np.int32)
    write_source(root / "code", documents(rng, 200, 300), shards=2, rows=20)
    write_index(root)
    url = object_store.bucket("corpus") + "/tokens"
    object_store.upload(root, url)
    return Corpus(root, url, sum(file.stat().st_size for file in root.rglob("*.arrow")))


def read(config: dict[str, Any], steps: int, world_size: int = 1) -> Samples:
    """The first samples of a run, in the order of their numbers: of each step, rank by rank."""
    ranks = [fmsdata.build_loader(config, rank=rank, world_size=world_size) for rank in range(world_size)]
    try:
        size = config["loader"]["batch_size"]
        given = [[batch["input_ids"].numpy() for batch in islice(loader, steps)] for loader in ranks]
        return np.stack(
            [
                given[g % world_size][g // (size * world_size)][g // world_size % size]
                for g in range(steps * size * world_size)
            ]
        )
    finally:
        for loader in ranks:
            loader.close()


@pytest.fixture(scope="session")
def expected(corpus: Corpus) -> Samples:
    return read(corpus.config(None), 200)


@pytest.mark.parametrize(
    ("world_size", "workers", "context", "cached"),
    [
        (1, 0, None, False),
        (1, 2, "fork", False),
        (2, 1, "spawn", True),
        (3, 0, None, True),
        (6, 0, None, False),
        (12, 0, None, True),
    ],
)
def test_the_stream_is_the_one_of_local_files(
    corpus: Corpus,
    expected: Samples,
    object_store: ObjectStore,
    tmp_path: Path,
    world_size: int,
    workers: int,
    context: str | None,
    cached: bool,
) -> None:
    storage = {"cache": {"path": str(tmp_path / "cache"), "limit": "100MB"}} if cached else {}
    loader = {"batch_size": 2, "prefetch": 1, "num_workers": workers, "multiprocessing_context": context}
    config = corpus.config(object_store.options, storage=storage, loader=loader)
    for _ in range(1 + cached):  # the second time from the cache
        samples = read(config, 96 // world_size, world_size)
        assert np.array_equal(samples, expected[: len(samples)])


def test_what_is_in_the_cache_is_not_fetched_again(
    corpus: Corpus, expected: Samples, proxy: FaultProxy, tmp_path: Path
) -> None:
    storage = {"cache": {"path": str(tmp_path / "cache"), "limit": "100MB"}}
    config = corpus.config(proxy.options, storage=storage)
    read(config, 50)
    first = sum(one.sent for one in proxy.asked(ending=".arrow"))
    proxy.clear()
    assert np.array_equal(read(config, 50), expected[:100])
    again = sum(one.sent for one in proxy.asked(ending=".arrow"))
    assert again < first / 2, (again, first)
    loader = fmsdata.build_loader(config)
    next(iter(loader))
    assert loader.stats().storage.cached_bytes
    loader.close()


def test_the_stream_survives_faults(corpus: Corpus, expected: Samples, proxy: FaultProxy) -> None:
    proxy.rule = faulty(0.05, seed=7)
    config = corpus.config(proxy.options, storage={"timeout": 1.0, "connections": 4})
    for world_size in (1, 4):
        samples = read(config, 192 // world_size, world_size)
        assert np.array_equal(samples, expected[: len(samples)])
    assert sum(record.status != 206 for record in proxy.asked(ending=".arrow")), "no fault came"
    assert proxy.requests.most <= 8  # the proxy may still be at work for a connection that was cut


@pytest.mark.parametrize("budget", [0, 20_000, 1_000_000])
@pytest.mark.filterwarnings("ignore:storage.prefetch_bytes is 20,000, too little")
def test_the_stream_does_not_depend_on_the_budget(
    corpus: Corpus, expected: Samples, object_store: ObjectStore, budget: int
) -> None:
    """Also if what the pipeline holds is more than the budget, and is given up and read again."""
    config = corpus.config(object_store.options, storage={"prefetch_bytes": budget, "spool": None})
    loader = fmsdata.build_loader(config)
    for step, batch in enumerate(islice(loader, 60)):
        assert np.array_equal(batch["input_ids"], expected[2 * step : 2 * step + 2])
        held = loader.stats().storage.held_bytes
        assert not budget or held < budget + 10_000, (step, held)
    assert bool(loader.stats().storage.again_bytes) == (budget == 20_000)
    loader.close()


def test_no_more_is_fetched_than_an_epoch_has(corpus: Corpus, proxy: FaultProxy) -> None:
    """Over all ranks, within 5% of the corpus, and footers."""
    config = corpus.config(
        proxy.options, sources={"web": {"weight": 1}}, shuffle={"window": 1}, documents={"eos": None}
    )
    tokens = fmsdata.ShardReader(corpus.local / "web").size().tokens
    stored = sum(file.stat().st_size for file in (corpus.local / "web").glob("*.arrow"))
    for world_size in (1, 3, 8):
        proxy.clear()
        read(config, tokens // 64 // 2 // world_size, world_size)
        records = proxy.asked(ending=".arrow")
        sent = sum(one.sent for one in records)
        layouts = world_size * 5 * 20_000  # the end of each of the five shards, and of each record batch its metadata
        assert sent <= 1.05 * stored + layouts, (world_size, sent, stored)
        assert not any(one.request.range is None for one in records), "a shard was downloaded whole"


def test_a_run_that_was_killed_while_it_fetched_goes_on(
    corpus: Corpus, expected: Samples, proxy: FaultProxy, tmp_path: Path
) -> None:
    """SIGKILL in the middle of a body; then on other numbers of ranks, from the checkpoint."""
    config = corpus.config(proxy.options, checkpoint={"path": str(tmp_path / "kept"), "every": 5, "keep": None})
    config["storage"] = {"timeout": 60.0, "prefetch_bytes": 0}

    def run(rank: int, world_size: int, steps: int) -> "subprocess.Popen[bytes]":
        out = tmp_path / f"{world_size}-{rank}.jsonl"
        command = [sys.executable, str(PROGRAM), json.dumps(config), str(rank), str(world_size), str(out), str(steps)]
        return subprocess.Popen(command)

    def rows(rank: int, world_size: int) -> list[Any]:
        out = tmp_path / f"{world_size}-{rank}.jsonl"
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    run_one = run(0, 1, 1000)
    try:
        _until(lambda: len(rows(0, 1)) >= 12)
        proxy.rule = always(stall(after=10))
        before = len(proxy.records)
        _until(lambda: len(proxy.records) > before)
        time.sleep(0.2)
    finally:
        run_one.kill()
        run_one.wait()
    proxy.rule = always(delay(0.0))
    for step, batch in rows(0, 1):
        assert np.array_equal(batch, expected[2 * step - 2 : 2 * step])
    saved = max(int(folder.name.removeprefix("step-")) for folder in (tmp_path / "kept").glob("step-*"))
    config["storage"] = {}
    both = [run(rank, 2, saved + 10) for rank in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    for rank in range(2):
        assert [step for step, _ in rows(rank, 2)] == list(range(saved + 1, saved + 11))
        for step, batch in rows(rank, 2):
            first = 2 * saved + 4 * (step - saved - 1)
            assert np.array_equal(batch, expected[first + rank : first + 4 : 2])


def _until(true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_budget_of_retries_that_is_used_up_is_told_and_loses_nothing(
    corpus: Corpus, expected: Samples, proxy: FaultProxy, workers: int
) -> None:
    storage = {"retries": 2, "deadline": 5.0, "timeout": 1.0, "prefetch_bytes": 0}
    loader = {"batch_size": 2, "prefetch": 1, "num_workers": workers}
    loader_one = fmsdata.build_loader(corpus.config(proxy.options, storage=storage, loader=loader))
    batches = iter(loader_one)
    for step in range(3):
        assert np.array_equal(next(batches)["input_ids"], expected[2 * step : 2 * step + 2])
    proxy.rule = lambda request: answer(503, "SlowDown") if request.path.endswith(".arrow") else delay(0)
    with pytest.raises(fmsdata.StorageError) as told:
        for _ in range(300):
            next(batches)
            step += 1
    message = str(told.value)
    for words in ("bytes ", "s3://", ".arrow", "3 attempts", "SlowDown", "source '", "resumed from its last state"):
        assert words in message, message
    state = loader_one.state_dict()
    proxy.rule = always(delay(0))
    following = next(iter(loader_one))["input_ids"]
    loader_one.close()
    loader_two = fmsdata.build_loader(corpus.config(proxy.options, storage=storage))
    loader_two.load_state_dict(state)
    again = next(iter(loader_two))["input_ids"]
    loader_two.close()
    assert np.array_equal(following, expected[2 * step + 2 : 2 * step + 4])
    assert np.array_equal(again, following)


def test_what_can_not_come_right_fails_at_once(corpus: Corpus, proxy: FaultProxy) -> None:
    for status, code, words in ((403, "AccessDenied", "credentials"), (404, "NoSuchKey", "it was there when")):
        proxy.rule = always(delay(0))
        loader = fmsdata.build_loader(corpus.config(proxy.options))

        def rule(request: Request, status: int = status, code: str = code) -> Any:
            return answer(status, code) if request.path.endswith(".arrow") else delay(0)

        proxy.rule = rule
        proxy.clear()
        began = time.monotonic()
        with pytest.raises(fmsdata.StorageError, match=words) as told:
            next(iter(loader))
        loader.close()
        assert time.monotonic() - began < 5
        assert "s3://" in str(told.value)
        assert "source '" in str(told.value)


def test_an_object_that_is_replaced_is_noticed(object_store: ObjectStore, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    write_source(tmp_path / "c/web", documents(rng, 500, 100, 50), shards=1)
    url = object_store.bucket("replaced")
    object_store.upload(tmp_path / "c", url)
    config = Corpus(tmp_path / "c", url, 0).config(
        object_store.options, sources={"web": {"weight": 1}}, storage={"prefetch_bytes": 0}
    )
    loader = fmsdata.build_loader(config)
    next(iter(loader))
    write_source(tmp_path / "c/web", documents(rng, 500, 100, 50), shards=1)
    object_store.upload(tmp_path / "c", url)
    with pytest.raises(fmsdata.StorageError, match="replaced during the run"):
        for _ in islice(loader, 2000):
            pass
    loader.close()


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A folder of a filesystem that is a part of this process, and so costs little per request."""
    folder = f"cloud-{os.getpid()}"
    yield f"memory://{folder}"
    memory = fsspec.filesystem("memory")
    if memory.exists(folder):
        memory.rm(folder, recursive=True)


def put(folder: Path, url: str) -> None:
    memory = fsspec.filesystem("memory")
    for file in folder.rglob("*.*"):
        memory.pipe_file(f"{url}/{file.relative_to(folder)}", file.read_bytes())


def test_nothing_leaks(tmp_path: Path, in_memory: str) -> None:
    """Over 10,000 blocks: threads, files and memory stay as they are."""
    rng = np.random.default_rng(2)
    many = [rng.integers(10, 250, 20) for _ in range(12_000)]
    write_shard(tmp_path / "web/a.arrow", many[:6000], dtype=np.uint16)
    write_shard(tmp_path / "web/b.arrow", many[6000:], dtype=np.uint16, layout="batch")
    put(tmp_path, in_memory)
    storage = fmsdata.Storage(connections=4, prefetch_bytes=50_000)
    reader = fmsdata.ShardReader(f"{in_memory}/web", storage=storage, block_tokens=20)
    data = fmsdata.Rescalable(fmsdata.Pack(reader, seq_len=200), lanes=6, seed=1)
    loader = fmsdata.StatefulDataLoader(data, batch_size=10)
    me = psutil.Process()
    batches = iter(loader)

    def measured(steps: int) -> tuple[int, int, int]:
        for _ in range(steps):
            next(batches)
        gc.collect()
        return me.memory_info().rss, me.num_threads(), me.num_fds()

    before, after = measured(20), measured(105)  # batches of 10 lines of 10 documents, each a block
    requests = loader.stats().storage.requests
    loader.close()
    assert requests > 10_000
    assert after[0] - before[0] < 20_000_000
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 1


@pytest.mark.parametrize("spool", [None, "spool"])
@pytest.mark.filterwarnings("ignore:storage.prefetch_bytes is 8,000,000, too little")
def test_memory_stays_within_the_budget_for_many_lanes_and_sources(
    tmp_path: Path, in_memory: str, spool: str | None
) -> None:
    """500 lanes x 13 sources, whose blocks in use are several times the budget."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(10, 60_000, 3000).astype(np.uint16) for _ in range(1000)]
    sources = [f"s{i}" for i in range(13)]
    write_shard(tmp_path / "a.arrow", documents, dtype=np.uint16)
    for source in sources:
        put(tmp_path, f"{in_memory}/{source}")
    budget = 8_000_000
    config = {
        "path": in_memory,
        "sources": {source: {"weight": 1} for source in sources},
        "pack": {"seq_len": 100},
        "shuffle": {"window": 2},
        "lanes": 500,
        "loader": {"batch_size": 50, "prefetch": 0},
        "storage": {"prefetch_bytes": budget, "spool": None if spool is None else {"path": str(tmp_path / spool)}},
    }
    everywhere = {source: {"path": ".", "weight": 1} for source in sources}
    local = fmsdata.build_loader({**config, "path": str(tmp_path), "sources": everywhere})
    remote = fmsdata.build_loader(config)
    me = psutil.Process()

    def grown(loader: fmsdata.StatefulDataLoader) -> tuple[int, list[Samples]]:
        gc.collect()
        before, most, given = me.memory_info().rss, 0, []
        for batch in islice(loader, 24):
            given.append(batch["input_ids"].numpy())
            assert loader.stats().storage.held_bytes < budget + 10_000
            most = max(most, me.memory_info().rss - before)
        return most, given

    (locally, expected), (remotely, given) = grown(local), grown(remote)
    assert np.array_equal(given, expected)
    storage = remote.stats().storage
    assert storage.spooled_bytes if spool else storage.again_bytes, "the budget was enough"
    assert not (storage.again_bytes if spool else storage.spooled_bytes)
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is Block]
    assert sum(getattr(tokens, "nbytes", 0) for block in kept for tokens in block.arrays) < budget, (
        "what was read is kept"
    )
    remote.close()
    assert remotely < locally + budget + 100_000_000, (locally, remotely)


def test_a_process_ends_cleanly(corpus: Corpus, object_store: ObjectStore) -> None:
    """With fetches under way, in the trainer or in workers: no noise, no hang."""
    for workers in (0, 1):
        config = corpus.config(object_store.options, loader={"batch_size": 2, "num_workers": workers})
        code = f"import fmsdata; loader = fmsdata.build_loader({config!r}); next(iter(loader))"
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr.decode()) == (0, "")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_that_is_closed_leaves_no_request_behind(corpus: Corpus, proxy: FaultProxy, prefetch: int) -> None:
    """Not even those that stall: others need the connections."""
    storage = {"connections": 3, "timeout": 60.0}
    loader = fmsdata.build_loader(
        corpus.config(proxy.options, storage=storage, loader={"batch_size": 2, "prefetch": prefetch})
    )
    proxy.rule = always(stall())
    proxy.clear()

    def wait() -> None:
        with pytest.raises(fmsdata.StorageError):
            next(iter(loader))

    waiting = threading.Thread(target=wait)
    if prefetch:
        loader._engine = loader._start_engine()
    else:
        waiting.start()
    _until(lambda: proxy.requests.now == 3)
    began = time.monotonic()
    if prefetch:
        loader.close()
    else:
        assert isinstance(loader._engine, OnDemand)
        loader._engine.stop()
        waiting.join(10)
    _until(lambda: proxy.requests.now == 0, 5.0)
    assert time.monotonic() - began < 5
    proxy.rule = always(delay(0))
    assert len(next(iter(loader))["input_ids"]) == 2
    loader.close()


def test_an_interrupt_is_heard_while_a_fetch_stalls(corpus: Corpus, proxy: FaultProxy) -> None:
    config = corpus.config(proxy.options, loader={"batch_size": 2, "prefetch": 0}, storage={"timeout": 60.0})
    code = (
        f"import fmsdata\nloader = fmsdata.build_loader({config!r})\nprint('ready', flush=True)\n"
        "try:\n    next(iter(loader))\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    proxy.rule = always(stall())
    before = len(proxy.records)
    _until(lambda: len(proxy.records) > before)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (0, "interrupted\n", "")
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_any_url_gives_the_same_stream(corpus: Corpus, expected: Samples, in_memory: str, kind: str) -> None:
    put(corpus.local, in_memory)
    url = {"memory": in_memory, "file": f"file://{corpus.local}"}[kind]
    assert np.array_equal(read({**corpus.config({}), "path": url}, 100), expected[:200])


def test_stats_tell_what_storage_costs(corpus: Corpus, proxy: FaultProxy) -> None:
    proxy.rule = always(delay(0.02))
    loader = fmsdata.build_loader(corpus.config(proxy.options))
    for _ in islice(loader, 20):
        pass
    stats = loader.stats()
    loader.close()
    assert stats.storage.waited >= 0.02
    assert stats.storage.bytes > 1000
    assert stats.storage.requests > 5
    assert f"{stats.storage.requests:,} requests" in str(stats)
    assert stats.as_scalars()["data-storage/waited"] == stats.storage.waited
    local = fmsdata.build_loader(corpus.config(None))
    next(iter(local))
    assert "storage" not in str(local.stats())
    local.close()


def small(corpus: Corpus, options: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A mix whose windows have a good part of all its sources."""
    return corpus.config(options, shuffle={"window": 256}, **more)


def test_small_sources_are_fetched_once_and_kept(corpus: Corpus, proxy: FaultProxy) -> None:
    """Where one process reads all lanes. Each epoch of them has hundreds of blocks."""
    expected = read(small(corpus, None), 4000)
    proxy.clear()
    loader = fmsdata.build_loader(small(corpus, proxy.options))
    for step, batch in enumerate(islice(loader, 4000)):  # more than an epoch of each
        assert np.array_equal(batch["input_ids"], expected[2 * step : 2 * step + 2])
    storage = loader.stats().storage
    loader.close()
    assert all(one.epochs > 1 for one in loader.stats().sources.values())
    records = proxy.asked(ending=".arrow")
    assert len(records) == 10, "one for each shard"
    assert sum(one.sent for one in records) == corpus.bytes == storage.held_bytes


@pytest.mark.parametrize(
    ("more", "world_size"),
    [
        ({}, 2),  # a process needs half of each source
        ({"storage": {"prefetch_bytes": 400_000}}, 1),  # there is no room
        ({"storage": {"prefetch_bytes": 0}}, 1),
        ({"shuffle": {"window": 4}}, 1),  # most of an epoch is not needed before long
    ],
)
def test_other_sources_are_not_kept(
    corpus: Corpus, object_store: ObjectStore, more: dict[str, Any], world_size: int
) -> None:
    config = {**small(corpus, object_store.options), **more}
    local = {**small(corpus, None), **more}
    loader = fmsdata.build_loader(config, rank=0, world_size=world_size)
    same = fmsdata.build_loader(local, rank=0, world_size=world_size)
    for ours, theirs in islice(zip(loader, same, strict=True), 40):
        assert np.array_equal(ours["input_ids"], theirs["input_ids"])
    storage = loader.stats().storage
    loader.close()
    same.close()
    assert storage.requests > 60
    assert storage.bytes < 1.3 * corpus.bytes


def test_some_sources_are_kept_and_others_have_the_rest_of_the_budget(
    corpus: Corpus, object_store: ObjectStore
) -> None:
    budget = 1_300_000  # half of which is enough for some of the sources, and not for the largest
    config = small(corpus, object_store.options, storage={"prefetch_bytes": budget})
    expected = read(small(corpus, None), 100)
    loader = fmsdata.build_loader(config)
    for step, batch in enumerate(islice(loader, 100)):
        assert np.array_equal(batch["input_ids"], expected[2 * step : 2 * step + 2])
        assert loader.stats().storage.held_bytes < budget + 10_000
    loader.close()


def test_what_is_kept_comes_in_spite_of_faults_and_through_the_cache(
    corpus: Corpus, proxy: FaultProxy, tmp_path: Path
) -> None:
    storage = {"timeout": 1.0, "cache": {"path": str(tmp_path / "cache"), "limit": "100MB"}}
    expected = read(small(corpus, None), 60)
    proxy.rule = first(1, reset(5000))
    assert np.array_equal(read(small(corpus, proxy.options, storage=storage), 60), expected)
    assert len(proxy.asked(ending=".arrow")) == 20
    proxy.clear()
    proxy.rule = never
    assert np.array_equal(read(small(corpus, proxy.options, storage=storage), 60), expected)
    assert not proxy.asked(ending=".arrow")


def test_what_is_kept_is_asked_for_again_after_an_error(corpus: Corpus, proxy: FaultProxy) -> None:
    expected = read(small(corpus, None), 10)
    loader = fmsdata.build_loader(small(corpus, proxy.options, storage={"retries": 1, "timeout": 1.0}))
    proxy.rule = lambda request: answer(503, "SlowDown") if request.path.endswith("2.arrow") else delay(0)
    with pytest.raises(fmsdata.StorageError, match=r"2\.arrow.*SlowDown"):
        next(iter(loader))
    proxy.rule = never
    for step, batch in enumerate(islice(loader, 10)):
        assert np.array_equal(batch["input_ids"], expected[2 * step : 2 * step + 2])
    loader.close()


def test_what_is_kept_is_held_against_its_counts_and_its_version(object_store: ObjectStore, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    write_source(tmp_path / "c/web", documents(rng, 500, 100, 50), shards=1)
    write_index(tmp_path / "c")
    url = object_store.bucket("replaced")
    object_store.upload(tmp_path / "c", url)
    config = small(Corpus(tmp_path / "c", url, 0), object_store.options, sources={"web": {"weight": 1}})
    loader = fmsdata.build_loader(config)
    write_source(tmp_path / "c/web", documents(rng, 490, 100, 50), shards=1)
    object_store.upload(tmp_path / "c", url)
    with pytest.raises(fmsdata.StorageError, match="replaced during the run"):
        next(iter(loader))
    loader.close()
    loader = fmsdata.build_loader(config)
    with pytest.raises(fmsdata.CountsError, match="counts say 500 documents"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("world_size", [1, 2])  # with one rank, the source is fetched whole
def test_a_remote_stream_is_refused_at_any_world_size(
    object_store: ObjectStore, tmp_path: Path, world_size: int
) -> None:
    write_source(tmp_path / "c/web", documents(np.random.default_rng(1), 500, 100, 50), shards=1, stream=True)
    write_index(tmp_path / "c")
    url = object_store.bucket("streams")
    object_store.upload(tmp_path / "c", url)
    config = small(Corpus(tmp_path / "c", url, 0), object_store.options, sources={"web": {"weight": 1}})
    loader = fmsdata.build_loader(config, rank=0, world_size=world_size)
    with pytest.raises(fmsdata.DataError, match=r"web/part-0\.arrow: this is an Arrow stream.*local disk; rewrite"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("layout", ["list", "batch"])
def test_what_must_be_decoded_is_not_kept(tmp_path: Path, in_memory: str, layout: Any) -> None:
    """It would take more memory than its files do."""
    (tmp_path / "web").mkdir()
    rng = np.random.default_rng(4)
    many = [pa.array(rng.integers(0, 9, 300), pa.int32()) for _ in range(1500)]
    kind = pa.list_(pa.int32()) if layout == "list" else pa.int32()
    schema = pa.schema([("tokens", kind)])
    with pa.ipc.new_file(
        str(tmp_path / "web/a.arrow"), schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        for first in range(0, 1500, 100):
            some = many[first : first + 100]
            batches = (
                [[pa.array([one.to_pylist() for one in some], kind)]] if layout == "list" else [[one] for one in some]
            )
            for columns in batches:
                writer.write_batch(pa.record_batch(columns, schema=schema))
    put(tmp_path, in_memory)
    data = Corpus(tmp_path, in_memory, 0)
    more: dict[str, Any] = {"sources": {"web": {"weight": 1}}, "storage": {"prefetch_bytes": 1_000_000}}
    expected = read(small(data, None, **more), 60)
    loader = fmsdata.build_loader(small(data, {}, **more) | {"path": in_memory})
    for step, batch in enumerate(islice(loader, 60)):
        assert np.array_equal(batch["input_ids"], expected[2 * step : 2 * step + 2])
        assert loader.stats().storage.held_bytes < 1_100_000
    assert loader.stats().storage.requests > 20
    loader.close()
