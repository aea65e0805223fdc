"""The environment `.trainers`: which trainers it has, and what of them can't be used on this machine and why."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".trainers" / "bin" / "python"

# The packages, by the names that PyPI has for them.
TRAINERS = (
    "transformers",
    "accelerate",
    "lightning",
    "torchdata",
    "torchtitan",
    "deepspeed",
    "ray",
    "megatron-core",
)

# A module of a trainer that can't be imported here, and the error. A test imports it and compares.
UNUSABLE = {
    "torchtitan.distributed.minimal_async_ep.kernels": "No module named 'triton'",  # PyPI has it for GPUs only
    "megatron.training": "No module named 'megatron.training'",  # Megatron-LM, which is not on PyPI
}

# Trainers that expect an accelerator, and what of it is replaced here: by the program of tests that says more.
STAND_INS = {
    "torchtitan": (
        "torchtitan_on_cpu",
        "the CPU answers for the accelerator, dense attention stands in for the compiled kernel",
    ),
    "megatron-core": ("megatron_on_cpu", "tensors are on the CPU in place of an accelerator, without dropout"),
    "deepspeed": ("deepspeed_on_cpu", "gloo in place of its compiled kernel for shared memory"),
}


def versions(names: Sequence[str] = TRAINERS) -> dict[str, str | None]:
    """The version of each trainer in the environment; None if it is not installed."""
    folders = [
        str(path) for name in (".venv", ".trainers") for path in ROOT.glob(f"{name}/lib/python3.*/site-packages")
    ]
    found = {entry.name: entry.version for entry in importlib.metadata.distributions(path=folders)}
    return {name: found.get(name) for name in names}


def summary() -> list[str]:
    """Lines for the summary of the tests."""
    installed = [f"{name} {version}" for name, version in versions().items() if version is not None]
    missing = [f"{name}: not installed; run `make setup`" for name, version in versions().items() if version is None]
    return [
        f"tested with {', '.join(installed)}",
        *missing,
        *(f"{name}: without an accelerator: {replaced}" for name, (_, replaced) in STAND_INS.items()),
        *(f"{module}: not tested, can't be imported here: {reason}" for module, reason in UNUSABLE.items()),
    ]
