"""Loaders beside other loaders, threads and processes: the same stream, and no hang."""

import json
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader

import fmsdata
from fmsdata.core.fork_gate import ForkGate
from fmsdata.loader.fork_server import ForkServer
from tests.helpers import documents, maker, worker_processes, write_source
from tests.programs.launch import run
from tests.servers.object_store import ObjectStore

ROOT = Path(__file__).parents[2]
STARTS = 5


@pytest.fixture
def large(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for name in ("web", "wiki"):
        write_source(tmp_path / name, documents(rng, 2000, shortest=2))
    return tmp_path


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_start_beside_threads_that_never_stop(large: Path, object_store: ObjectStore, method: str) -> None:
    """Two loaders and a reader of an object store plan all the time, and a logger logs."""
    url = object_store.bucket("beside") + "/web"
    object_store.upload(large / "web", url)
    remote = {"url": url, "options": object_store.options}
    task = json.dumps([str(large), remote, method, STARTS if method != "spawn" else 2, method != "fork"])
    printed = run(["-m", "tests.programs.worker_starts"], task, cwd=ROOT).split()
    alone = run(
        ["-m", "tests.programs.worker_starts"], json.dumps([str(large), None, "forkserver", 1, False]), cwd=ROOT
    )
    assert set(printed) == set(alone.split())
    assert len(printed) == (STARTS if method != "spawn" else 2)


STARTING = """
import faulthandler, threading
from itertools import islice
import fmsdata

def build(**options):
    lines = fmsdata.Shuffle(fmsdata.Pack(fmsdata.ShardReader("web"), seq_len=17), window=64)
    return fmsdata.StatefulDataLoader(fmsdata.Rescalable(lines, lanes=12, seed=1), batch_size=3, **options)

def read(loader):
    rows = [batch["input_ids"].tolist() for batch in islice(iter(loader), 4)]
    loader.close()
    return rows

def start_again_and_again():
    while not stop.is_set():
        read(build())

faulthandler.dump_traceback_later(200, exit=True)
stop = threading.Event()
expected = read(build())
threads = [threading.Thread(target=start_again_and_again) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(6):
    print(read(build(num_workers=2, multiprocessing_context="fork")) == expected)
stop.set()
for thread in threads:
    thread.join()
"""


def test_forked_workers_start_beside_loaders_that_begin_all_the_time(large: Path) -> None:
    """A loader that begins computes, under locks, what it later only looks up."""
    assert run(["-c", STARTING], cwd=large).split() == ["True"] * 6


def test_a_fork_waits_until_threads_of_the_package_are_quiet() -> None:
    """A thread inside a gate holds a lock now and then: no child ever inherits it locked."""
    gate, lock, stop = ForkGate(), threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with gate, lock:
                time.sleep(0.001)
            time.sleep(0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if lock.acquire(timeout=5) else 1)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_a_thread_may_fork_from_inside_its_own_gate() -> None:
    with ForkGate():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0


SCRIPT = """
import fmsdata

class Reverse(fmsdata.Stage):                 # a class of the script, and no `if __name__ == "__main__"`
    def transform(self, item, key):
        yield item.replace(item.tokens[::-1])

suffix = 7
docs = fmsdata.Map(Reverse(fmsdata.ShardReader("web")), lambda item: item.replace(list(item.tokens) + [suffix]))
data = fmsdata.Rescalable(fmsdata.Pack(docs, seq_len=33), lanes=4, seed=1)
sums = []
for workers in (0, 2):
    loader = fmsdata.StatefulDataLoader(data, batch_size=2, num_workers=workers)
    sums.append([int(batch["input_ids"].sum()) for _, batch in zip(range(6), loader)])
    loader.close()
print(sums[0] == sums[1], len(set(sums[0])) > 1)
"""


def test_a_script_without_a_main_guard_uses_its_own_classes_and_lambdas(large: Path) -> None:
    (large / "script.py").write_text(SCRIPT)
    assert run(Path("script.py"), cwd=large).split() == ["True", "True"]
    assert run(["-c", SCRIPT], cwd=large).split() == ["True", "True"], "a notebook's cells have no file either"


OWN_ERROR = """
import fmsdata

class NotThisOne(Exception):
    pass

def refuse(item):
    raise NotThisOne("no")

data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader("web"), refuse), seq_len=33), lanes=4)
loader = fmsdata.StatefulDataLoader(data, batch_size=2, num_workers=1)
try:
    next(iter(loader))
except NotThisOne as error:
    print("caught", error)
"""


def test_an_exception_class_of_the_script_arrives_as_itself(large: Path) -> None:
    (large / "script.py").write_text(OWN_ERROR)
    assert run(Path("script.py"), cwd=large).split() == ["caught", "no"]


def test_a_module_that_a_worker_can_not_import_is_named(large: Path) -> None:
    script = """
        import sys, types
        import fmsdata
        module = types.ModuleType("made_by_hand")
        exec("def same(item): return item", module.__dict__)
        sys.modules["made_by_hand"] = module
        lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader("web"), module.same), seq_len=33)
        loader = fmsdata.StatefulDataLoader(fmsdata.Rescalable(lines, lanes=4), batch_size=2, num_workers=2)
        try:
            next(iter(loader))
        except fmsdata.ConfigError as error:
            print(error)
    """
    printed = run(["-c", textwrap.dedent(script)], cwd=large)
    assert "No module named 'made_by_hand'" in printed
    assert "must be in a module that workers can import" in printed


def read(loader: Any, steps: int = 6) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in islice(loader, steps)]


def test_loaders_in_threads_each_have_their_stream(corpus: Path) -> None:
    make = maker(corpus, loader__num_workers=1)
    expected = read(maker(corpus)(0, 1))
    seen: dict[int, Any] = {}

    def work(number: int) -> None:
        loader = make(0, 1)
        seen[number] = read(loader)
        loader.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(seen.values()) == [expected] * 4


def test_all_loaders_of_a_process_share_a_fork_server_and_a_dead_one_is_replaced(corpus: Path) -> None:
    expected = read(maker(corpus)(0, 1))
    first, second = (maker(corpus, loader__num_workers=1)(0, 1) for _ in range(2))
    assert read(first) == read(second) == expected
    parents = {worker.ppid() for worker in worker_processes()}
    assert len(parents) == 1
    psutil.Process(parents.pop()).kill()
    for loader in (first, second):
        with pytest.raises(fmsdata.WorkerError, match="ended in an unknown way"):
            for _ in loader:
                pass
        loader.close()
    third = maker(corpus, loader__num_workers=1)(0, 1)
    assert read(third) == expected
    third.close()


@pytest.mark.filterwarnings("ignore:the same line iterates over an endless loader again")
@pytest.mark.parametrize("options", [{"loader__prefetch": 0}, {}, {"loader__num_workers": 1}], ids=str)
def test_threads_that_share_a_loader_get_each_batch_once(corpus: Path, options: dict[str, Any]) -> None:
    expected = [batch["input_ids"].tolist() for batch in islice(maker(corpus)(0, 1), 80)]
    loader = maker(corpus, **options)(0, 1)
    seen: list[Any] = []

    def consume(batches: int) -> None:
        seen.extend(next(loader)["input_ids"].tolist() for _ in range(batches // 2))
        seen.extend(batch["input_ids"].tolist() for batch in islice(loader, batches // 2))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(consume, batches) for batches in (10, 16, 24, 30)]:
            done.result(60)
    assert sorted(seen) == sorted(expected)
    assert loader.state_dict()["step"] == 80
    loader.close()


def test_workers_see_the_environment_and_folder_of_the_moment_they_start(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ForkServer.shared()
    monkeypatch.setenv("SET_AFTER_THE_SERVER", "21")
    monkeypatch.chdir(corpus)

    def tell(item: fmsdata.Item) -> fmsdata.Item:
        return item.replace([int(os.environ["SET_AFTER_THE_SERVER"]) + (Path.cwd() == corpus)] * len(item))

    lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader("web"), tell), seq_len=9)
    loader = fmsdata.StatefulDataLoader(fmsdata.Rescalable(lines, lanes=4), batch_size=2, num_workers=1)
    assert next(iter(loader))["input_ids"].unique().tolist() == [22]
    loader.close()


def test_forked_workers_of_torch_beside_a_reading_thread_do_not_hang(corpus: Path) -> None:
    """torch forks from a process in which a loader of ours reads ahead all the time."""
    stop = threading.Event()
    beside = maker(corpus)(0, 1)

    def consume() -> None:
        for _ in beside:
            if stop.is_set():
                break

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        data = maker(corpus, lanes=4)(0, 1).data
        for _ in range(4):
            batches = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
            assert len(list(islice(batches, 4))) == 4
    finally:
        stop.set()
        thread.join()
        beside.close()


DAEMON = """
import multiprocessing, sys
import fmsdata

def read(method, answers):
    lines = fmsdata.Pack(fmsdata.ShardReader("web"), seq_len=33)
    loader = fmsdata.StatefulDataLoader(
        fmsdata.Rescalable(lines, lanes=4), batch_size=2, num_workers=1, multiprocessing_context=method
    )
    try:
        answers.send(next(loader)["input_ids"].tolist())
        loader.close()
    except fmsdata.ConfigError as error:
        answers.send(str(error))

context = multiprocessing.get_context("fork")
for method in ("forkserver", "fork"):
    ours, theirs = context.Pipe()
    context.Process(target=read, args=(method, theirs), daemon=True).start()
    print(ours.recv())
"""


def test_a_daemon_process_has_workers_or_says_how(large: Path) -> None:
    rows, message = run(["-c", DAEMON], cwd=large).splitlines()
    assert rows.startswith("[[")
    assert "this is a daemon process of multiprocessing" in message
    assert "use 'forkserver', which is the default" in message


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while worker_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker_processes()


TORCH = """
import sys
from torch.utils.data import DataLoader
import fmsdata

if __name__ == "__main__":
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.ShardReader("web"), seq_len=33), lanes=4)
    method = sys.argv[1] or None
    for batch in DataLoader(data, batch_size=8, num_workers=1 if method else 0, multiprocessing_context=method):
        print(*sorted(batch))
        break
"""


@pytest.mark.parametrize("method", ["", "spawn"])
def test_samples_are_collated_in_a_process_that_uses_nothing_else_of_the_package(large: Path, method: str) -> None:
    script = large / "script.py"
    script.write_text(TORCH)
    assert run(script, method, cwd=large).split() == ["input_ids", "labels"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_a_stage_does_not_end_the_stream(corpus: Path, workers: int) -> None:
    def exhausted(item: fmsdata.Item) -> fmsdata.Item:
        return next(iter([])) if item.document == 5 else item

    lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader(corpus / "web"), exhausted), seq_len=9)
    loader = fmsdata.StatefulDataLoader(fmsdata.Rescalable(lines, lanes=4), batch_size=2, num_workers=workers)
    with pytest.raises(fmsdata.StageError, match="raised StopIteration"):
        while True:
            next(loader)
    loader.close()


@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (1, "forkserver"), (1, "fork")])
def test_a_shard_that_changes_between_two_iterations_is_an_error_each_time(
    large: Path, workers: int, method: str
) -> None:
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.ShardReader(large / "web"), seq_len=33), lanes=4)
    loader = fmsdata.StatefulDataLoader(data, batch_size=8, num_workers=workers, multiprocessing_context=method)
    for _ in range(60):
        next(loader)
    loader.close()
    for path in (large / "web").iterdir():
        with path.open("r+b") as file:
            file.write(path.read_bytes())
        os.utime(path, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(fmsdata.DataError, match="was written to during the run"):
            for _ in range(200):
                next(loader)
    loader.close()
