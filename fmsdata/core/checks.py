"""Checks of arguments: one place, so that every wrong value gets the same kind of error."""

import difflib
import numbers
import operator
import re
from collections.abc import Iterable
from typing import Any

from fmsdata.core.wording import few, shown
from fmsdata.errors import ConfigError

MANY = 40  # names in a message
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
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number")
    if least is not None and not least <= number < 1 << 62:
        raise ConfigError(f"{name} is {shown(value)}; it must be at least {least}")
    return number


def token(name: str, value: Any) -> int | None:
    """A special token, or None for no token."""
    return None if value is None else whole(name, value)


def rate(name: str, value: Any) -> float:
    """A share or a probability, from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise ConfigError(f"{name} is {shown(value)}; it must be a number from 0 to 1")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """A switch, which is True or False and nothing else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; it must be true or false")
    return value


def unnamed(sources: Iterable[str], weights: Iterable[str]) -> str | None:
    """Why the weights of a phase are refused that leave out some of the sources.

    A source that is left out would silently stop.

    >>> unnamed(["code", "web", "wiki"], {"web": 1})
    "no weight for 'code', 'wiki': write `code: 0, wiki: 0` to stop them in this phase"
    """
    missing = sorted(set(sources) - set(weights))
    if not missing:
        return None
    names, zeros = ", ".join(map(repr, missing)), ", ".join(f"{name}: 0" for name in missing)
    return f"no weight for {names}: write `{zeros}` to stop {'it' if len(missing) == 1 else 'them'} in this phase"


def seconds(name: str, value: Any) -> float:
    """A duration, which must be above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name} is {shown(value)}; it must be a number of seconds above zero")
    return float(value)


def byte_count(text: str) -> int | None:
    """A number of bytes as people write it; None if the text is not one.

    >>> byte_count("256MB"), byte_count("1.5 GiB"), byte_count("many")
    (256000000, 1610612736, None)
    """
    match = SIZE.fullmatch(text)
    return match and round(float(match[1]) * (1024 if match[3] else 1000) ** (1 + "kMGT".index(match[2])))


def suggestion(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: the closest known one, or all of them.

    >>> suggestion("rtae", ["rate", "mask"])
    "did you mean 'rate'?"
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1) or [name for name in known if word and name.startswith(word)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"must be one of {few(known, MANY)}" if known else "none is known"


def check_parameters(owner: str, parameters: Iterable[str], known: Iterable[str]) -> None:
    """Raise if a parameter is unknown."""
    known = list(known)
    for name in parameters:
        if name not in known:
            raise ConfigError(f"{owner} has no parameter {name!r}; {suggestion(name, known)}")
