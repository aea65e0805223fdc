"""YAML files as trees of values that know their file and line, so that an error can name them.

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

from fmsdata.config.problems import Place, Problem
from fmsdata.errors import ConfigError

TAG = "tag:yaml.org,2002:"
NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
PLACEHOLDER = re.compile(r"\$\$\{|\$\{(?:env:(\w+)(?::-([^}]*))?\})?")
NOWHERE = Place("")
ALIASED = 10_000  # values of a file beyond one per letter; aliases of aliases of lists can stand for any number
BROKEN = object()  # the value of a node whose problem is reported already


@dataclass(frozen=True)
class Node:
    """A value and where it was written. The value is a dict of nodes, a list of nodes, or plain."""

    value: Any
    place: Place = NOWHERE
    hidden: bool = False  # it may be a secret: never show it
    empty: bool = False  # nothing was written at all, not even `null`

    def plain(self) -> Any:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {name: node.plain() for name, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def secrets(self) -> Iterator[Any]:
        """The values in this node that must not be shown."""
        if isinstance(self.value, dict | list):
            for node in self.value.values() if isinstance(self.value, dict) else self.value:
                yield from node.secrets()
        elif self.hidden:
            yield self.value

    def get(self, part: str | int) -> "Node | None":
        """The node below with this name or number, if there is one."""
        if isinstance(self.value, dict):
            return self.value.get(part)
        return self.value[part] if isinstance(self.value, list) and isinstance(part, int) else None


def dotted(*path: str | int) -> str:
    """A path as written in messages and overrides.

    >>> dotted("phases", 0, "weights")
    'phases.0.weights'
    """
    return ".".join(str(part) for part in path if part != "")


def tree(value: Any, place: Place, problems: list[Problem]) -> Node:
    """A Python value as a tree, all of it at one place."""
    if isinstance(value, Mapping):
        problems += [Problem(place, f"the key {key!r} is not text") for key in value if not isinstance(key, str)]
        return Node({str(key): tree(item, place, problems) for key, item in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([tree(item, place, problems) for item in value], place)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return Node(value.item() if isinstance(value, np.generic) else value, place)


def read_yaml(path: Path, problems: list[Problem], above: tuple[Path, ...] = ()) -> Node:
    """A file as a tree, merged over the files that it includes."""
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
    for node in include.value if isinstance(include.value, list) else [include]:
        unset: list[Problem] = []
        name = fill_in(node, unset, name="include").value
        if unset:
            raise ConfigError(str(unset[0]))
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{node.place}: include takes the name of a YAML file, or a list of names")
        other, chain = path.parent / name, (*above, path)
        if not other.is_file():
            raise ConfigError(f"{node.place}: include {name!r}: there is no file {other}")
        if other.resolve() in [file.resolve() for file in chain]:
            raise ConfigError(f"{node.place}: files include each other: {' -> '.join(map(str, (*chain, other)))}")
        included = merge(included, read_yaml(other, problems, chain))
    return merge(included, replace(own, value=values))


def read_value(text: str) -> Any:
    """A value as written in a file.

    >>> read_value("[1, 1.0e3]")
    [1, 1000.0]
    """
    problems: list[Problem] = []
    value = _Text("value", text, problems).tree().plain()
    if problems:
        raise ConfigError(str(problems[0]))
    return value


def merge(below: Node, over: Node) -> Node:
    """Two trees as one, mapping by mapping, where `over` wins. `null` over a mapping removes it."""
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


def fill_in(node: Node, problems: list[Problem], *, as_text: bool = False, name: str = "") -> Node:
    """The tree with environment variables filled in.

    A text that is nothing but one variable becomes the number or word that it would be in YAML.
    Below `storage_options` it stays text: that is what `as_text` is for.
    """

    def below(key: str | int, child: Node) -> Node:
        return fill_in(child, problems, as_text=as_text or key == "storage_options", name=dotted(name, key))

    if isinstance(node.value, dict):
        return replace(node, value={key: below(key, child) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[below(index, child) for index, child in enumerate(node.value)])
    if not isinstance(node.value, str) or "${" not in node.value:
        return replace(node, hidden=as_text)
    hidden, missing = as_text, False

    def found(match: re.Match[str]) -> str:
        nonlocal hidden, missing
        variable, default = match.groups()
        if match[0] == "$${":
            return "${"
        if variable is None:
            text = f"{name}: '${{' starts a variable, as in ${{env:HOME}}; write $${{ for the text itself"
            problems.append(Problem(node.place, text))
        elif os.environ.get(variable) or (variable in os.environ and default is None):
            hidden = True
            return os.environ[variable]
        elif default is None:
            text = f"{name}: the environment variable {variable} is not set; set it, or write a default as in "
            problems.append(Problem(node.place, f"{text}${{env:{variable}:-default}}"))
        missing |= default is None
        return default or ""

    value: Any = PLACEHOLDER.sub(found, node.value)
    whole = PLACEHOLDER.fullmatch(node.value)
    if whole and whole[1] and not as_text:
        value = _scalar(value)
    return replace(node, value=BROKEN if missing else value, hidden=hidden)


def _scalar(text: str) -> Any:
    try:
        value = read_value(text)
    except ConfigError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


class _Loader(yaml.SafeLoader):
    """YAML as PyYAML reads it, except that 1e12 is a number (in YAML 1.1 only 1.0e+12 is)."""


_Loader.add_implicit_resolver(f"{TAG}float", NUMBER, list("-+.0123456789"))


class _Text:
    """Turns a YAML text into a tree."""

    def __init__(self, file: str, text: str, problems: list[Problem]) -> None:
        self._file, self._text, self._problems = file, text, problems
        self._open: list[yaml.Node] = []
        self._converted = 0

    def tree(self) -> Node:
        try:
            self._loader = _Loader(self._text)
            node = self._loader.get_single_node()
            whole = Place(self._file)
            return Node(None, whole, empty=True) if node is None else self._convert(node, whole, "")
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            words = ", ".join(filter(None, (error.context, error.problem)))
            if "'\\t'" in words:
                words = "a tab where spaces are needed; YAML is indented with spaces"
            place = Place(self._file, 0 if mark is None else mark.line + 1)
            raise ConfigError(f"{place}: not valid YAML: {words}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._file}: not valid YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise ConfigError(f"{self._file}: nested too deep") from None

    def _place(self, node: yaml.Node) -> Place:
        return Place(self._file, node.start_mark.line + 1)

    def _convert(self, node: yaml.Node, place: Place, name: str) -> Node:
        if any(node is parent for parent in self._open):
            raise ConfigError(f"{self._place(node)}: the anchor here contains itself")
        self._converted += 1
        if self._converted > len(self._text) + ALIASED:
            raise ConfigError(f"{self._place(node)}: the aliases (*name) in this file stand for too many values")
        self._open.append(node)
        try:
            if not isinstance(node, yaml.ScalarNode) and node.tag not in (f"{TAG}map", f"{TAG}seq"):
                raise ConfigError(f"{self._place(node)}: {name}: the tag {node.tag} is not supported; remove it")
            if isinstance(node, yaml.MappingNode):
                return Node(self._mapping(node, name), place)
            if isinstance(node, yaml.SequenceNode):
                items = enumerate(node.value)
                return Node([self._convert(item, self._place(item), dotted(name, i)) for i, item in items], place)
            empty = node.tag == f"{TAG}null" and not node.value
            return Node(self._loader.construct_object(node), place, empty=empty)
        except ValueError as error:  # such as a date in month 13
            raise ConfigError(f"{place}: {name}: {node.value!r} can't be read: {error}; put quotes around it") from None
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, name: str) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value in node.value:
            place = self._place(key_node)
            if key_node.tag == f"{TAG}merge":
                merged = {**self._merged(value, place, name), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: {name or 'the file'} has a key that is a list or a mapping, not a name")
            key, inner = key_node.value, dotted(name, key_node.value)
            if key_node.tag != f"{TAG}str":
                kind = key_node.tag.removeprefix(TAG)
                text = f'{inner}: the key is read as {kind}; put quotes around it: "{key}"'
                self._problems.append(Problem(place, text))
            if key in own:
                text = f"{inner}: the same key is already in line {own[key].place.line}; remove one of them"
                self._problems.append(Problem(place, text))
            own[key] = self._convert(value, place, inner)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, place: Place, name: str) -> dict[str, Node]:
        """The mapping that `<<` brings in. Of several mappings, the first that has a key wins."""
        merged: dict[str, Node] = {}
        for alias in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            mapping = self._convert(alias, place, name).value
            if not isinstance(mapping, dict):
                raise ConfigError(f"{place}: << takes the alias of a mapping, or a list of aliases")
            merged = {**mapping, **merged}
        return merged
