"""Runs one of these programs, and returns what each of its ranks wrote."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import CONFIG


def launch(program: str, scenario: str, world_size: int, corpus: Path) -> list[Any]:
    """The results of all ranks of a scenario, over a corpus with 12 lanes and batches of 2."""
    config = corpus / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "path": str(corpus), "lanes": 12, "loader": {"batch_size": 2}}))
    folder = corpus / f"{scenario}-{world_size}"
    folder.mkdir()
    command = [sys.executable, "-m", f"tests.programs.{program}", scenario, str(world_size), str(config), str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(world_size)]
