"""Without its trainer, an integration says what to install."""

import sys
from importlib import import_module

import pytest

from fmsdata.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "packages", "install"),
    [
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "pip install lightning"),
        ("torchtitan", ["torchtitan", "torchtitan.components.dataloader"], "pip install torchtitan"),
    ],
)
def test_a_module_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, packages: list[str], install: str
) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"fmsdata.integrations.{name}", raising=False)
    with pytest.raises(ConfigError, match=install):
        import_module(f"fmsdata.integrations.{name}")


def test_megatron_and_ray_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("megatron", "megatron.core", "ray", "ray.train"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="pip install megatron-core"):
        import_module("fmsdata.integrations.megatron").ExternalLoader("run.yaml")
    with pytest.raises(ConfigError, match=r"pip install 'ray\[train\]'"):
        import_module("fmsdata.integrations.ray").report({}, None)
