"""The benchmark beside other loaders runs, and counts what is lost and repeated."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_measures_and_counts(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    options = ["--only", "fmsdata,memmap + DataLoader", "--tokens", "400000", "--seconds", "0.1"]
    options += ["--rows", "4 lanes, (no thread|1 worker)|DataLoader$"]
    command = [sys.executable, "benchmarks/peers/run.py", *options, "--no-scenarios", "--no-pages"]
    done = subprocess.run(
        [*command, "--json", str(out), "--work", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["fmsdata, 4 lanes, no thread", "fmsdata, 4 lanes, 1 worker", "memmap + DataLoader"]
    for name, row in rows.items():
        assert "error" not in row, (name, row)
        assert row["tokens_per_second"] > 0
        assert row["state_bytes"] > 0
        assert row["resumed"] > 0, name


def test_a_loader_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from peers import pages, processes, scenarios
processes.LOADERS.update(broken=("no_such_module", ""), absent=("fms", "no such environment"))
for loader in ("broken", "absent"):
    found = processes.start(loader, {"what": "measure", "setup": {}}, Path(sys.argv[2]))[0]
    print(pages.speed_table({"rows": {loader: found}}).splitlines()[-1])
    outcomes = scenarios.run_all(loader, Path(sys.argv[2]) / loader, 3000, None)
    print({each["outcome"] for each in outcomes.values()})
"""
    command = [sys.executable, "-c", program, str(ROOT / "benchmarks"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    broken, first, absent, second = done.stdout.splitlines()
    assert broken.startswith("| broken | failed: ModuleNotFoundError: No module named 'peers.no_such_module' |")
    assert absent.startswith("| absent | failed: no environment ")
    assert first == second == "{'not run'}"


def test_lost_and_repeated_tokens_are_counted(tmp_path: Path) -> None:
    """The counting itself, on rows that are known to lack and repeat tokens."""
    program = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from peers.corpus import make
from peers.scenarios import Run, compare
corpus = make(2000, 100, {"a": 1.0})
rows = corpus.rows(range(len(corpus.ends) - 1), 8)
steps = [rows[at : at + 4] for at in range(0, len(rows), 4)]
def run(name, steps):
    np.savez(Path(sys.argv[2]) / f"{name}-0.npz", *steps)
    return Run(Path(sys.argv[2]) / name, [{"error": None, "steps": len(steps)}])
whole = run("whole", steps)
print(compare(run("same", steps[5:]), whole, 5, corpus))
print(compare(run("order", [steps[6], steps[5], *steps[7:]]), whole, 5, corpus))
gone, twice = int((steps[5] > 0).sum()), int((steps[4] > 0).sum())
print(compare(run("lost", steps[6:]), whole, 5, corpus) == f"lost {gone}")
print(compare(run("twice", steps[4:]), whole, 5, corpus) == f"repeated {twice}")
"""
    command = [sys.executable, "-c", program, str(ROOT / "benchmarks"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    same, order, lost, twice = done.stdout.splitlines()
    assert same == "same bits"
    assert order == "the same tokens in another order"
    assert (lost, twice) == ("True", "True")
