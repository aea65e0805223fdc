"""`fmsdata bench`, through its real entry point."""

import json
from pathlib import Path

import pytest
import yaml

from fmsdata.core import native
from tests.cli.test_cli import run
from tests.helpers import CONFIG


@pytest.fixture
def config(corpus: Path) -> Path:
    path = corpus / "run.yaml"
    values = {**CONFIG, "path": str(corpus), "loader": {"batch_size": 3}, "checkpoint": {"path": "saved", "every": 1}}
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_report_holds_what_was_measured(config: Path) -> None:
    done = run("bench", config, "--batches", "50", "--json", "loader.num_workers=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not (config.parent / "saved").exists()
    report = json.loads(done.stdout)
    assert report["batches"] == 50
    assert report["tokens_per_batch"] == 3 * 16
    speed = report["tokens_per_second"]
    assert 0 < speed["slowest"] <= speed["median"] <= speed["fastest"]
    assert speed["overall"] == pytest.approx(50 * 48 / report["seconds"])
    assert report["share_of_copy"] == pytest.approx(speed["median"] / report["copy_tokens_per_second"])
    assert 0 <= report["seconds_to_build"] <= report["seconds_to_first_batch"]
    waited = report["seconds_waited_per_step"]
    assert 0 <= waited["median"] <= waited["99th percentile"] <= waited["longest"]
    memory = report["peak_memory_bytes"]
    assert 50e6 < memory["before"] <= memory["this process"] < 10e9
    assert report["compiled_kernel"] is (native.kernel is not None)
    assert [50e6 < worker < 10e9 for worker in memory["workers"]] == [True, True]


def test_a_trainer_that_takes_its_time_hardly_waits(config: Path) -> None:
    done = run("bench", config, "--seconds", "1.5", "--step-seconds", "0.1")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("waited in total"))
    assert float(line.split("%")[0].split()[-1]) < 50
    assert "with steps of 0.1 s" in line
    assert "not compared, as the steps set the pace" in done.stdout


def test_wrong_input_is_one_line(config: Path) -> None:
    done = run("bench", config, "loader.batch_sise=2")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "did you mean 'batch_size'" in done.stderr
    assert "Traceback" not in done.stderr
    for arguments, words in (
        (["--seconds", "1", "--batches", "2"], "give only one of them"),
        (["--seconds", "-1"], "is -1"),
    ):
        done = run("bench", config, *arguments)
        assert done.returncode == 2
        assert words in done.stderr
