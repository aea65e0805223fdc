"""The TensorBoard example, in a process of its own: it writes what the loader reports."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import fmsdata
from fmsdata.cli.demo import write_corpus

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "stats_tensorboard.py"


def run_example(*options: object, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    known = [*([str(path)] if path else []), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, EXAMPLE, *map(str, options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(known)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_the_example_writes_every_step_to_tensorboard(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data")
    done = run_example("--data", tmp_path / "data", "--logs", tmp_path / "logs", "--steps", 12)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 10: 40 samples, ")
    written = scalars_in(tmp_path / "logs")
    overrides = {"path": str(tmp_path / "data")}
    loader = fmsdata.build_loader(ROOT / "configs" / "demo.yaml", overrides, rank=0, world_size=1)
    expected = [loader.stats().as_scalars() for _ in islice(loader, 12)]
    loader.close()
    assert written.keys() == {"loss", *expected[0]}
    for name in expected[0]:
        assert [step for step, _ in written[name]] == list(range(1, 13))
        if "second" not in name and "waited" not in name:
            assert [value for _, value in written[name]] == pytest.approx([scalars[name] for scalars in expected])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--steps", "0"], "--steps is 0"),
    ],
)
def test_the_example_says_what_is_wrong(tmp_path: Path, options: list[str], message: str) -> None:
    done = run_example(*options, "--logs", tmp_path / "logs")
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "logs").exists()


def test_the_example_asks_for_tensorboard_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "tensorboard.py").write_text("raise ModuleNotFoundError(\"No module named 'tensorboard'\")")
    done = run_example("--logs", tmp_path / "logs", path=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("(No module named 'tensorboard'): pip install tensorboard")
    assert "Traceback" not in done.stderr
