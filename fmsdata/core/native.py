"""The compiled kernel: a C extension with the inner loops of planning and copying.

It is optional. `kernel` is None if no C compiler was found when the package was installed, or if the
environment variable `FMSDATA_PURE` is set. Each of its functions has a twin in Python, next to the place that
calls it, which gives the same result to the last bit.
"""

import importlib
import os
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Tokens: TypeAlias = npt.NDArray[np.integer[Any]]

VERSION = 2  # a kernel that was built from an older source is not used


MOST_SOURCES = 64  # that `merge` takes


class Kernel(Protocol):
    """The functions of `_native.c`, where each is described."""

    VERSION: int

    def keys_of(self, prefix: bytes, numbers: Ints, out: npt.NDArray[np.uint64], /) -> None: ...

    def in_order(
        self,
        prefix: bytes,
        epochs: Ints,
        numbers: Ints,
        addresses: Ints,
        shard: Ints,
        row: Ints,
        starts: list[Any],
        lengths: list[Any],
        place: int,
        visited: int,
        least: int,
        spans: Ints,
        positions: Ints,
        /,
    ) -> tuple[int, list[tuple[int, int]]]: ...

    def join(self, spans: list[Ints], buffers: list[list[Any]], out: Ints, /) -> list[Any]: ...

    def merge(
        self, spans: list[Ints], buffers: list[list[Any]], due: list[Any], out: Ints, source: Ints, /
    ) -> list[Any]: ...

    def cut(self, spans: Ints, positions: Ints, out: Ints, first: Ints, /) -> int: ...

    def last_tokens(
        self, buffers: list[Any], mapped: type, spans: Ints, first: Ints, /
    ) -> tuple[np.dtype[Any], bytearray] | None: ...

    def table(
        self, buffers: list[Any], mapped: type, spans: Ints, first: Ints, /
    ) -> tuple[int, np.dtype[Any], tuple[Any, ...]] | None: ...

    def locate(
        self, rows: list[Any], length: int, dtype: Any, sources: set[Any], /
    ) -> tuple[list[int], bytearray] | None: ...

    def widen(self, tokens: Tokens, inputs: Ints, labels: Ints, extra: int, /) -> None: ...

    def copy(self, pieces: Ints, out: npt.NDArray[np.uint8], sources: set[Any], /) -> bool: ...

    def start_copy(self, pieces: Ints, out: Tokens, sources: set[Any], wide: list[Ints], extra: int, /) -> object: ...

    def end_copy(self, started: object, /) -> bool: ...


def _load() -> Kernel | None:
    if os.environ.get("FMSDATA_PURE"):
        return None
    try:
        module = importlib.import_module("fmsdata.core._native")
    except ImportError:
        return None
    return cast(Kernel, module) if getattr(module, "VERSION", None) == VERSION else None


kernel = _load()
