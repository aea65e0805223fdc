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
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check a configuration.

    >>> read_config("demo.yaml", {"loader.batch_size": 4}).loader.batch_size     # doctest: +SKIP
    4
    """
    problems: list[Problem] = []
    if isinstance(config, Mapping):
        root = tree(config, Place("configuration"), problems)
    elif isinstance(config, str | os.PathLike):
        root = read_yaml(Path(config), problems)
    else:
        raise ConfigError(f"a configuration is a dict or the path of a YAML file, not {shown(config)}")
    if not isinstance(overrides or {}, Mapping) or not all(isinstance(key, str) for key in overrides or {}):
        raise ConfigError(f"overrides are a dict by name, as in {{'loader.batch_size': 4}}, not {shown(overrides)}")
    for key, value in (overrides or {}).items():
        root = with_override(root, key, tree(value, Place(f"override {key!r}"), problems))
    named = {name: node for name, node in root.value.items() if not name.startswith("x-")}
    root = fill_in(Node(named, root.place), problems)
    try:
        checked = Config.model_validate(root.plain())
    except ValidationError as error:
        problems += validation_problems(error, root)
    if problems:
        raise config_error(problems)
    return checked
