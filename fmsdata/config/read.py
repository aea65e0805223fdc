"""TODO."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fmsdata.config.overrides import with_override
from fmsdata.config.problems import in_words
from fmsdata.config.sections import Config
from fmsdata.config.yaml_file import Node, fill_in, read_yaml, tree
from fmsdata.errors import ConfigError


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check a configuration, with dotted overrides such as `{"loader.batch_size": 4}` applied."""
    problems: list[str] = []
    if isinstance(config, Mapping):
        root = tree(config, "configuration", problems)
    elif isinstance(config, str | os.PathLike):
        root = read_yaml(Path(config), problems)
    else:
        raise ConfigError(f"a configuration is a dict or the path of a YAML file, not {config!r}")
    if not isinstance(overrides or {}, Mapping) or not all(isinstance(key, str) for key in overrides or {}):
        raise ConfigError(f"overrides are by name, as in {{'loader.batch_size': 4}}, not {overrides!r}")
    for key, value in (overrides or {}).items():
        root = with_override(root, key, tree(value, f"override {key!r}", problems))
    named = {name: node for name, node in root.value.items() if not name.startswith("x-")}
    root = fill_in(Node(named, root.where), problems)
    try:
        checked = Config.model_validate(root.plain())
    except ValidationError as error:
        problems += in_words(error, root)
    if not problems:
        return checked
    problems = sorted(dict.fromkeys(problems), key=_place)
    raise ConfigError(
        problems[0]
        if len(problems) == 1
        else "\n  ".join([f"{len(problems)} things are wrong in the configuration:", *problems])
    )


def _place(problem: str) -> tuple[str, int]:
    """Where a problem is, to tell what is wrong in the order of the file."""
    file, _, line = problem.partition(": ")[0].rpartition(":")
    return file, int(line) if line.isdecimal() else 0
