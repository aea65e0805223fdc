"""The examples as modules, and on one rank in this process."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DISTRIBUTED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def imported(name: str) -> Any:
    """An example as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


def run_alone(name: str, options: dict[str, Any]) -> None:
    """Run an example on one rank, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in DISTRIBUTED.items():
            patch.setenv(variable, value)
        patch.setattr(sys, "argv", [name, *(str(part) for option in options.items() for part in option)])
        imported(name).main()
