"""The laws through real worker processes, and what happens when they die."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import fmsdata
from fmsdata import testing
from tests.helpers import CONFIG, documents, maker, worker_processes, write_source

ALL = ["document_ids", "position_ids", "cu_seqlens", "provenance", "epochs"]
START_METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := worker_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def contents(loader: Any, steps: int) -> list[Any]:
    """All that a trainer gets, and the state after each step."""
    seen = []
    for batch in islice(loader, steps):
        plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        seen.append((plain, loader.state_dict()))
    loader.close()
    return seen


@pytest.mark.parametrize("method", START_METHODS)
def test_batches_and_states_are_the_same_for_any_number_of_workers(corpus: Path, method: str) -> None:
    options: dict[str, Any] = {"loader__outputs": ALL, "loader__batch_size": 5, "lanes": 12}
    expected = contents(maker(corpus, **options, loader__prefetch=0)(1, 2), 60)
    for count in [1, 2, 3] if method == "fork" else [2]:
        make = maker(corpus, **options, loader__num_workers=count, loader__multiprocessing_context=method)
        assert contents(make(1, 2), 60) == expected


@pytest.mark.parametrize(
    "pack",
    [
        {"pack__mode": "pad", "pack__pad": 1, "pack__bol": 2, "pack__eol": 3, "documents__bos": 4},
        {"task": {"name": "causal_lm", "prompt_len": 3}, "pack__mode": "pad", "pack__pad": 0},
    ],
    ids=str,
)
def test_padding_and_outputs_survive_the_way_from_a_worker(corpus: Path, pack: dict[str, Any]) -> None:
    for outputs in ([], ALL):
        options = {**pack, "loader__outputs": outputs, "loader__batch_size": 4, "pack__seq_len": 40}
        assert contents(maker(corpus, **options, loader__num_workers=2)(0, 1), 40) == contents(
            maker(corpus, **options)(0, 1), 40
        )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_laws_1_to_4_hold_with_workers(corpus: Path, count: int) -> None:
    make = maker(corpus, loader__num_workers=count, lanes=6, loader__batch_size=2)
    testing.check_same_stream(
        maker(corpus, lanes=6),
        world_sizes=[2],
        samples=60,
        variants=[make, maker(corpus, lanes=6, loader__batch_size=7)],
    )
    testing.check_restore_anywhere(make, steps=7)
    testing.check_exactly_once(
        make,
        stored=testing.stored_documents({name: corpus / name for name in ("web", "wiki")}),
        world_sizes=[1, 2],
        steps=20,
        most_samples=4000,
    )


def test_workers_batch_size_and_world_size_change_at_every_resume(corpus: Path) -> None:
    """And the stream stays the one that a single process reads."""
    alone = (row.tolist() for batch in maker(corpus)(0, 1) for row in batch["input_ids"])
    states: list[Any] | None = None
    for turn, (world_size, count, batch_size) in enumerate([(2, 2, 3), (3, 0, 2), (1, 3, 6), (2, 1, 1), (4, 2, 3)]):
        make = maker(corpus, loader__num_workers=count, loader__batch_size=batch_size)
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states)
        ranks = [iter(loader) for loader in loaders]
        for step in range(5):
            rows = [next(rank)["input_ids"].tolist() for rank in ranks]
            for i in range(batch_size):
                for rank in range(world_size):
                    assert rows[rank][i] == next(alone), (turn, step, rank, i)
        states = [loader.state_dict() for loader in loaders]
        for loader in loaders:
            loader.close()
    assert states is not None
    assert states[0]["history"] == [[0, 2, 3], [5, 3, 2], [10, 1, 6], [15, 2, 1], [20, 4, 3]]


def test_lanes_that_were_left_behind_come_first_with_workers_too(corpus: Path) -> None:
    """After an odd world size some lanes are far behind: a worker may have no lines for rounds."""
    make = maker(corpus, lanes=8, loader__batch_size=3)
    loaders = [make(rank, 3) for rank in range(3)]
    for loader in loaders:
        for _ in islice(loader, 40):
            pass
    states = [loader.state_dict() for loader in loaders]
    seen = []
    for count in (0, 2):
        loader = maker(corpus, lanes=8, loader__batch_size=2, loader__num_workers=count)(0, 1)
        loader.load_state_dict(states)
        seen.append(contents(loader, 80))
    assert seen[0] == seen[1]


def test_a_state_is_of_the_batch_that_was_handed_out_not_of_what_was_read_ahead(corpus: Path) -> None:
    for count in (0, 2):
        loader = maker(corpus, loader__num_workers=count, loader__prefetch=8)(0, 1)
        batches = iter(loader)
        for step in range(1, 6):
            next(batches)
            time.sleep(0.1)
            assert loader.state_dict()["step"] == step
        state = loader.state_dict()
        expected = next(batches)["input_ids"]
        loader.load_state_dict(state)
        assert torch.equal(next(iter(loader))["input_ids"], expected)
        loader.close()


def test_four_workers_start_in_less_than_two_seconds_once_the_fork_server_has_imported(corpus: Path) -> None:
    """Measured in CPU time of all of them, which is what it takes if no other program runs."""
    contents(maker(corpus, loader__num_workers=1)(0, 1), 1)
    loader = maker(corpus, lanes=12, loader__num_workers=4)(0, 1)
    began = time.process_time()
    next(loader)
    trainer = time.process_time() - began
    workers = [process.cpu_times() for process in worker_processes()]
    assert len(workers) == 4
    assert trainer + sum(times.user + times.system for times in workers) < 2  # 0.1 s, if none of them imports again
    loader.close()


def test_fewer_lanes_than_workers_says_so_and_works(corpus: Path) -> None:
    with pytest.warns(
        fmsdata.FmsdataWarning, match="num_workers is 3, but rank 0 of 2 has 2 of the 4 lanes: it uses 2"
    ):
        loader = maker(corpus, lanes=4, loader__num_workers=3)(0, 2)
    assert loader.num_workers == 2
    assert contents(loader, 10) == contents(maker(corpus, lanes=4)(0, 2), 10)


@pytest.mark.filterwarnings("ignore:the same line iterates over an endless loader again")
def test_stopping_half_way_and_starting_again_goes_on(corpus: Path) -> None:
    expected = [batch["input_ids"].tolist() for batch in islice(maker(corpus)(0, 1), 40)]
    for persistent in (True, False):
        loader = maker(corpus, loader__num_workers=2, loader__persistent_workers=persistent)(0, 1)
        seen, pids = [], set()
        for stop in (7, 1, 12, 20):
            for taken, batch in enumerate(loader, 1):
                seen.append(batch["input_ids"].tolist())
                pids |= {child.pid for child in worker_processes()}
                if taken == stop:
                    break
            assert len(worker_processes()) == (2 if persistent else 0)
        assert seen == expected
        assert len(pids) == (2 if persistent else 8)
        loader.close()
        assert not worker_processes()
        assert next(iter(loader))["input_ids"].shape == (1, 16), "a loader that was closed can be used again"
        loader.close()


def test_an_endless_loader_has_no_length(corpus: Path) -> None:
    loader = maker(corpus)(0, 1)
    with pytest.raises(TypeError, match="no end"):
        len(loader)
    assert loader


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_that_is_dropped_takes_its_workers_with_it(corpus: Path, prefetch: int) -> None:
    loader = maker(corpus, loader__num_workers=2, loader__prefetch=prefetch)(0, 1)
    next(iter(loader))
    assert len(worker_processes()) == 2
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while worker_processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker_processes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("beside_another", [False, True])
def test_a_killed_worker_raises_and_the_loader_goes_on_where_it_was(
    corpus: Path, method: str, prefetch: int, beside_another: bool
) -> None:
    """Also beside a DataLoader of torch, whose signal handler raises when a worker dies."""
    if beside_another:
        assert next(iter(DataLoader(range(3), num_workers=1))) == 0  # type: ignore[arg-type]
    expected = [batch["input_ids"].tolist() for batch in islice(maker(corpus)(0, 1), 400)]
    loader = maker(corpus, loader__num_workers=2, loader__prefetch=prefetch, loader__multiprocessing_context=method)(
        0, 1
    )
    batches = iter(loader)
    seen = [next(batches)["input_ids"].tolist() for _ in range(20)]
    victim = worker_processes()[1]
    os.kill(victim.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(fmsdata.WorkerError) as raised:
        while True:
            seen.append(next(batches)["input_ids"].tolist())
    assert time.monotonic() - started < 15
    message = str(raised.value)
    assert f"process {victim.pid}" in message
    assert "worker 1 of 2" in message or "worker 0 of 2" in message
    assert "killed by SIGKILL" in message
    assert "reading source 'w" in message
    assert "part-" in message
    assert loader.state_dict()["step"] == len(seen)
    seen += [batch["input_ids"].tolist() for batch in islice(loader, 400 - len(seen))]
    assert seen == expected
    loader.close()


class Choosy(fmsdata.Stage):
    """Fails at the documents of one source, after some."""

    def __init__(self, below: fmsdata.Stage, error: str) -> None:
        super().__init__(below)
        self.error = error

    def transform(self, item: fmsdata.Item, key: int) -> list[fmsdata.Item]:  # noqa: ARG002
        if item.document == 15:
            if self.error == "exit":
                os._exit(3)
            if self.error == "local":

                class Local(Exception):
                    pass

                raise Local("this one can't be sent")
            raise {"value": ValueError, "memory": MemoryError, "stage": fmsdata.StageError}[self.error]("no 15, please")
        return [item]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("value", ValueError, "no 15, please"),
        ("memory", MemoryError, "no 15, please"),
        ("stage", fmsdata.StageError, "no 15, please"),
        ("local", RuntimeError, "can't be sent"),
        ("exit", fmsdata.WorkerError, r"exited with code 3: worker \d of \d, which was reading source 'web'"),
    ],
)
def test_an_error_in_a_worker_comes_at_the_same_batch_as_without_workers(
    tmp_path: Path, error: str, kind: type[Exception], words: str
) -> None:
    write_source(tmp_path / "web", documents(np.random.default_rng(0), 400, shortest=20), shards=1)

    def make(count: int) -> fmsdata.StatefulDataLoader:
        below = Choosy(fmsdata.ShardReader(tmp_path / "web"), error)
        data = fmsdata.Rescalable(fmsdata.Pack(below, seq_len=33), lanes=4, seed=1)
        return fmsdata.StatefulDataLoader(data, batch_size=2, num_workers=count, rank=0, world_size=1)

    steps = []
    for count in (1, 2) if error in ("exit", "local") else (0, 1, 2):
        loader = make(count)
        with pytest.raises(kind, match=words) as raised:
            for _ in loader:
                pass
        steps.append(loader.state_dict()["step"])
        if count and error not in ("exit", "stage"):
            assert any("Traceback" in note for note in raised.value.__notes__)
            assert any(f"of {count}" in note for note in raised.value.__notes__)
        loader.close()
    if error != "exit":
        assert len(set(steps)) == 1


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_can_not_be_sent_to_a_worker_is_named(corpus: Path, method: str) -> None:
    lock = threading.Lock()

    def locked(item: fmsdata.Item) -> fmsdata.Item:
        with lock:
            return item

    lines = fmsdata.Pack(fmsdata.Map(fmsdata.ShardReader(corpus / "web"), locked), seq_len=9)
    loader = fmsdata.StatefulDataLoader(
        fmsdata.Rescalable(lines, lanes=4), batch_size=1, num_workers=1, multiprocessing_context=method
    )
    with pytest.raises(fmsdata.ConfigError, match=rf"can't be sent.*'{method}': cannot pickle '_thread.lock'"):
        next(iter(loader))


def test_workers_leave_the_random_generators_alone(corpus: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = maker(corpus, loader__num_workers=2)(0, 1)
    for _ in islice(loader, 10):
        pass
    loader.close()
    assert torch.equal(before, torch.get_rng_state())


def test_sources_of_different_types_come_out_of_workers_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, dtype, low in (("web", np.uint8, 10), ("wiki", np.uint64, 3_000_000_000), ("code", np.int16, 300)):
        write_source(tmp_path / name, [rng.integers(low, low + 50, 9) for _ in range(20)], dtype=dtype)
    sources = {name: {"weight": 1} for name in ("web", "wiki", "code")}
    options: dict[str, Any] = {"sources": sources, "loader__batch_size": 8, "lanes": 6}
    assert contents(maker(tmp_path, **options, loader__num_workers=2)(0, 1), 30) == contents(
        maker(tmp_path, **options)(0, 1), 30
    )


def test_batches_from_workers_are_not_overwritten(corpus: Path) -> None:
    loader = maker(corpus, loader__num_workers=2, loader__batch_size=4)(0, 1)
    batches = [batch["input_ids"] for batch in islice(loader, 100)]
    loader.close()
    plain = [batch["input_ids"] for batch in islice(maker(corpus, loader__batch_size=4)(0, 1), 100)]
    assert all(torch.equal(batch, other) for batch, other in zip(batches, plain, strict=True))


SCRIPT = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.helpers import maker
import multiprocessing

if __name__ == "__main__":
    loader = maker(Path({corpus!r}), loader__num_workers=2, loader__multiprocessing_context={method!r})(0, 1)
    batches = iter(loader)
    next(batches)
    print(*loader.worker_pids, flush=True)
    {then}
"""


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("ending", ["interrupt", "kill", "terminate", "exit", "exception", "interrupt_while_reading"])
def test_however_the_trainer_ends_nothing_is_left_behind(corpus: Path, ending: str, method: str) -> None:
    before = shared_memory()
    then = {
        "exit": "sys.exit(3)",
        "exception": "raise ValueError('stop')",
        "interrupt_while_reading": "for _ in batches: pass",
    }.get(ending, "time.sleep(60)")
    script = SCRIPT.format(tests=str(Path(__file__).parents[2]), corpus=str(corpus), method=method, then=then)
    (corpus / "trainer.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(corpus / "trainer.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    children = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    if ending.startswith("interrupt"):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    elif ending == "kill":
        process.kill()
    elif ending == "terminate":
        process.terminate()
    if ending.startswith("interrupt"):  # Python drops an interrupt in a destructor
        deadline = time.monotonic() + 15
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # have it say where it hangs
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(process.communicate()[1])
    codes = {"interrupt": -2, "interrupt_while_reading": -2, "kill": -9, "terminate": -15, "exit": 3, "exception": 1}
    assert process.returncode == codes[ending], errors
    if ending.startswith("interrupt"):
        assert errors.count("Traceback") == 1, errors
        assert "KeyboardInterrupt" in errors
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    new = shared_memory() - before
    deadline = time.monotonic() + 60  # some may be of tests that run at the same time
    while new & shared_memory():
        assert time.monotonic() < deadline, new
        time.sleep(0.1)


def test_memory_and_files_are_reused_not_gathered(corpus: Path) -> None:
    loader = maker(corpus, loader__num_workers=2, loader__batch_size=4, loader__outputs=[])(0, 1)
    batches = iter(loader)
    for _ in islice(batches, 500):
        pass
    process = psutil.Process()
    files, maps = process.num_fds(), len(process.memory_maps(grouped=False))
    for _ in islice(batches, 3000):
        pass
    assert process.num_fds() <= files + 4  # one for the note of each worker, once it was looked at
    assert len(process.memory_maps(grouped=False)) <= maps + 10
    loader.close()


def test_the_demo_configuration_takes_all_loader_options(corpus: Path) -> None:
    options = {"num_workers": 1, "prefetch": 2, "persistent_workers": False, "multiprocessing_context": "fork"}
    loader = fmsdata.build_loader({**CONFIG, "path": str(corpus), "loader": options}, rank=0, world_size=1)
    assert next(iter(loader))["input_ids"].shape == (8, 16)
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_are_pinned_if_there_is_an_accelerator(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """There is none here, so torch's two functions are stood in for."""
    with pytest.warns(fmsdata.FmsdataWarning, match="pin_memory has no effect"):
        maker(corpus, loader__pin_memory=True)(0, 1)
    pinned: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader = maker(corpus, loader__pin_memory=True, loader__outputs=["provenance"], loader__num_workers=workers)(0, 1)
    batch = next(iter(loader))
    assert any(tensor is batch["input_ids"] for tensor in pinned)
    assert any(tensor is batch["labels"] for tensor in pinned)
    loader.close()


@pytest.mark.parametrize("count", [0, 2])
def test_a_loader_goes_on_in_a_forked_child(corpus: Path, count: int) -> None:
    loader = maker(corpus, loader__num_workers=count)(0, 1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        sender.send([batch["input_ids"].tolist() for batch in islice(loader, 5)])
        loader.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiver.poll(30)
    assert receiver.recv() == [batch["input_ids"].tolist() for batch in islice(loader, 5)]
    process.join(30)
    assert process.exitcode == 0
    loader.close()


def test_deaths_in_a_row_hold_nothing_and_print_nothing(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loader = maker(corpus, loader__num_workers=2)(0, 1)
    next(iter(loader))
    process = psutil.Process()
    files, threads = process.num_fds(), process.num_threads()
    for _ in range(6):
        os.kill(worker_processes()[0].pid, signal.SIGKILL)
        with pytest.raises(fmsdata.WorkerError):
            for _ in loader:
                pass
        next(iter(loader))
    deadline = time.monotonic() + 20
    while process.num_threads() > threads + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    gc.collect()
    held, alive = process.num_fds() - files, process.num_threads() - threads
    loader.close()
    assert held < 30, "some 26 for each death would be 156"
    assert alive <= 2
    assert "Exception ignored" not in capfd.readouterr().err


def test_a_loader_is_not_sent_or_copied(corpus: Path) -> None:
    loader = maker(corpus)(0, 1)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(fmsdata.ConfigError, match="send its `data` and its `state_dict"):
            copied(loader)
