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
from tests.programs.slow_prepare import Slow

ROOT = Path(__file__).parents[3]
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def test_a_cluster_that_loses_a_node_writes_the_same_bytes(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    options = {**SMALL, "unit_bytes": 1000, "validation": 0.2}
    here = prepare_corpus(tmp_path / "in", tmp_path / "here", Slow(0), processes=1, **options)
    sizes = [path.stat().st_size for path in (tmp_path / "in").rglob("*.*") if path.suffix not in (".gz", ".zst")]
    units = sum(-(-size // 1000) for size in sizes)
    report = tmp_path / "report.json"
    arguments = {"source": f"{tmp_path}/in", "output": f"{tmp_path}/ray", "report": str(report), **options}
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs.ray_prepare", json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **RAY, "PYTHONPATH": str(ROOT)},
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(report.read_text())
    assert (found["tokens"], found["nodes"], found["alive"]) == (here.tokens, 3, 2)
    (done_before,) = found["killed_after"]
    assert done_before < units - 3
    assert tree(tmp_path / "ray") == tree(tmp_path / "here")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"fmsdata\[ray\]"):
        RayCluster(Job(None, None, None, b""), None)  # type: ignore[arg-type]
