"""What pydantic finds wrong in a configuration, in the words of who wrote it, with file and line."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError

from fmsdata.config.sections import Config, Location, PhaseConfig, Problems, Section, SourceConfig
from fmsdata.config.yaml_file import BROKEN, Node, dotted
from fmsdata.core.checks import suggestion

MUST_BE = {
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


def in_words(error: ValidationError, root: Node) -> Iterator[str]:
    """Each problem in a line of its own. What came from the environment is not shown."""
    for one in error.errors():
        cause = one.get("ctx", {}).get("error")
        if isinstance(cause, Problems):
            for below, text in cause.problems:
                yield _line(root, (*one["loc"], *below), f": {text}")
        elif one["input"] is not BROKEN:
            yield _line(root, one["loc"], _what(one), missing=one["type"] == "missing")


def _line(root: Node, location: Location, what: str, *, missing: bool = False) -> str:
    node = root
    path: Location = ()
    for part in location:  # which also names the kinds of value that were tried
        if (below := node.get(part)) is not None:
            node, path = below, (*path, part)
    for secret in node.secrets():
        what = what.replace(repr(secret), "what the environment says")
    return f"{node.where}: {dotted(*path, *location[-1:] if missing else ())}{what}"


def _what(error: Any) -> str:
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
    return f" is {value!r}; it must be {must_be}"


def _suggestion(location: Location) -> str:
    section: type[Section] = Config
    for part in location[:-1]:
        if part in section.model_fields:
            section = _section(section.model_fields[str(part)].annotation) or section
    wrong = str(location[-1])
    if location == ("include",):
        return "only a file can include others"
    for name, field in Config.model_fields.items():  # written in another section than its own
        other = _section(field.annotation)
        if other and other not in (SourceConfig, PhaseConfig) and wrong in other.model_fields:
            return f"did you mean {dotted(name, wrong)!r}?"
    return suggestion(wrong, section.model_fields)


def _section(annotation: Any) -> type[Section] | None:
    """The section in a field's type, such as in `dict[str, SourceConfig] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)
