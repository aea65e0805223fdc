"""Checks of what users pass: one place, so that every wrong value gets the same kind of answer."""

import operator
from typing import Any

from fmsdata.errors import ConfigError


def whole(name: str, value: Any, least: int | None = 0) -> int:
    """The value as a plain int, or an error that names it.

    >>> whole("lanes", 24, least=1)
    24
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    if least is not None and not least <= number < 1 << 62:
        raise ConfigError(f"{name} is {value!r}; it must be at least {least}")
    return number


def token(name: str, value: Any) -> int | None:
    """A special token, or None for no token."""
    return None if value is None else whole(name, value)
