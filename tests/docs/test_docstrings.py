"""The examples in the docstrings of the package do what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fmsdata"
FILES = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text()]


@pytest.mark.parametrize("file", sorted(FILES), ids=str)
def test_examples_in_docstrings_do_what_they_show(file: Path) -> None:
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
