"""YAML files as trees of values that know where they were written, so that an error can name file and line.

A file may include others, and any text in it may hold `${env:VAR}`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fmsdata.errors import ConfigError

TAG = "tag:yaml.org,2002:"
NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
PLACEHOLDER = re.compile(r"\$\$\{|\$\{(?:env:(\w+)(?::-([^}]*))?\})?")
BROKEN = object()  # stands for a value that a problem was told of already


@dataclass(frozen=True)
class Node:
    """A value and where it was written. The value is a dict or a list of nodes, or plain."""

    value: Any
    where: str = ""
    hidden: bool = False  # it may be a secret: never show it
    empty: bool = False  # nothing was written at all, not even `null`

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {name: node.plain() for name, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def secrets(self) -> Iterator[Any]:
        """The values in it that must not be shown."""
        if isinstance(self.value, dict | list):
            for node in self.value.values() if isinstance(self.value, dict) else self.value:
                yield from node.secrets()
        elif self.hidden:
            yield self.value

    def get(self, part: str | int) -> "Node | None":
        """What has this name or number in it, if there is such."""
        if isinstance(self.value, dict):
            return self.value.get(part)
        return self.value[part] if isinstance(self.value, list) and isinstance(part, int) else None


def dotted(*path: str | int) -> str:
    """A path as it is written in messages and overrides.

    >>> dotted("phases", 0, "weights")
    'phases.0.weights'
    """
    return ".".join(str(part) for part in path if part != "")


def tree(value: Any, where: str, problems: list[str]) -> Node:
    """A Python value as a tree."""
    if isinstance(value, Mapping):
        problems += [f"{where}: the key {key!r} is not text" for key in value if not isinstance(key, str)]
        return Node({str(key): tree(one, where, problems) for key, one in value.items()}, where)
    if isinstance(value, list | tuple):
        return Node([tree(one, where, problems) for one in value], where)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return Node(value.item() if isinstance(value, np.generic) else value, where)


def read_yaml(path: Path, problems: list[str], above: tuple[Path, ...] = ()) -> Node:
    """A file as a tree, laid over the files that it includes. `problems` takes what is wrong but does not stop it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    own = _Text(str(path), text, problems).tree()
    if not isinstance(own.value, dict):
        found = "a list" if isinstance(own.value, list) else "nothing" if own.empty else repr(own.value)
        raise ConfigError(f"{path}: expected keys and values, found {found}")
    values = dict(own.value)
    include = values.pop("include", Node([]))
    included = Node({})
    for one in include.value if isinstance(include.value, list) else [include]:
        unset: list[str] = []
        name = fill_in(one, unset, name="include").value
        if unset:
            raise ConfigError(unset[0])
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{one.where}: include takes the name of a YAML file, or a list of them")
        other, chain = path.parent / name, (*above, path)
        if not other.is_file():
            raise ConfigError(f"{one.where}: include {name!r}: there is no file {other}")
        if other.resolve() in [file.resolve() for file in chain]:
            raise ConfigError(f"{one.where}: files include each other: {' -> '.join(map(str, (*chain, other)))}")
        included = merge(included, read_yaml(other, problems, chain))
    return merge(included, replace(own, value=values))


def read_value(text: str) -> Any:
    """A value as it would be written in a file.

    >>> read_value("[1, 1.0e3]")
    [1, 1000.0]
    """
    problems: list[str] = []
    value = _Text("value", text, problems).tree().plain()
    if problems:
        raise ConfigError(problems[0])
    return value


def merge(below: Node, over: Node) -> Node:
    """One tree laid over another, mapping by mapping. `null` over a mapping removes it."""
    if not isinstance(below.value, dict):
        return over
    if not isinstance(over.value, dict):
        return below if over.empty else over
    merged = dict(below.value)
    for name, node in over.value.items():
        merged[name] = merge(merged[name], node) if name in merged else node
        if merged[name].value is None and name in below.value and isinstance(below.value[name].value, dict):
            del merged[name]
    return replace(over, value=merged)


def fill_in(node: Node, problems: list[str], *, as_text: bool = False, name: str = "") -> Node:
    """The tree with variables of the environment put in.

    A text that is nothing but one variable becomes the number or word it would be in YAML, except below
    `storage_options`, where `as_text` holds.
    """

    def below(key: str | int, one: Node) -> Node:
        return fill_in(one, problems, as_text=as_text or key == "storage_options", name=dotted(name, key))

    if isinstance(node.value, dict):
        return replace(node, value={key: below(key, one) for key, one in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[below(index, one) for index, one in enumerate(node.value)])
    if not isinstance(node.value, str) or "${" not in node.value:
        return replace(node, hidden=as_text)
    place = f"{node.where}: {name}"
    hidden, missing = as_text, False

    def found(match: re.Match[str]) -> str:
        nonlocal hidden, missing
        variable, default = match.groups()
        if match[0] == "$${":
            return "${"
        if variable is None:
            problems.append(f"{place}: '${{' begins a variable, as in ${{env:HOME}}; write $${{ for the text itself")
        elif os.environ.get(variable) or (variable in os.environ and default is None):
            hidden = True
            return os.environ[variable]
        elif default is None:
            problems.append(
                f"{place}: the environment has no {variable}; set it, or write ${{env:{variable}:-default}}"
            )
        missing |= default is None
        return default or ""

    text: Any = PLACEHOLDER.sub(found, node.value)
    whole = PLACEHOLDER.fullmatch(node.value)
    if whole and whole[1] and not as_text:
        text = _scalar(text)
    return replace(node, value=BROKEN if missing else text, hidden=hidden)


def _scalar(text: str) -> Any:
    try:
        value = read_value(text)
    except ConfigError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


class _Loader(yaml.SafeLoader):
    """YAML as PyYAML reads it, and 1e12 is a number (in YAML 1.1 only 1.0e+12 is)."""


_Loader.add_implicit_resolver(f"{TAG}float", NUMBER, list("-+.0123456789"))


class _Text:
    """A YAML text on its way to a tree."""

    def __init__(self, file: str, text: str, problems: list[str]) -> None:
        self._file, self._text, self._problems = file, text, problems
        self._open: list[yaml.Node] = []

    def tree(self) -> Node:
        try:
            self._loader = _Loader(self._text)
            node = self._loader.get_single_node()
            return Node(None, self._file, empty=True) if node is None else self._convert(node, self._file, "")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            words = ", ".join(filter(None, (error.context, error.problem)))
            if "'\\t'" in words:
                words = "a tab where spaces are needed; YAML is indented with spaces"
            place = self._file if mark is None else f"{self._file}:{mark.line + 1}"
            raise ConfigError(f"{place}: not valid YAML: {words}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._file}: not valid YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise ConfigError(f"{self._file}: nested too deep") from None

    def _where(self, node: yaml.Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}"

    def _convert(self, node: yaml.Node, where: str, name: str) -> Node:
        if any(node is one for one in self._open):
            raise ConfigError(f"{self._where(node)}: what is anchored here holds itself")
        self._open.append(node)
        try:
            if not isinstance(node, yaml.ScalarNode) and node.tag not in (f"{TAG}map", f"{TAG}seq"):
                raise ConfigError(f"{self._where(node)}: {name}: the tag {node.tag} means nothing here; remove it")
            if isinstance(node, yaml.MappingNode):
                return Node(self._mapping(node, name), where)
            if isinstance(node, yaml.SequenceNode):
                each = enumerate(node.value)
                return Node([self._convert(one, self._where(one), dotted(name, i)) for i, one in each], where)
            empty = node.tag == f"{TAG}null" and not node.value
            return Node(self._loader.construct_object(node), where, empty=empty)
        except ValueError as error:  # such as a date in month 13
            raise ConfigError(f"{where}: {name}: {node.value!r} can't be read: {error}; put quotes around it") from None
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, name: str) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value in node.value:
            where = self._where(key_node)
            if key_node.tag == f"{TAG}merge":
                merged = {**self._merged(value, where, name), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{where}: {name or 'the file'} has a key that is a list or a mapping, not a name")
            key, inner = key_node.value, dotted(name, key_node.value)
            if key_node.tag != f"{TAG}str":
                kind = key_node.tag.removeprefix(TAG)
                self._problems.append(f'{where}: {inner}: the key is read as {kind}; put quotes around it: "{key}"')
            if key in own:
                first = own[key].where.removeprefix(f"{self._file}:")
                self._problems.append(f"{where}: {inner}: this key is in line {first} already; remove one of them")
            own[key] = self._convert(value, where, inner)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, where: str, name: str) -> dict[str, Node]:
        """What `<<` brings in: of several mappings, the first that has a key."""
        merged: dict[str, Node] = {}
        for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            brought = self._convert(one, where, name).value
            if not isinstance(brought, dict):
                raise ConfigError(f"{where}: << takes the alias of a mapping, or a list of them")
            merged = {**brought, **merged}
        return merged
