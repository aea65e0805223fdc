"""Errors of pydantic as problems: in plain words, each with its file and line."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError

from fmsdata.config.problems import Problem
from fmsdata.config.sections import Config, PhaseConfig, Section, SourceConfig
from fmsdata.config.values import KeyPath, NestedErrors
from fmsdata.config.yaml_file import BROKEN, Node, dotted
from fmsdata.core.checks import suggestion
from fmsdata.core.wording import shown

MUST_BE = {  # by pydantic's type of error
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "at least one letter",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "literal_error": "{expected}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
}


def validation_problems(error: ValidationError, root: Node) -> Iterator[Problem]:
    """The problems that pydantic found in a tree. Values from the environment are not shown."""
    for found in error.errors():
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, NestedErrors):
            for path, text in cause.errors:
                yield _problem(root, (*found["loc"], *path), f": {text}")
        elif found["input"] is not BROKEN and not _is_section_instead_of_flag(found):
            yield _problem(root, found["loc"], _describe(found), missing=found["type"] == "missing")


def _is_section_instead_of_flag(error: Any) -> bool:
    """Whether a mapping is no flag, for a key that may be both: its own problems are reported as well."""
    return error["type"] == "bool_type" and error["loc"][-1] == "bool" and isinstance(error["input"], dict)


def _problem(root: Node, location: KeyPath, text: str, *, missing: bool = False) -> Problem:
    node = root
    path: KeyPath = ()
    for part in location:  # pydantic also names the kinds of value that it tried: those are no keys
        if (below := node.get(part)) is not None:
            node, path = below, (*path, part)
    for secret in node.secrets():
        text = text.replace(repr(secret), "a value from the environment")
    return Problem(node.place, f"{dotted(*path, *location[-1:] if missing else ())}{text}")


def _describe(error: Any) -> str:
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return " is missing"
    if kind == "extra_forbidden":
        return f": unknown key; {_suggestion(error['loc'])}"
    if kind == "value_error":
        return f": {context['error']}"
    must_be = MUST_BE[kind].format(**context) if kind in MUST_BE else error["msg"]
    if context.get("class_name") == SourceConfig.__name__:
        must_be += ", such as {weight: 3}"
    elif kind == "string_type" and value is not None and not isinstance(value, dict | list):
        must_be += "; put quotes around it"
    # In full, so that a secret in it is found and replaced; only an object of a dict is put into words.
    text = repr(value) if isinstance(value, str | int | float | dict | list | None) else shown(value)
    return f" is {text}; it must be {must_be}"


def _suggestion(location: KeyPath) -> str:
    section: type[Section] = Config
    for part in location[:-1]:
        if part in section.model_fields:
            section = _section(section.model_fields[str(part)].annotation) or section
    wrong = str(location[-1])
    if location == ("include",):
        return "only a file can include others"
    for name, field in Config.model_fields.items():  # a key of another section
        other = _section(field.annotation)
        if other and other not in (SourceConfig, PhaseConfig) and wrong in other.model_fields:
            return f"did you mean {dotted(name, wrong)!r}?"
    return suggestion(wrong, section.model_fields)


def _section(annotation: Any) -> type[Section] | None:
    """The section in the type of a field, such as in `dict[str, SourceConfig] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)
