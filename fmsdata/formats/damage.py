"""Damaged files: whatever error their bytes cause becomes one that names the file."""

import struct
from types import TracebackType

import pyarrow as pa

from fmsdata.errors import DataError


class Truncated(Exception):
    """The bytes are not a complete file."""


DAMAGE = (struct.error, IndexError, ValueError, OverflowError, OSError, Truncated, pa.ArrowException)


class Guarded:
    """A context in which errors that damaged bytes can cause become one that names the file.

    >>> with Guarded("a.arrow"):
    ...     raise Truncated("no end")
    Traceback (most recent call last):
    ...
    fmsdata.errors.DataError: a.arrow: the file is damaged (no end); write it again or remove it
    """

    def __init__(self, name: str, problem: str = "the file is damaged") -> None:
        self._name, self._problem = name, problem

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, DAMAGE):
            raise DataError(f"{self._name}: {self._problem} ({error}); write it again or remove it") from None
