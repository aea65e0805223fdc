"""Ranks that read map-style rows, as real processes: killed, resumed, and with collective calls."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.epochs.helpers import Ranks, Rows, Sample, joined
from tests.programs.rows import EXCLUDED, EXCLUDED_AT, GLOBAL_BATCH, ROWS, SEED

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "rows.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def shape() -> dict[str, Any]:
    return {"global_batch": GLOBAL_BATCH, "seed": SEED, "drop_last": False}


@pytest.fixture
def killed_at(tmp_path: Path) -> int:
    """Two ranks, killed in the middle of the first epoch, after rows were excluded: the last step of both."""
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, "saving", tmp_path],
            env={**ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / f"{EXCLUDED_AT + 2}-{rank}.json").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert [rank.poll() for rank in ranks] == [None, None]
            time.sleep(0.02)
        workers = [child for rank in ranks for child in psutil.Process(rank.pid).children(recursive=True)]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    return min(len(list(tmp_path.glob(f"*-{rank}.json"))) for rank in range(2)) - 1


def test_a_killed_run_with_exclusions_resumes_at_another_world_size(tmp_path: Path, killed_at: int) -> None:
    saved = [json.loads((tmp_path / f"{killed_at}-{rank}.json").read_text()) for rank in range(2)]
    found: list[Sample] = []
    for step in range(killed_at + 1):
        got = [json.loads((tmp_path / f"{step}-{rank}.json").read_text())["got"] for rank in range(2)]
        found += [Sample(*got[at % 2][at // 2]) for at in range(GLOBAL_BATCH)]
    resumed = Ranks(Rows(ROWS), world_size=4, states=[rank["state"] for rank in saved], **shape())
    for _ in range(2):
        found += joined(resumed.epoch())

    alone = Ranks(Rows(ROWS), world_size=1, **shape())
    expected: list[Sample] = []
    for step in range(len(found) // GLOBAL_BATCH):
        if step == EXCLUDED_AT:
            alone.exclude(EXCLUDED)
        expected += alone.step()
    assert found == expected
    second = [sample.row for sample in found if sample.epoch_id >> 40 == 1 and not sample.padding]
    assert sorted([*second, *EXCLUDED]) == list(range(ROWS))


def test_every_rank_makes_a_collective_call_in_each_step_of_uneven_epochs(tmp_path: Path) -> None:
    """Three ranks, 10 rows, global batches of 6. A state that ranks disagree on is an error on all of them."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launch, PROGRAM, "collectives", tmp_path], env=ENVIRONMENT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [len(rank["got"]) for rank in ranks] == [6, 6, 6]
    assert ranks[0]["state"] == ranks[1]["state"] == ranks[2]["state"]
    for rank in ranks:
        assert "differ in next_excluded" in rank["error"]
    for epoch in range(3):
        rows = [
            sample[0] for rank in ranks for batch in rank["got"] for sample in batch
            if sample[1] >> 40 == epoch and not sample[2]
        ]  # fmt: skip
        assert sorted(rows) == list(range(epoch, 10))
