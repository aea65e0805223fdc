"""The commands on finite passes and evaluations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fmsdata.cli.app import command_line
from fmsdata.errors import ConfigError
from tests.helpers import CONFIG, maker


@pytest.fixture
def config(shared_corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    loader = {"batch_size": 7}
    path.write_text(yaml.safe_dump({**CONFIG, "path": str(shared_corpus), "loader": loader, "lanes": 6, "epochs": 1}))
    return path


Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, and returns what it prints."""

    def call(*command: str | Path) -> str:
        capsys.readouterr()
        command_line().main([str(part) for part in command], standalone_mode=False)
        return capsys.readouterr().out

    return call


@pytest.fixture
def report(run: Run) -> Run:
    """The same for a command that reports, as data."""
    return lambda *command: json.loads(run(*command, "--json"))


def test_plan_shows_the_exact_length_of_a_pass(run: Run, report: Run, config: Path, shared_corpus: Path) -> None:
    found = report("plan", config, "--world-size", "4")
    loader = maker(shared_corpus, epochs=1, lanes=6, loader__batch_size=7)(0, 4)
    assert found["pass"]["steps"] == len(loader)
    assert found["pass"]["samples"] == sum(loader.pass_lines)
    assert found["pass"]["filled_rows"] == 4 * 7 * len(loader) - sum(loader.pass_lines)
    assert {source["epochs"] for source in found["sources"].values()} == {1.0}
    text = run("plan", config, "--world-size", "4")
    assert f"in {len(loader)} steps on every rank, and then it ends" in text
    assert "epochs=1" in text
    assert report("plan", config, "epochs=null")["pass"] is None
    evaluation = report("plan", config, "evaluation={samples: 20}")["pass"]
    assert (evaluation["samples"], evaluation["steps"], evaluation["evaluation"]) == (20, 3, True)


def test_preview_shows_rows_of_padding(run: Run, report: Run, config: Path, shared_corpus: Path) -> None:
    steps = len(maker(shared_corpus, epochs=1, lanes=6, loader__batch_size=7)(3, 4))
    batches = report("preview", config, "--batches", "99", "--rank", "3", "--world-size", "4")["batches"]
    assert len(batches) == steps
    samples = [row["sample"] for batch in batches for row in batch["rows"]]
    real = [sample for sample in samples if sample is not None]
    assert samples == real + [None] * (len(samples) - len(real))
    assert real == sorted(real)
    assert {sample % 6 for sample in real} == {3}
    assert None in samples
    assert ", padding: 17 tokens, 0 documents" in run(
        "preview", config, "--batches", "99", "--rank", "3", "--world-size", "4"
    )
    assert len(report("preview", config, "--batches", "9", "evaluation={samples: 7}")["batches"]) == 1


def test_audit_checks_law_7(run: Run, report: Run, config: Path) -> None:
    found = report("audit", config, "--epoch", "--world-sizes", "2,5")
    assert found["holds"], found
    assert found["pass_samples"] > 0
    assert any("Law 7, equal ends" in sentence for sentence in found["checked"])
    text = run("audit", config, "--samples", "30", "--world-sizes", "2")
    assert "Laws 1 and 2 hold" in text
    assert "finite pass (`epochs`, `evaluation`), and was read as an endless stream for laws 1 and 2" in text
    assert "finite" not in run("audit", config, "--samples", "30", "--world-sizes", "2", "epochs=null")


def test_bench_says_that_it_reads_a_pass_as_an_endless_stream(run: Run, report: Run, config: Path) -> None:
    found = report("bench", config, "--batches", "300")
    assert found["batches"] == 300, "more than the pass has"
    assert found["finite_read_as_endless"]
    assert "was read as an endless stream" in run("bench", config, "--batches", "3", "evaluation=true", "epochs=null")
    assert "endless" not in run("bench", config, "--batches", "3", "epochs=null")


def test_trace_of_a_step(report: Run, config: Path, shared_corpus: Path) -> None:
    batch = next(maker(shared_corpus, epochs=1, lanes=6, loader__batch_size=7)(0, 1))
    spans = report("trace", config, "--step", "0", "--world-size", "1")["spans"]
    assert [(span["source"], span["document"]) for span in spans] == [
        (span.source, span.document) for row in batch["provenance"] for span in row
    ]
    with pytest.raises(ConfigError, match="the pass ends after"):
        report("trace", config, "--step", "999", "--world-size", "1")
