"""State: plain data from which an iterator continues, and how it is read back.

A state comes from a file, so nothing in it is trusted. `number`, `part` and `parse` read it value
by value, and stages check what they know: that a document is in its block, or a line in its window.
What is left becomes an error of the state at one outer place, `Restoring`.
"""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from fmsdata.core.keys import key_of
from fmsdata.core.wording import shown
from fmsdata.errors import StateError

State: TypeAlias = dict[str, Any]
EDITED = "the state is damaged or was edited"
# What reading plain data of the wrong kind raises.
DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


class Restoring:
    """A context in which errors that a damaged state can cause become a `StateError` that names it.

    >>> with Restoring("the state of lane 3"):
    ...     {}["block"]
    Traceback (most recent call last):
    ...
    fmsdata.errors.StateError: the state of lane 3 can't be used: KeyError('block')
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, StateError):
            raise StateError(f"{self._what} can't be used: {error}") from None
        if isinstance(error, DAMAGE):
            raise StateError(f"{self._what} can't be used: {shown(error)}") from error


def parse(text: Any, what: str) -> State:
    """The data in a JSON text of a saved state."""
    try:
        data = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise StateError(f"{what} is not JSON: it is damaged or was edited")
    return data


def require_version(state: Mapping[str, Any], version: int, what: str) -> None:
    """Raise if a state was written by another version of this package."""
    if state["version"] != version:
        way_out = "use a newer fmsdata" if state["version"] > version else "use the fmsdata that wrote it"
        raise StateError(f"{what} has version {state['version']} and this fmsdata reads version {version}; {way_out}")


def is_count(value: Any) -> TypeGuard[int]:
    """Whether this is a whole number that can count something."""
    return type(value) is int and 0 <= value < 1 << 62


def number(state: State | None, name: str) -> int:
    """A count in a saved state; 0 without a state, when an iterator starts from the beginning."""
    if state is None:
        return 0
    value = state.get(name) if isinstance(state, Mapping) else None
    if not is_count(value):
        raise StateError(f"{name!r} is {shown(value)}, expected a count: {EDITED}")
    return value


def signed_number(state: State | None, name: str) -> int:
    """A number in a saved state that may be negative; 0 without a state."""
    value = 0 if state is None else state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not abs(value) < 1 << 62:
        raise StateError(f"{name!r} is {shown(value)}, expected a number: {EDITED}")
    return value


def part(state: State | None, name: str) -> State | None:
    """A part of a saved state; None without a state."""
    if state is None:
        return None
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, dict):
        raise StateError(f"{name!r} is {shown(value)}, expected a state: {EDITED}")
    return value


def plain(value: Any) -> Any:
    """A parameter of a stage as plain data: functions by name, arrays by a digest."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}:{key_of(value.tobytes().hex()):016x}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return type(value).__qualname__
