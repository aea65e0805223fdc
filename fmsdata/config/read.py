"""Read a configuration: a file or a dict, with overrides and environment variables, checked."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fmsdata.config.overrides import with_override
from fmsdata.config.problems import Place, Problem, config_error
from fmsdata.config.sections import Config
from fmsdata.config.validation import validation_problems
from fmsdata.config.yaml_file import Node, fill_in, read_yaml, tree
from fmsdata.core.checks import suggestion
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError

REQUIRED = {"path", "pack"}  # keys that every configuration has


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    section: str | None = None,
) -> Config:
    """Read and check a configuration: a file or a dict, or a section of it, named by a dotted key.

    >>> read_config("demo.yaml", {"loader.batch_size": 4}).loader.batch_size     # doctest: +SKIP
    4
    """
    problems: list[Problem] = []
    folder = os.path.dirname(os.path.abspath(config)) if isinstance(config, str | os.PathLike) else None
    if isinstance(config, Mapping):
        root = tree(config, Place("configuration"), problems)
    elif isinstance(config, str | os.PathLike):
        root = read_yaml(Path(config), problems)
    else:
        raise ConfigError(f"a configuration is a dict or the path of a YAML file, not {shown(config)}")
    root = _whole(root) if section is None else _section(root, section)
    if not isinstance(overrides or {}, Mapping) or not all(isinstance(key, str) for key in overrides or {}):
        raise ConfigError(f"overrides are a dict by name, as in {{'loader.batch_size': 4}}, not {shown(overrides)}")
    for key, value in (overrides or {}).items():
        root = with_override(root, key, tree(value, Place(f"override {key!r}"), problems))
    named = {name: node for name, node in root.value.items() if not name.startswith("x-")}
    root = fill_in(Node(named, root.place), problems)
    try:
        checked = Config.model_validate(root.plain(), context=folder)
    except ValidationError as error:
        problems += validation_problems(error, root)
    if problems:
        raise config_error(problems)
    return checked.in_folder(folder)


def _section(root: Node, section: str) -> Node:
    """The part of a file that is the configuration."""
    node = root
    for name in section.split("."):
        below = node.get(name)
        if below is None:
            known = node.value if isinstance(node.value, dict) else ()
            raise ConfigError(f"{root.place}: there is no section {section!r}; {suggestion(name, known)}")
        node = below
    if not isinstance(node.value, dict):
        raise ConfigError(f"{node.place}: {section!r} is {shown(node.plain())}, not a section")
    return node


def _whole(root: Node) -> Node:
    """The file, unless one of its sections is the configuration, and the file is not."""
    for name, node in root.value.items():
        if not REQUIRED & root.value.keys() and isinstance(node.value, dict) and node.value.keys() >= REQUIRED:
            raise ConfigError(
                f"{root.place}: the configuration of the loader is the section {name!r} of this file: add --section "
                f"{name}, or in Python section={name!r}"
            )
    return root
