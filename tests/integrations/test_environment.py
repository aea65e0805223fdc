"""The environment of the trainers is complete, and what it lacks is named truthfully."""

import subprocess
from pathlib import Path

from tests.integrations.environment import PYTHON, STAND_INS, UNUSABLE, summary, versions


def test_every_trainer_is_installed() -> None:
    assert None not in versions().values(), versions()


def test_what_is_not_tested_can_not_be_imported() -> None:
    """If this fails, it can be tested now."""
    for module, reason in UNUSABLE.items():
        done = subprocess.run([str(PYTHON), "-W", "ignore", "-c", f"import {module}"], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.strip().endswith(reason)


def test_the_summary_names_what_is_replaced_and_what_is_left_out() -> None:
    programs = {path.stem for path in (Path(__file__).parent / "programs").glob("*_on_cpu.py")}
    assert {program for program, _ in STAND_INS.values()} == programs
    lines = "\n".join(summary())
    for name in (*STAND_INS, *UNUSABLE):
        assert f"\n{name}: " in lines
