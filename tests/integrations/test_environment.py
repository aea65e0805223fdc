"""The environment of the trainers is complete, and what it lacks is named truthfully."""

import subprocess

from tests.integrations.environment import PYTHON, UNUSABLE, versions


def test_every_trainer_is_installed() -> None:
    assert None not in versions().values(), versions()


def test_what_is_not_tested_can_not_be_imported() -> None:
    """If this fails, it can be tested now."""
    for module, reason in UNUSABLE.items():
        done = subprocess.run([str(PYTHON), "-W", "ignore", "-c", f"import {module}"], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.strip().endswith(reason)
