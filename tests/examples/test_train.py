"""The training example under the real torchrun: killed and resumed on other ranks, with the same result."""

import hashlib
import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import fmsdata
from fmsdata.cli.demo import write_corpus

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "kill_and_rescale.py"
CONFIG = ROOT / "configs" / "train-demo.yaml"
STEPS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def imported(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def example() -> Any:
    """The functions that start the example and kill it."""
    return imported("kill_and_rescale")


@pytest.fixture(scope="module")
def alone(data: Path, example: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The steps of a run on 1 rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    options = {"--config": CONFIG, "--data": data, "--out": folder, "--steps": STEPS, "--every": STEPS}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["train.py", *(str(part) for option in options.items() for part in option)])
        imported("train").main()
    return {entry.step: entry for entry in example.steps_of(folder)}


def check(steps: list[Any], alone: dict[int, Any]) -> None:
    assert {entry.step for entry in steps} == set(alone) == set(range(STEPS))
    for entry in steps:
        assert entry.sha256 == alone[entry.step].sha256
        assert entry.loss == pytest.approx(alone[entry.step].loss, abs=1e-4)


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


def test_ranks_that_cannot_share_the_batch_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train = imported("train")
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 5)
    with pytest.raises(SystemExit, match="global_batch 12 cannot be divided by 5 ranks"):
        train.Run(tmp_path, yaml.safe_load(CONFIG.read_text()), "ddp")


def test_two_runs_in_one_folder_are_refused(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    """As when torchrun was killed, and its ranks live on."""
    train = imported("train")
    config = yaml.safe_load(CONFIG.read_text())
    config["data"]["path"] = str(data)
    train.dist.init_process_group("gloo", store=train.dist.HashStore(), rank=0, world_size=1)
    try:
        first, second = (train.Run(tmp_path, config, "ddp") for _ in range(2))
        first.resume()
        with pytest.raises(SystemExit, match="another run writes to"):
            second.resume()
    finally:
        train.dist.destroy_process_group()


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
