"""Runs programs: one of these, to return what each of its ranks wrote, or any other, for its output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import CONFIG

ROOT = Path(__file__).parents[2]


def launch(program: str, scenario: str, world_size: int, corpus: Path) -> list[Any]:
    """The results of all ranks of a scenario, over a corpus with 12 lanes and batches of 2."""
    config = corpus / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "lanes": 12, "loader": {"batch_size": 2}}))
    folder = corpus / f"{scenario}-{world_size}"
    folder.mkdir()
    command = [sys.executable, "-m", f"tests.programs.{program}", scenario, str(world_size), str(config), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(world_size)]


def run(script: Path | list[str], *arguments: str, timeout: float = 240, cwd: Path | None = None) -> str:
    """The output of a Python program, which must end well and in time."""
    command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, *script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout
