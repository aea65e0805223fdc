"""Train states as files: written by torch, and loadable without running any code from them.

A state is checked when it is written: whatever `torch.load(weights_only=True)` would refuse is
named then, not when a run has to resume. Scalars of numpy, which arithmetic leaves behind in
schedulers and counters, are written as the Python numbers of the same value.
"""

import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from fmsdata.core.state import State
from fmsdata.errors import ConfigError

# The types that torch.load(weights_only=True) restores as they were.
VALUES = {bool, int, float, complex, str, bytes, bytearray, type(None)}
VALUES |= {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device}
CONTAINERS = {list, tuple, set, dict, OrderedDict, Counter}
# What to save instead of a value of another type.
INSTEAD: tuple[tuple[type, str], ...] = (
    (np.ndarray, "torch.from_numpy(array) or array.tolist()"),
    (np.generic, "str(value), or float(value) if its precision is enough"),
    (Enum, "its .name"),
    (PurePath, "str(path)"),
    (Mapping, "dict(mapping)"),
    (tuple, "tuple(values)"),
    (Set, "set(values)"),
)


def dump(state: State) -> bytes:
    """The state as the bytes of a file. Raises if a value could not be loaded again."""
    leaves = list(_leaves(state, (), ()))
    for key, value in leaves:
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ConfigError(f"{key} is a tensor on the meta device, which has no data; save a real one")
        if type(value) not in VALUES and not _is_scalar(value):
            instead = [words for kind, words in INSTEAD if isinstance(value, kind)]
            raise ConfigError(
                f"{key} is a {_kind(value)}, which torch.load(weights_only=True) would refuse; "
                f"save {instead[0] if instead else 'numbers, strings, lists, dicts or tensors'}"
            )
    data = _written(_without_numpy(state, {}))
    try:
        parse(data)
    except Exception as whole_cause:
        for key, value in leaves:
            try:
                parse(_written(_without_numpy(value, {})))
            except Exception as cause:
                raise ConfigError(f"{key} can't be loaded again with torch.load(weights_only=True)") from cause
        raise ConfigError("the train state can't be loaded again with torch.load(weights_only=True)") from whole_cause
    return data


def _leaves(value: Any, path: tuple[str, ...], above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """All values that are not containers, with dotted keys. Keys of dicts are values too."""
    if type(value) not in CONTAINERS:
        yield ".".join(path), value
        return
    if id(value) in above:
        raise ConfigError(f"{'.'.join(path)} holds itself, so it can't be checked; save a copy without the cycle")
    for name, inner_value in value.items() if isinstance(value, dict) else enumerate(value):
        inner = (*path, str(name))
        if isinstance(value, dict):
            yield from _leaves(name, inner, ())
        yield from _leaves(inner_value, inner, (*above, id(value)))


def _is_scalar(value: Any) -> bool:
    """Whether this is a scalar of numpy, or an array of one, that a Python value is equal to."""
    if not isinstance(value, np.generic) and not (type(value) is np.ndarray and value.ndim == 0):
        return False
    return value.dtype.kind in "biufcSU" and type(value.item()) in VALUES


def _without_numpy(value: Any, done: dict[int, Any]) -> Any:
    """The value with Python's numbers instead of numpy's. What was shared stays shared."""
    if type(value) not in CONTAINERS:
        return value.item() if _is_scalar(value) else value
    if id(value) not in done:
        if isinstance(value, dict):
            plain: Any = {_without_numpy(name, done): _without_numpy(inner, done) for name, inner in value.items()}
        else:
            plain = [_without_numpy(inner, done) for inner in value]
        done[id(value)] = type(value)(plain)
    return done[id(value)]


def _written(value: Any) -> bytes:
    """The value as torch.save writes it, with the checksums that `parse` verifies."""
    buffer, checksums = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(checksums)
    return buffer.getvalue()


def parse(data: bytes) -> Any:
    """The value that these bytes hold.

    Raises if they are damaged or hold more than plain data and tensors.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} is wrong")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
