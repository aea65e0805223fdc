"""The examples in the docstrings of the package do what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fmsdata"
FILES = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text()]
TRAINERS = [file for file in FILES if "integrations" in file.parts]  # their libraries are in another environment


@pytest.mark.parametrize("file", sorted({*FILES} - {*TRAINERS}), ids=str)
def test_examples_in_docstrings_do_what_they_show(file: Path) -> None:
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("file", sorted(TRAINERS), ids=str)
def test_examples_of_integrations_only_show_and_do_nothing(file: Path) -> None:
    examples = doctest.DocTestParser().get_examples((PACKAGE.parent / file).read_text())
    assert examples
    assert all(example.options.get(doctest.SKIP) for example in examples)
