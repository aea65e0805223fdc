"""The Ray engine, on a real cluster of several nodes on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fmsdata.corpus.prepare.ray_cluster import RayCluster
from fmsdata.corpus.prepare.tasks import Job
from fmsdata.errors import ConfigError
from fmsdata.prepare import prepare_corpus
from tests.corpus.prepare.texts import SMALL, tree, write_texts

ROOT = Path(__file__).parents[3]


def test_a_cluster_that_loses_a_node_writes_the_same_bytes(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    options = {**SMALL, "unit_bytes": 500, "validation": 0.2}
    here = prepare_corpus(tmp_path / "in", tmp_path / "here", "bytes", processes=1, **options)
    arguments = {"source": str(tmp_path / "in"), "output": str(tmp_path / "ray"), **options}
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "RAY_raylet_start_wait_time_s": "60",
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs.ray_prepare", json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert (report["tokens"], report["nodes"], report["alive"]) == (
        here.tokens + here.validation_tokens - here.validation_tokens,
        3,
        2,
    )
    assert report["killed_after"]
    assert report["killed_after"][0] < 40  # in the middle of the work
    assert tree(tmp_path / "ray") == tree(tmp_path / "here")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"fmsdata\[ray\]"):
        RayCluster(Job(None, None, None, b""), None)  # type: ignore[arg-type]
