"""State: plain data from which an iterator continues, and how it is read back."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from fmsdata.core.keys import key_of
from fmsdata.errors import StateError

State: TypeAlias = dict[str, Any]


def number(state: State | None, name: str) -> int:
    """A count in a saved state; 0 without a state, when an iterator starts from the beginning."""
    if state is None:
        return 0
    value = state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise StateError(f"{name!r} is {value!r}, expected a count: the state is damaged or was edited")
    return value


def signed_number(state: State | None, name: str) -> int:
    """A number in a saved state that may be negative; 0 without a state."""
    value = 0 if state is None else state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not abs(value) < 1 << 62:
        raise StateError(f"{name!r} is {value!r}, expected a number: the state is damaged or was edited")
    return value


def part(state: State | None, name: str) -> State | None:
    """A part of a saved state; None without a state."""
    if state is None:
        return None
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, dict):
        raise StateError(f"{name!r} is {value!r}, expected a state: the state is damaged or was edited")
    return value


def plain(value: Any) -> Any:
    """A parameter of a stage as plain data, for its description: functions by name, arrays by a digest."""
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
