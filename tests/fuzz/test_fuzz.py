"""Whatever is in a file, the outcome is the right result or an error of ours. `make fuzz` looks for longer.

A process of its own for the shards, because pyarrow could end it, and one for the rest.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 1
CASES = {
    "shards": 1000,
    "text": 600,
    "text-index": 300,
    "counts": 200,
    "yaml": 60,
    "states": 200,
    "train": 60,
    "checkpoints": 50,
}


@pytest.mark.parametrize(
    "targets", [["shards"], ["text", "text-index"], ["counts", "yaml", "states", "train", "checkpoints"]], ids=" ".join
)
def test_damaged_files_are_read_right_or_refused(targets: list[str]) -> None:
    given = [f"{name}:{CASES[name]}" for name in targets]
    command = [sys.executable, "-m", "tests.fuzz", *given, "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    text = "\n".join(line.rpartition("\r")[2] for line in done.stdout.splitlines())
    assert done.returncode == 0, f"ended with {done.returncode}\n{text}\n{done.stderr}"
    for name in targets:
        assert f"{name}: seed {SEED}" in text
    assert text.count("0 wrong") == len(targets)
