"""Leases: two live runs never save to one folder, and a run that was killed stops nobody."""

import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fmsdata
from fmsdata import CheckpointError, Checkpoints, StatefulDataLoader
from fmsdata.run import lease
from fmsdata.run.lease_holder import Holder
from fmsdata.storage.connection import close_connections
from tests.helpers import maker
from tests.run.test_checkpoints import loaders
from tests.servers.object_store import ObjectStore

GROUP = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
ROOT = str(Path(__file__).parents[2])
TRAINER = f"""
import json, sys
sys.path.insert(0, {ROOT!r})
from pathlib import Path
from tests.helpers import maker
from fmsdata import Checkpoints, StatefulDataLoader

corpus, folder, options = sys.argv[1:4]
data = maker(Path(corpus), lanes=12)(0, 1).data
checkpoints = Checkpoints(folder, every=2, keep=2, **json.loads(options))
loader = StatefulDataLoader(data, batch_size=2, rank=0, world_size=1, prefetch=1, checkpoint=checkpoints)
for step, batch in enumerate(loader):
    print(loader.state_dict()["step"], flush=True)
    if sys.stdin.readline().strip() == "end":
        break
"""


class Trainer:
    """A run in a process of its own, which makes a step on request."""

    def __init__(self, corpus: Path, folder: Any, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(corpus), str(folder), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        assert self._next_line() == "1\n"

    def _next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def steps(self, count: int) -> None:
        """Make more steps. What is due before the last of them is saved then."""
        assert self.process.stdin is not None
        for _ in range(count):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            assert self._next_line()

    def end(self) -> str:
        """Leave the loop. What it wrote to stderr. The process does not wait for the next sign of life."""
        _, errors = self.process.communicate("end\n", timeout=lease.BEAT_SECONDS - 1)
        assert self.process.returncode == 0, errors
        return errors


@contextmanager
def trainer(
    corpus: Path, folder: Any, options: dict[str, Any] | None = None, environment: dict[str, str] | None = None
) -> Iterator[Trainer]:
    run = Trainer(corpus, folder, options or {}, environment or {})
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


@pytest.fixture
def data(corpus: Path) -> fmsdata.Rescalable:
    return maker(corpus, lanes=12)(0, 1).data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def _no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)


def wait_for(happened: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_more_step(loader: StatefulDataLoader) -> None:
    next(loader)


def test_a_second_run_is_refused_at_its_first_save_and_the_first_is_untouched(
    corpus: Path, data: fmsdata.Rescalable, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(corpus, folder) as first:
        first.steps(4)
        assert (folder / "step-4" / "complete").exists()
        before = contents(folder)
        (second,) = loaders(data, folder, 1, every=1, keep=1)
        assert f"in use by another run (process {first.process.pid} on {socket.gethostname()}" in caplog.text
        batches = iter(second)
        next(batches)
        with pytest.raises(CheckpointError) as refused:
            next(batches)
        for words in (f"process {first.process.pid} on", "sign of life", "nothing was written", "read_only=True"):
            assert words in str(refused.value)
        with pytest.raises(CheckpointError, match="in use by another run"):
            second.save()
        assert contents(folder) == before
        second.close()
        assert contents(folder) == before, "nor does it take the lease of the other with it"
        for other_world in loaders(data, folder, 3, read_only=True, every=1):
            next(other_world)
            next(other_world)
        assert contents(folder) == before

        first.steps(2)
        assert (folder / "step-6" / "complete").exists()
        assert "stopped at step 7" in first.end()
    assert not (folder / lease.NAME).exists(), "released when the process ended"
    second.load()
    one_more_step(second)
    second.save()
    second.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step-7"]


def test_a_run_is_restarted_at_once_after_a_kill(corpus: Path, data: fmsdata.Rescalable, folder: Path) -> None:
    """Even while the process is still in the table of processes, because nobody asked how it ended."""
    with trainer(corpus, folder) as first:
        first.steps(3)
        first.process.send_signal(signal.SIGKILL)
        wait_for(lambda: " Z " in Path(f"/proc/{first.process.pid}/stat").read_text())
        assert (folder / lease.NAME).exists()
        began = time.monotonic()
        (second,) = loaders(data, folder, 1)
        one_more_step(second)
        second.save()
        assert time.monotonic() - began < 20, "without waiting for signs of life"
        assert json.loads((folder / lease.NAME).read_text())["pid"] == os.getpid()
        second.close()
    assert not (folder / lease.NAME).exists()


def test_the_number_of_a_process_can_be_used_again(data: fmsdata.Rescalable, folder: Path) -> None:
    """A live process, but not the one that wrote the lease."""
    (loader,) = loaders(data, folder, 1)
    loader.save()
    alive = {**json.loads((folder / lease.NAME).read_text()), "pid": os.getppid(), "started": "1", "token": "other"}
    loader.close()
    (loader,) = loaders(data, folder, 1)
    one_more_step(loader)
    (folder / lease.NAME).write_text(json.dumps(alive))
    loader.save()
    stat = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    loader.close()
    (folder / lease.NAME).write_text(json.dumps({**alive, "started": stat[19]}))
    one_more_step(loader)
    with pytest.raises(CheckpointError, match=f"process {os.getppid()} on"):
        loader.save()


def elsewhere(folder: Path, beat: int = 1, age: float = 0.0) -> None:
    """A lease as a run on another machine writes it."""
    holder = Holder("far-away", "another machine", 4242, "1", "token", "", beat=beat, time=time.time() - age)
    folder.mkdir(exist_ok=True)
    (folder / "new").write_bytes(holder.to_bytes())
    (folder / "new").rename(folder / lease.NAME)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("clock", [0.0, 300.0, -300.0])
def test_a_run_on_another_machine_is_alive_while_its_count_changes(
    data: fmsdata.Rescalable, folder: Path, caplog: pytest.LogCaptureFixture, clock: float
) -> None:
    """Whatever its clock says."""
    elsewhere(folder, age=clock)
    (loader,) = loaders(data, folder, 1)
    bump = threading.Timer(0.3, elsewhere, args=(folder, 2, clock))
    bump.start()
    with pytest.raises(CheckpointError, match=r"in use by another run: process 4242 on far-away.*remove .*in-use.json"):
        loader.save()
    bump.join()
    assert "waiting up to" in caplog.text
    assert [path.name for path in folder.iterdir()] == [lease.NAME]


@pytest.mark.usefixtures("_impatient")
def test_a_run_on_another_machine_that_is_silent_is_over(data: fmsdata.Rescalable, folder: Path) -> None:
    elsewhere(folder)
    (loader,) = loaders(data, folder, 1)
    began = time.monotonic()
    loader.save()
    assert time.monotonic() - began > 1, "the node may be lost, or only slow"
    loader.close()
    elsewhere(folder)
    (loader,) = loaders(data, folder, 1)
    time.sleep(1.6)  # the run trains before it saves
    one_more_step(loader)
    began = time.monotonic()
    loader.save()
    assert time.monotonic() - began < 1, "it was watched since the start"
    loader.close()


def test_a_lease_that_is_long_over_by_any_clock_is_taken_at_once(data: fmsdata.Rescalable, folder: Path) -> None:
    elsewhere(folder, age=3600)
    (loader,) = loaders(data, folder, 1)
    began = time.monotonic()
    loader.save()
    assert time.monotonic() - began < 30
    loader.close()


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"pid": 1e999}', b"[" * 100_000, b"\xff\xfe", b'{"host": 1}'])
def test_a_file_that_is_no_lease_is_replaced(data: fmsdata.Rescalable, folder: Path, text: bytes) -> None:
    folder.mkdir()
    (folder / lease.NAME).write_bytes(text)
    (loader,) = loaders(data, folder, 1)
    loader.save()
    assert json.loads((folder / lease.NAME).read_text())["pid"] == os.getpid()
    loader.close()


def test_ranks_that_share_data_do_not_accuse_each_other(
    corpus: Path, data: fmsdata.Rescalable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in tensor parallelism: several processes are data-parallel rank 0 of one process group."""
    with trainer(corpus, folder, environment=GROUP) as first:
        first.steps(2)
        for name, value in GROUP.items():
            monkeypatch.setenv(name, value)
        (partner,) = loaders(data, folder, 1)
        one_more_step(partner)
        partner.save()
        partner.close()
        assert json.loads((folder / lease.NAME).read_text())["pid"] == first.process.pid

        monkeypatch.setenv("MASTER_PORT", "29512")
        before = contents(folder)
        for foreign in loaders(data, folder, 2):
            one_more_step(foreign)
            with pytest.raises(CheckpointError, match="in use by another run"):
                foreign.save()
        assert contents(folder) == before, "neither rank 0 of the other run has written, nor rank 1"
        first.process.kill()
        first.process.wait()
        for foreign in loaders(data, folder, 2):
            one_more_step(foreign)
            foreign.save()
            foreign.close()


def test_two_loaders_of_one_process_do_not_take_turns(data: fmsdata.Rescalable, folder: Path) -> None:
    (first,) = loaders(data, folder, 1)
    first.save()
    (second,) = loaders(data, folder, 1)
    one_more_step(second)
    second.save()  # as when the cell of a notebook is run again
    one_more_step(second)
    second.save()
    for _ in islice(first, 4):
        pass
    with pytest.raises(CheckpointError, match="another loader of this process has saved there since"):
        first.save()
    second.close()
    assert not (folder / lease.NAME).exists()
    first.save()
    first.close()


def test_the_count_goes_up_until_the_loader_is_gone(
    data: fmsdata.Rescalable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "TRUSTED_SECONDS", 0.0)
    file = folder / lease.NAME

    def beat() -> int:
        return int(json.loads(file.read_text())["beat"])

    (loader,) = loaders(data, folder, 1)
    loader.save()
    wait_for(lambda: beat() > 3)
    file.unlink()
    one_more_step(loader)
    time.sleep(0.2)
    loader.save()
    wait_for(lambda: beat() > 3)
    del loader
    gc.collect()
    wait_for(lambda: not file.exists())

    (loader,) = loaders(data, folder, 1)
    one_more_step(loader)
    loader.save()
    elsewhere(folder, beat=7)
    time.sleep(0.2)
    assert beat() == 7, "a lease that another run has taken is left alone"
    bump = threading.Timer(0.3, elsewhere, args=(folder, 8))
    bump.start()
    one_more_step(loader)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)
    with pytest.raises(CheckpointError, match="in use by another run"):
        loader.save()
    bump.join()
    loader.close()
    assert beat() == 8


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_leaves_the_lease_alone(data: fmsdata.Rescalable, folder: Path) -> None:
    (loader,) = loaders(data, folder, 1)
    one_more_step(loader)
    loader.save()
    before = contents(folder)
    child = os.fork()
    if child == 0:
        try:
            loader.close()
            lease._end_all()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert contents(folder) == before
    one_more_step(loader)
    loader.save()
    loader.close()
    assert not (folder / lease.NAME).exists()


def test_leases_work_on_object_stores(corpus: Path, data: fmsdata.Rescalable, object_store: ObjectStore) -> None:
    url = f"{object_store.bucket()}/run"
    options = {"storage_options": object_store.options}
    try:
        with trainer(corpus, url, options) as first:
            first.steps(3)
            before = object_store.list(url)
            assert lease.NAME in before
            (second,) = loaders(data, url, 1, **options)
            one_more_step(second)
            with pytest.raises(CheckpointError, match=f"in use by another run: process {first.process.pid} on"):
                second.save()
            assert object_store.list(url) == before
            first.end()
        assert lease.NAME not in object_store.list(url), "released when the process ended"
        second.save()
        assert lease.NAME in object_store.list(url)
        second.close()
        assert lease.NAME not in object_store.list(url)
    finally:
        close_connections()


def test_checkpoints_can_be_sent_to_another_process(data: fmsdata.Rescalable, folder: Path) -> None:
    (loader,) = loaders(data, folder, 1)
    loader.save()
    assert loader.checkpoint is not None
    sent = pickle.loads(pickle.dumps(loader.checkpoint))
    assert (str(sent), sent.every, sent.keep) == (str(folder), 5, 3)
    one_more_step(loader)
    loader.save()
    loader.close()
    assert not (folder / lease.NAME).exists()


def test_a_folder_that_is_only_read_has_no_lease(data: fmsdata.Rescalable, folder: Path) -> None:
    (loader,) = loaders(data, folder, 1, every=None)
    for _ in islice(loader, 3):
        pass
    Checkpoints(str(folder)).load(range(12))
    assert not folder.exists()
