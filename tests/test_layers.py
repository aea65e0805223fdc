"""The folders of the package: which may import which, and what is loaded when."""

import ast
import importlib
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import grimp
import pytest

import fmsdata

ROOT = Path(__file__).parents[1]
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_in(folder: str) -> list[str]:
    files = sorted((ROOT / "fmsdata" / folder).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("folder", ["core", "planning"])
def test_core_and_planning_load_without_filesystems_and_configuration(folder: str) -> None:
    blocked = ["aiohttp", "fsspec", "pyarrow", "pydantic", "rich", "s3fs", "typer", "yaml"]
    modules = modules_in(folder)
    assert len(modules) > 3
    imports = "\n".join(f"import {name}" for name in modules)
    run(BLOCKER.format(blocked=blocked) + imports)


def test_planning_loads_without_torch() -> None:
    imports = "\n".join(f"import {name}" for name in modules_in("planning"))
    run(BLOCKER.format(blocked=["torch"]) + imports)


def test_a_sampler_of_plain_rows_needs_no_files_and_no_tokenizer() -> None:
    blocked = ["fsspec", "pyarrow", "s3fs", "tokenizers", "transformers"]
    program = "import fmsdata; print(len(fmsdata.EpochSampler(range(8), global_batch=4, rank=0, world_size=1)))"
    assert run(BLOCKER.format(blocked=blocked) + program) == "8\n"


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import sys, fmsdata; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(run(program).split())
    assert not loaded & {"torch", "numpy", "pyarrow", "fsspec", "s3fs", "aiohttp", "pydantic", "rich", "typer", "yaml"}


def test_every_public_name_can_be_imported() -> None:
    for name in fmsdata.__all__:
        assert getattr(fmsdata, name) is not None
    assert set(fmsdata.__all__) <= set(dir(fmsdata))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        fmsdata.no_such_name  # noqa: B018


def test_type_checkers_see_the_same_public_names_in_the_same_places() -> None:
    source = ast.parse((ROOT / "fmsdata" / "__init__.py").read_text())
    (checked,) = (node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    homes = {name: f"fmsdata.{home}" for name, home in fmsdata._HOME_OF.items()}
    assert seen == {**homes, **dict.fromkeys(fmsdata._MODULES, "fmsdata")}


@pytest.mark.parametrize("name", ["errors", "testing", "train_state", "prepare", "trace", "keys", "compat.fms_fsdp"])
def test_documented_modules_export_what_they_name(name: str) -> None:
    module = importlib.import_module(f"fmsdata.{name}")
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public)


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    """What import-linter checks, from the graph itself, so that a contract that was loosened is noticed."""
    graph = grimp.build_graph("fmsdata")
    folders = [module for module in graph.find_children("fmsdata") if graph.find_children(module)]
    assert len(folders) >= 13
    below: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for module in graph.find_descendants(folder) | {folder}:
            for imported in graph.find_modules_directly_imported_by(module):
                other = ".".join(imported.split(".")[:2])
                if other in below and other != folder:
                    below[folder].add(other)
    while below:
        lowest = {folder for folder, others in below.items() if not others}
        assert lowest, f"these folders import each other: {below}"
        below = {folder: others - lowest for folder, others in below.items() if folder not in lowest}


def test_the_contract_names_the_layers_in_the_order_of_the_guide() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one for one in settings["contracts"] if one["type"] == "layers")["layers"]
    order = ["cli | compat", "config", "loader", "run", "stages", "prefetch", "formats", "core"]
    places = [layers.index(name) for name in order]
    assert all(above < below for above, below in pairwise(places))
