"""The training example under the real torchrun: killed and resumed on other ranks, with the same result."""

import fcntl
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import fmsdata
from fmsdata.cli.demo import write_corpus
from tests.examples.helpers import EXAMPLES, imported, run_alone

ROOT = Path(__file__).parents[2]
SCRIPT = EXAMPLES / "kill_and_rescale.py"
CONFIG = ROOT / "configs" / "train-demo.yaml"
STEPS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the demo, with evaluations within these few steps."""
    return edited(tmp_path_factory.mktemp("config"), evaluate_every=4)


def edited(folder: Path, **train: Any) -> Path:
    config = yaml.safe_load(CONFIG.read_text())
    config["train"] |= train
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def example(config: Path) -> Any:
    """The functions that start the example and kill it."""
    example = imported("kill_and_rescale")
    example.CONFIG = config
    return example


@pytest.fixture(scope="module")
def alone(data: Path, config: Path, example: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The steps of a run on 1 rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    options = {"--config": config, "--data": data, "--out": folder, "--steps": STEPS, "--every": STEPS}
    run_alone("train", options)
    return {entry.step: entry for entry in example.steps_of(folder)}


def check(steps: list[Any], alone: dict[int, Any]) -> None:
    assert {entry.step for entry in steps} == set(alone) == set(range(STEPS))
    for entry in steps:
        assert entry.sha256 == alone[entry.step].sha256
        assert entry.loss == pytest.approx(alone[entry.step].loss, abs=1e-4)
        assert (entry.evaluation is None) == ((entry.step + 1) % 4 > 0)
        assert entry.evaluation == pytest.approx(alone[entry.step].evaluation, abs=1e-4)


def test_the_batches_are_those_of_the_plain_loader(data: Path, alone: dict[int, Any]) -> None:
    config = yaml.safe_load(CONFIG.read_text())
    overrides = {"path": str(data), "loader.batch_size": config["train"]["global_batch"]}
    loader = fmsdata.build_loader(config["data"], overrides, rank=0, world_size=1)
    for step, batch in enumerate(islice(loader, STEPS)):
        assert hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest() == alone[step].sha256
    loader.close()


def test_ddp_killed_in_the_middle_of_a_save_resumes_with_fsdp_on_other_ranks(
    data: Path, example: Any, alone: dict[int, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def is_saving_again() -> bool:
        return any(run.glob("step-*")) and any(run.glob("unfinished-*"))

    example.train(2, run, data, "--steps", str(STEPS), "--every", "2", kill_when=is_saving_again)
    assert len(example.steps_of(run)) < STEPS
    example.train(3, run, data, "--steps", str(STEPS), "--every", "3", "--parallel", "fsdp")
    check(example.steps_of(run), alone)
    assert sorted(path.name for path in run.iterdir()) == ["lock", "log.jsonl", "step-6", f"step-{STEPS}"]


def test_fsdp_resumes_on_other_ranks(data: Path, example: Any, alone: dict[int, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    example.train(2, run, data, "--steps", "3", "--parallel", "fsdp")
    example.train(4, run, data, "--steps", str(STEPS), "--parallel", "fsdp")
    assert [(entry.step, entry.world_size) for entry in example.steps_of(run)] == [
        (step, 2 if step < 3 else 4) for step in range(STEPS)
    ]
    check(example.steps_of(run), alone)


def test_the_loss_of_an_evaluation_is_exact_and_reports_are_of_all_ranks(data: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 the model stays the same, so that only the evaluation can differ."""
    train, processes = imported("train"), imported("processes")
    path = edited(tmp_path, lr=0.0, report_every=2, evaluate_every=2)
    processes.torchrun(3, "train.py", tmp_path / "run", "--config", path, "--data", data, "--steps", "2")
    (entry,) = (entry for entry in processes.entries(tmp_path / "run") if "evaluation" in entry)
    report, evaluation = (tmp_path / "run.txt").read_text().splitlines()[-2:]
    number = r"[\d.,]+"
    source = rf"{number}% \(planned {number}%\)"
    pattern = rf"step 2: loss {number}, {number} tokens/s, waited {number}% of the time for data"
    assert re.fullmatch(rf"{pattern}; code {source}, docstrings {source}", report)
    assert "code 100" not in report
    assert evaluation == f"step 2: evaluation loss {entry['evaluation']:.4f}"

    config = yaml.safe_load(path.read_text())
    config["data"]["path"] = str(data)
    train.dist.init_process_group("gloo", store=train.dist.HashStore(), rank=0, world_size=1)
    try:
        train.torch.manual_seed(config["data"]["seed"])
        model = train.GPT(**config["model"], seq_len=64)
        loader = fmsdata.build_loader(config["data"], config["evaluation"])
        assert train.evaluate(model, loader) == pytest.approx(entry["evaluation"], rel=1e-9)
        loader.close()
    finally:
        train.dist.destroy_process_group()


def test_a_folder_in_use_ends_all_ranks_with_one_line_and_orphans_end_with_torchrun(
    data: Path, config: Path, tmp_path: Path
) -> None:
    processes, run = imported("processes"), tmp_path / "run"
    with_workers = yaml.safe_load(config.read_text())
    with_workers["data"]["loader"] = {"num_workers": 1}
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(with_workers))
    options: list[str | Path] = ["--config", config, "--data", data, "--out", run, "--steps", "1000000"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launch, "--nproc-per-node", "2", SCRIPT.with_name("train.py"), *options]
    with (tmp_path / "first.txt").open("w") as output:
        first = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until(lambda: processes.has_done(run, 0))
        ranks = psutil.Process(first.pid).children(recursive=True)  # and their workers
        assert len(ranks) > 2
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        holder = (run / "lock").read_text().strip()
        assert holder in [f"pid {rank.pid} on {socket.gethostname()}" for rank in ranks]
        line = f"{run} is in use by {holder}; stop that run, or choose another folder"
        assert [text for text in second.stderr.splitlines() if "in use" in text] == [line]
        assert second.returncode == 1
        (report,) = second.stderr.split("Traceback (most recent call last)")[1:]  # torchrun's own, and no other
        assert re.findall(r"exitcode +: (-?\d+)", report) == ["1", "1"], "each rank ended by itself"
        assert first.poll() is None
        first.kill()
        first.wait()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive
    finally:
        processes.kill(first)
        for rank in psutil.process_iter(["cmdline"]):
            if str(run) in (rank.info["cmdline"] or ()):
                rank.kill()
    with (run / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the folder is free again


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_torchrun_the_example_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["examples/train.py", "--out", "runs/demo"])
    with pytest.raises(
        SystemExit, match=r"torchrun --standalone --nproc-per-node 2 examples/train\.py --out runs/demo"
    ):
        imported("train").end_with_torchrun()


def test_ranks_that_cannot_share_the_batch_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = imported("train")
    for name, value in {"get_rank": 0, "get_world_size": 5, "barrier": None, "destroy_process_group": None}.items():
        monkeypatch.setattr(train.dist, name, lambda value=value: value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="1"):
            train.build_loaders(yaml.safe_load(CONFIG.read_text()))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "global_batch 12 cannot be divided by 5 ranks\n"


def test_the_demo_shows_what_it_promises() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed with SIGKILL") == 2
    assert "every batch is the same, bit for bit" in " ".join(done.stdout.split())
    assert "NO" not in done.stdout


def test_interrupting_the_demo_leaves_no_process_and_no_folder_behind(tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, SCRIPT],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not any(tmp_path.glob("fmsdata-demo-*/chain/log.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(psutil.Process(script.pid).children(recursive=True))
    for _ in range(3):  # Python drops an interrupt that falls into a destructor: press again
        script.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            script.wait(timeout=20)
            break
    _, errors = script.communicate(timeout=30)
    assert script.returncode == 130, errors
    assert not list(tmp_path.iterdir())
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
