"""Checkpoints and train states on object stores: what holds on a disk holds there, and when the store misbehaves."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import fmsdata
from fmsdata import CheckpointError, Checkpoints, FmsdataWarning, StatefulDataLoader, train_state
from fmsdata.storage.connection import close_connections
from tests.helpers import maker
from tests.run.test_checkpoints import loaders as checkpointed
from tests.servers.fault_proxy import (
    PASS,
    Action,
    FaultProxy,
    Request,
    Rule,
    always,
    answer,
    delay,
    faulty,
    first,
    lose,
    refuse,
    reset,
    shorten,
    throttle,
    truncate,
)
from tests.servers.object_store import KEY, SECRET, ObjectStore, S3Server, Server, storage_options

Rows = list[list[int]]
EVERY = 6  # steps of 2 lines: a multiple of the lanes at any world size, where the stream goes on in the same order


@pytest.fixture
def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=12)(0, 1).data


@pytest.fixture
def samples(data: fmsdata.Rescalable) -> Rows:
    """The canonical stream."""
    loader = StatefulDataLoader(data, batch_size=400, rank=0, world_size=1)
    batch = next(iter(loader))
    loader.close()
    rows: Rows = batch["input_ids"].tolist()
    return rows


@pytest.fixture(autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmsdata.storage.retry.FIRST_WAIT", 0.002)


def loaders(
    data: fmsdata.Rescalable, url: str, options: dict[str, Any], world_size: int, **settings: Any
) -> list[StatefulDataLoader]:
    told = {"every": EVERY, "keep": 2, "storage_options": options, **settings}
    return checkpointed(data, url, world_size, **told)


def run(some: list[StatefulDataLoader], steps: int) -> Rows:
    """All ranks step by step, as a trainer would; what they saw, in canonical order."""
    ranks = [iter(loader) for loader in some]
    seen: Rows = []
    for _ in range(steps):
        batches = [next(rank)["input_ids"].tolist() for rank in ranks]
        seen += chain.from_iterable(zip(*batches, strict=True))
    for loader in some:
        loader.close()
    return seen


def objects(store: Server, url: str) -> list[str]:
    """The names of all objects, without what depends on their content."""
    return sorted(re.sub(r"\.[0-9a-f]{8}\.[0-9]+\.json", "", name) for name in store.list(url))


def of_steps(steps: list[int], ranks: int) -> list[str]:
    names = [*(f"rank-{rank}-of-{ranks}" for rank in range(ranks)), "complete"]
    return sorted(f"step-{step}/{name}" for step in steps for name in names)


def test_a_run_saves_itself_prunes_and_goes_on_at_any_world_size(
    data: fmsdata.Rescalable, samples: Rows, any_store: Server
) -> None:
    url = f"{any_store.bucket()}/runs/7/loader"
    with FaultProxy(any_store.endpoint) as proxy:
        options = any_store.options_at(proxy.endpoint)
        assert run(loaders(data, url, options, 2), 20) == samples[:80]
        assert objects(any_store, url) == of_steps([12, 18], 2)
        assert run(loaders(data, url, options, 4), 8) == samples[72:136], "from 18 steps of 4 lines on"
        assert objects(any_store, url) == of_steps([18], 2) + of_steps([24], 4)
        assert run(loaders(data, url, options, 1), 7) == samples[120:134], "6 steps of 8 lines later"
        assert run(loaders(data, url, options, 6), 1) == samples[132:144], "6 steps of 2 lines later"
        assert objects(any_store, url) == of_steps([24], 4) + of_steps([30], 1)
        close_connections()
        assert {record.request.method for record in proxy.records} == {"GET", any_store.writes, "DELETE"}, (
            "one object at a time"
        )
        conditions = {"if-none-match", "if-match"}
        assert not [one for one in proxy.records if conditions & {name.lower() for name in one.request.headers}]
        assert {record.status // 100 for record in proxy.records} == {2}


def test_a_checkpoint_is_found_by_few_requests(
    data: fmsdata.Rescalable, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    """However many older ones there are."""
    url = object_store.bucket()
    run(loaders(data, url, proxy.options, 2, every=1, keep=None), 15)
    proxy.clear()
    (loader,) = loaders(data, url, proxy.options, 1, keep=None)
    assert len(proxy.records) == 4, "the steps, the files of the newest, and both of them"
    next(iter(loader))
    proxy.clear()
    loader.save()
    assert len(proxy.asked("PUT")) == 3, "the state, the mark, and the lease of this run"
    assert len(proxy.asked("GET")) == 4, "is there a lease, the files of the step, the steps, is it the newest"
    next(iter(loader))
    proxy.clear()
    loader.save()
    assert len(proxy.asked("PUT")) == 2
    assert len(proxy.asked("GET")) == 3, "what is in the step, which steps there are, and whether it is the newest"
    loader.close()


def test_ranks_that_save_at_the_same_time_do_not_disturb_each_other(
    data: fmsdata.Rescalable, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    url = object_store.bucket()
    proxy.rule = always(delay(0.01))
    ranks = loaders(data, url, proxy.options, 6, every=None, keep=1)
    batches = [iter(loader) for loader in ranks]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            for one in batches:
                next(one)
            assert len(list(pool.map(StatefulDataLoader.save, ranks))) == 6
    for loader in ranks:
        loader.close()
    assert objects(object_store, url) == of_steps([4], 6)
    assert Checkpoints(url, storage_options=proxy.options).is_complete(4)


def test_a_torn_object_gives_way_to_the_checkpoint_before(data: fmsdata.Rescalable, object_store: ObjectStore) -> None:
    url = object_store.bucket()
    run(loaders(data, url, object_store.options, 2), 13)
    torn = next(name for name in object_store.list(url) if name.startswith("step-12/rank-1"))
    object_store.put(f"{url}/{torn}", object_store.get(f"{url}/{torn}")[:-1])
    with pytest.warns(
        FmsdataWarning, match=r"resuming from s3://.*step-6: step-12 can't be used, a file has the wrong size"
    ):
        (loader,) = loaders(data, url, object_store.options, 1)
    assert loader.state_dict()["step"] == 6


FAULTS = {
    "busy": answer(503, "SlowDown"),
    "too many": answer(429, "TooManyRequests"),
    "broken": answer(500, "InternalError"),
    "refused": refuse(),
    "lost answer": lose(),
    "reset": reset(after=40),
    "truncated": truncate(after=40),
    "shortened": shorten(after=40),
}


@pytest.mark.usefixtures("_impatient")
def test_a_fault_that_passes_changes_nothing(
    data: fmsdata.Rescalable, samples: Rows, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    """Each request fails twice before it succeeds: those that save, those that prune and those that load."""
    for name, fault in FAULTS.items():
        url = f"{object_store.bucket()}/{name}"
        proxy.clear()
        proxy.rule = first(2, fault)
        assert run(loaders(data, url, proxy.options, 2, keep=1), 13) == samples[:52], name
        assert objects(object_store, url) == of_steps([12], 2), name
        assert run(loaders(data, url, proxy.options, 3, keep=1), 1) == samples[48:54], name
        assert {one.request.method for one in proxy.records if one.action == fault} == {"GET", "PUT", "DELETE"}


@pytest.mark.usefixtures("_impatient")
def test_many_faults_change_nothing(
    data: fmsdata.Rescalable, samples: Rows, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    url = object_store.bucket("many-faults")
    proxy.rule = faulty(0.25, seed=5)
    at = 0
    for world_size in (2, 4, 1, 3):
        some = loaders(data, url, proxy.options, world_size, every=1)
        assert run(some, EVERY + 1) == samples[at : at + 2 * world_size * (EVERY + 1)]
        at += 2 * world_size * EVERY  # the last step is not saved: the trainer may still be at work on it
    assert len(Checkpoints(url, storage_options=proxy.options).steps()) == 2
    assert sum(record.action != PASS for record in proxy.records) > 50


@pytest.mark.usefixtures("_impatient")
def test_a_store_that_stays_busy_is_an_error_and_the_loader_can_save_later(
    data: fmsdata.Rescalable, samples: Rows, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    url = object_store.bucket()
    (loader,) = loaders(data, url, proxy.options, 1)
    batches = iter(loader)
    for _ in range(12):
        next(batches)
    before = object_store.list(url)
    proxy.rule = always(answer(503, "SlowDown"))
    reason = rf"{url}/step-12/rank-0-of-1\..* could not be written in 9 attempts .*503 SlowDown.*can be resumed"
    with pytest.raises(CheckpointError, match=reason):
        next(batches)
    assert object_store.list(url) == before
    proxy.rule = always(PASS)
    assert loader.save() == f"{url}/step-12"
    loader.close()
    assert run(loaders(data, url, proxy.options, 1), 1) == samples[24:26]


def test_a_save_outlives_a_restart_of_the_store(data: fmsdata.Rescalable, samples: Rows, tmp_path: Path) -> None:
    with ObjectStore(tmp_path / "store") as store:
        url = store.bucket()
        (loader,) = loaders(data, url, store.options, 1)
        for _ in zip(range(6), loader, strict=False):
            pass
        store.stop()
        later = threading.Timer(0.7, store.start)
        later.start()
        loader.save()
        later.join()
        loader.close()
        assert run(loaders(data, url, store.options, 1), 1) == samples[12:14]


def test_wrong_credentials_are_told_before_the_run_starts(data: fmsdata.Rescalable, s3_store: S3Server) -> None:
    url = s3_store.bucket()
    options = storage_options(s3_store.endpoint, s3_store.key, "not-the-secret")
    reason = rf"{url} can't be listed: access is denied: 403 SignatureDoesNotMatch.*check the credentials"
    with pytest.raises(CheckpointError, match=reason) as error:
        loaders(data, url, options, 1)
    assert "not-the-secret" not in str(error.value)
    with pytest.raises(CheckpointError, match="403"):
        loaders(data, url, storage_options(s3_store.endpoint, "tests:nobody"), 1)


def test_a_missing_bucket_is_told_before_the_run_starts(data: fmsdata.Rescalable, any_store: Server) -> None:
    (loader,) = loaders(data, any_store.bucket(), any_store.options, 1)
    state = train_state.build(loader, step=0, tokens_seen=0)
    url = f"{any_store.scheme}://no-such-bucket/run"
    reason = rf"{url}.* there is no such bucket; check the bucket's name"
    with pytest.raises(CheckpointError, match=reason):
        loaders(data, url, any_store.options, 1)
    with pytest.raises(CheckpointError, match=reason):
        train_state.load(url, storage_options=any_store.options)
    with pytest.raises(CheckpointError, match=reason):
        train_state.save(url, state, storage_options=any_store.options)


def test_who_may_read_but_not_write_is_told_at_the_first_save(
    data: fmsdata.Rescalable, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    url = object_store.bucket()
    (loader,) = loaders(data, url, proxy.options, 1)
    proxy.rule = lambda request: answer(403, "AccessDenied") if request.method == "PUT" else PASS
    with pytest.raises(CheckpointError, match=r"step-0/rank-0.* can't be written: access is denied.*policy allows"):
        loader.save()
    assert len(proxy.asked("PUT")) == 1, "it is of no use to try again"


def test_a_train_state_comes_back_at_another_world_size(
    data: fmsdata.Rescalable, samples: Rows, any_store: Server
) -> None:
    url = f"{any_store.bucket()}/step 500"
    ranks = loaders(data, "memory://none", {}, 2, every=None)
    assert run(ranks, 3) == samples[:12]  # one line of each lane
    for loader in ranks:
        extra = {"weights": torch.arange(5) + loader.rank}
        state = train_state.build(loader, step=3, tokens_seen=99, extra=extra)
        name = train_state.save(url, state, storage_options=any_store.options)
        assert name == f"{url}/train-{loader.rank}-of-2.pt"
    again = loaders(data, "memory://none", {}, 4, every=None)
    for loader in again:
        restored = train_state.restore(train_state.load(url, loader, storage_options=any_store.options), loader)
        assert restored[:2] == (3, 99)
        assert restored.extra["weights"].tolist() == [0, 1, 2, 3, 4]
    assert run(again, 1) == samples[12:20]


@pytest.mark.usefixtures("_impatient")
def test_a_train_state_is_whole_though_the_store_is_not_well(
    data: fmsdata.Rescalable, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    (loader,) = loaders(data, "memory://none", {}, 1, every=None)
    weights = torch.arange(100_000)
    state = train_state.build(loader, step=0, tokens_seen=0, extra={"weights": weights})
    for name, fault in FAULTS.items():
        url = f"{object_store.bucket()}/{name}"
        proxy.rule = first(2, fault)
        train_state.save(url, state, storage_options=proxy.options)
        (found,) = train_state.load(url, storage_options=proxy.options)
        assert found["extra"]["weights"].equal(weights), name


TRAINERS = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from tests.helpers import maker
from fmsdata import train_state
from tests.servers.object_store import storage_options
from tests.run.test_checkpoints_s3 import loaders, run

options = storage_options({endpoint!r})

def train(url):
    some = loaders(maker(Path({corpus!r}), lanes=12)(0, 1).data, url, options, 2, keep=1)
    if not url.endswith("train-state"):
        run(some, 20)
    for step in (1, 2):
        state = train_state.build(some[0], step=step, tokens_seen=0, extra={{"weights": torch.full((1 << 20,), step)}})
        train_state.save(url, state | {{"world_size": 1}}, storage_options=options)

for url in sys.argv[1:]:  # a process for each
    pid = os.fork()
    if not pid:
        train(url)
        os._exit(0)
    print(pid, flush=True)
for _ in sys.argv[1:]:
    print(*os.wait(), flush=True)
"""


class Trainers:
    """Real processes that train, each with a folder of its own, until they are killed one by one."""

    def __init__(self, program: Path, urls: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, program, *urls], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout
        self._told = self._process.stdout
        self._pids = {url: int(self._told.readline()) for url in urls}

    def kill(self, url: str) -> None:
        os.kill(self._pids[url], signal.SIGKILL)
        assert self._told.readline() == f"{self._pids[url]} {signal.SIGKILL:d}\n", "it was at work until now"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=10)


class Held:
    """A rule that keeps one request of each folder for good, and tells when it is there."""

    def __init__(self, requests: dict[str, tuple[str, str]], otherwise: Rule) -> None:
        self._requests, self._otherwise = requests, otherwise
        self.there = {url: threading.Event() for url in requests}

    def __call__(self, request: Request) -> Action:
        for url, (method, part) in self._requests.items():
            if request.method == method and f"/{request.path}".startswith(f"{url.removeprefix('s3:')}/{part}"):
                self.there[url].set()
                return delay(60)
        return self._otherwise(request)


def slow_second_time(request: Request) -> Action:
    """8 MB take 4 seconds then."""
    return throttle(2e6) if request.method == "PUT" and request.path.endswith(".pt") and request.attempt else PASS


def test_a_kill_in_the_middle_of_a_write_leaves_something_to_go_on_from(
    corpus: Path,
    data: fmsdata.Rescalable,
    samples: Rows,
    object_store: ObjectStore,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    bucket = object_store.bucket()
    writing, marking, unmarking, removing, state = (
        f"{bucket}/{name}" for name in ("writing", "marking", "unmarking", "removing", "train-state")
    )
    proxy.rule = held = Held(
        {
            writing: ("PUT", "step-12/rank-1"),
            marking: ("PUT", "step-12/complete"),
            unmarking: ("DELETE", "step-6/complete"),
            removing: ("DELETE", "step-6/rank-1"),
        },
        otherwise=slow_second_time,
    )
    program = tmp_path / "trainers.py"
    tests = str(Path(__file__).parents[2])
    program.write_text(TRAINERS.format(tests=tests, corpus=str(corpus), endpoint=proxy.endpoint))
    end = time.monotonic() + 60
    with Trainers(program, [*held.there, state]) as trainers:
        while not any(one.action.rate and one.received > 1e6 for one in proxy.records):
            assert time.monotonic() < end
            time.sleep(0.01)
        trainers.kill(state)
        for url, there in held.there.items():
            assert there.wait(60)
            trainers.kill(url)

    lease = "in-use.json"  # of a process that is gone, so nobody is kept from the folder
    assert {url: objects(object_store, url) for url in held.there} == {
        writing: sorted([lease, *of_steps([6], 2), "step-12/rank-0-of-2"]),
        marking: sorted([lease, *of_steps([6], 2), "step-12/rank-0-of-2", "step-12/rank-1-of-2"]),
        unmarking: [lease, *of_steps([6, 12], 2)],
        removing: sorted([lease, *of_steps([12], 2), "step-6/rank-1-of-2"]),
    }
    with pytest.warns(FmsdataWarning, match=r"resuming from .*step-6: step-12 .* rank 1 of 2 is missing"):
        some = loaders(data, writing, object_store.options, 3, keep=1)
    assert run(some, 13) == samples[24:102]
    assert objects(object_store, writing) == of_steps([18], 3)
    for url in (marking, unmarking, removing):
        assert run(loaders(data, url, object_store.options, 3, keep=1), 13) == samples[48:126]
        assert objects(object_store, url) == of_steps([24], 3), "what the kill left is gone"

    (cut,) = (one for one in proxy.records if one.action.rate)
    assert 1e6 < cut.received < 8e6
    (found,) = train_state.load(state, storage_options=object_store.options)
    assert found["extra"]["weights"].equal(torch.ones(1 << 20, dtype=torch.int64)), "as it was before"
    assert list(object_store.list(state)) == ["train-0-of-1.pt"]


def test_no_secret_is_in_what_is_saved(data: fmsdata.Rescalable, object_store: ObjectStore) -> None:
    url = object_store.bucket()
    run(loaders(data, url, object_store.options, 1), 7)
    for name in object_store.list(url):
        content = object_store.get(f"{url}/{name}")
        assert SECRET.encode() not in content
        assert KEY.encode() not in content
