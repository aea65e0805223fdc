"""Tokens: arrays of integers, and what can stand for one."""

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]


class StoredTokens(Protocol):
    """What chunks take tokens from: an array, or an object that fetches tokens on demand."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, where: slice, /) -> Tokens: ...

    def take(self, places: Ints, /) -> Tokens: ...


def constant(token: int, length: int = 1) -> Tokens:
    """An array that repeats one token, of the narrowest type that holds it."""
    return np.full(length, token, np.min_scalar_type(token))
