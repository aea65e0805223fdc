"""The RL example: which prompts it trains on, alone and when it is killed and rescaled under torchrun."""

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.examples.helpers import EXAMPLES, imported, run_alone


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The log of a run on 1 rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    run_alone("rl_prompts", {"--out": folder, "--seconds": 0})
    entries: list[Any] = imported("processes").entries(folder)
    return entries


def test_each_epoch_has_each_prompt_once_that_was_not_mastered_before(alone: list[Any]) -> None:
    left = Counter(range(len(imported("rl_prompts").PROMPTS)))
    epochs = alone[-1]["epoch"] + 1
    assert epochs > 3
    for epoch in range(epochs):
        batches = [entry for entry in alone if entry["epoch"] == epoch]
        assert Counter(index for entry in batches for index in entry["prompts"]) == left
        assert any(entry["in_flight"] for entry in batches) == (len(batches) > 1)
        left -= Counter(index for entry in batches for index in entry["mastered"])
    assert not left


def test_a_run_that_is_killed_with_prompts_in_flight_resumes_on_other_ranks() -> None:
    script = EXAMPLES / "kill_rl_prompts.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert re.search(r"2 ranks: batches 0 to \d+ trained, killed with [12] more in flight", printed)
    assert "the same prompts in each, and the same ones mastered, as on 1 rank" in printed


def test_the_demo_fails_if_a_prompt_is_lost_or_brought_back(alone: list[Any]) -> None:
    driver = imported("kill_rl_prompts")
    again = [*alone[:17], *alone[15:]]
    assert "2 of them trained twice" in driver.compare(again, alone)
    for step, other in ((20, {"prompts": alone[20]["prompts"][1:]}), (3, {"mastered": [1]}), (18, {"epoch": 9})):
        changed = [{**entry, **other} if entry["step"] == step else entry for entry in again]
        with pytest.raises(driver.Failed, match=f"step {step} has other {next(iter(other))}"):
            driver.compare(changed, alone)
    for incomplete, message in ((alone, "no step was run twice"), (again[:-1], "has")):
        with pytest.raises(driver.Failed, match=message):
            driver.compare(incomplete, alone)
