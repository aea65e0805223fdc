"""Checks of what users pass: one place, so that every wrong value gets the same kind of answer."""

import difflib
import numbers
import operator
import re
from collections.abc import Iterable
from typing import Any

from fmsdata.errors import ConfigError

MANY = 40  # names that a message can hold
SIZE = re.compile(r"(\d+|\d*\.\d+) ?([kMGT])(i?)B")


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


def rate(name: str, value: Any) -> float:
    """A share or a probability, from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise ConfigError(f"{name} is {value!r}; it must be a number from 0 to 1")
    return float(value)


def byte_count(text: str) -> int | None:
    """A number of bytes as people write it; None if it is not one.

    >>> byte_count("256MB"), byte_count("1.5 GiB"), byte_count("many")
    (256000000, 1610612736, None)
    """
    match = SIZE.fullmatch(text)
    return match and round(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "kMGT".index(match[2])))


def suggestion(word: str, known: Iterable[str]) -> str:
    """The way out for a word that is not known.

    >>> suggestion("rtae", ["rate", "mask"])
    "did you mean 'rate'?"
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1) or [one for one in known if word and one.startswith(word)]
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(known) - MANY} more" if len(known) > MANY else ""
    return f"known are {', '.join(known[:MANY]) or 'none'}{more}"


def check_parameters(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise if a parameter is given that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{what} has no parameter {name!r}; {suggestion(name, known)}")
