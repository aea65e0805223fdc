"""Overrides: single values of a configuration, named by dotted keys.

Names of sources may contain dots, slashes and equals signs
(`sources.lang=en/dataset=web.v2.weight=3`), so a key is matched against the existing names, the
longest first.
"""

import re
from dataclasses import replace
from typing import Any

from fmsdata.config.sections import SourceConfig
from fmsdata.config.yaml_file import Node, read_value
from fmsdata.core.checks import suggestion
from fmsdata.errors import ConfigError

SOURCE_KEYS = "|".join(SourceConfig.model_fields)
KEYS = (  # a key ends at the first equals sign, unless it contains the name of a source
    re.compile(r"sources\..+?(?==\s*\{)"),
    re.compile(rf"sources\..+?\.(?:{SOURCE_KEYS})(?==)"),
    re.compile(r"sources\..+(?==)"),
    re.compile(r"phases\.\d+\.weights\..+(?==)"),
    re.compile(r"[^=]+(?==)"),
)


def parse_override(text: str) -> tuple[str, Any]:
    """An override as written on the command line. The value is YAML.

    >>> parse_override("documents.strip=[0, 1]"), parse_override("sources.lang=en/x.weight=3")
    (('documents.strip', [0, 1]), ('sources.lang=en/x.weight', 3))
    """
    key = next((match[0] for pattern in KEYS if (match := pattern.match(text))), None)
    if key is None:
        raise ConfigError(f"override {text!r}: write KEY=VALUE, such as loader.batch_size=4")
    value = text[len(key) + 1 :]
    if not value.strip():
        raise ConfigError(f"override {text!r} has no value; write {key}=null for no value")
    try:
        return key, read_value(value)
    except ConfigError as error:
        raise ConfigError(f"override {text!r}: {value!r} is not a YAML value ({error})") from None


def with_override(root: Node, key: str, new: Node) -> Node:
    """The tree with one value set. `null` removes a section, such as a source."""
    if "" in key.split(".") and not key.startswith(("sources.", "phases.")):
        raise ConfigError(f"{new.place}: a key is names joined by dots, such as loader.batch_size")
    return _set(root, key, new, ())


def _set(node: Node, key: str, new: Node, path: tuple[str, ...]) -> Node:
    if isinstance(node.value, list):
        index, _, rest = key.partition(".")
        if not index.isdecimal() or int(index) >= len(node.value):
            raise ConfigError(
                f"{new.place}: {path[-1]!r} is a list of {len(node.value)}; its items are numbered from 0"
            )
        items = list(node.value)
        items[int(index)] = _set(items[int(index)], rest, new, (*path, index)) if rest else new
        return replace(node, value=items)
    if path == ("task",) and isinstance(node.value, str):
        node = Node({"name": node}, node.place)
    if node.value is None:
        node = Node({}, new.place)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{new.place}: {path[-1]!r} is a value, not a section")
    name, rest = _split(node.value, key, path)
    if path == ("sources",) and node.value and name not in node.value and (rest or new.value is None):
        way_out = "" if new.value is None else f" (to add one, write sources.{name}={{weight: ...}})"
        raise ConfigError(f"{new.place}: there is no source {name!r}; {suggestion(name, node.value)}{way_out}")
    values = dict(node.value)
    if rest:
        values[name] = _set(values.get(name, Node(None)), rest, new, (*path, name))
    elif new.value is None and name in values and isinstance(values[name].value, dict):
        del values[name]
    else:
        values[name] = new
    return replace(node, value=values)


def _split(names: dict[str, Node], key: str, path: tuple[str, ...]) -> tuple[str, str]:
    """The first name in a key, and the rest of the key."""
    for name in sorted(names, key=len, reverse=True):
        if key == name or key.startswith(f"{name}."):
            return name, key[len(name) + 1 :]
    if path == ("sources",):
        name, dot, last = key.rpartition(".")
        return (name, last) if dot and last in SourceConfig.model_fields else (key, "")
    if path[:1] == ("phases",) and path[-1] == "weights":
        return key, ""
    name, _, rest = key.partition(".")
    return name, rest
