"""The fingerprint of a dataset: whether a state belongs to it, without reading all of it.

It is the number of rows and a digest of the content of a few of them. They are read twice, seeded:
a row that differs then has no fixed content, and only its kind counts. A dataset whose
`fingerprint` attribute is a string, or an `EpochSampler` that is given one, names its content
itself, and nothing is read.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from fmsdata.core.keys import key_of
from fmsdata.core.state import State
from fmsdata.epochs.fine_tuning import FineTuningRows
from fmsdata.epochs.keyed_random import KeyedRandom
from fmsdata.epochs.mixture import RowMixture
from fmsdata.epochs.rows import read_rows

PROBES = 5  # rows that are read
DEEP = 8  # levels of a row that are looked at


def fingerprint(rows: Any, given: str | bool) -> State:
    """The description of a dataset for a state. `given` names the content; False: only the size counts."""
    if isinstance(rows, FineTuningRows):
        content = given if isinstance(given, str) else rows.content if given else ""
        return {"rows": len(rows), "content": content, "settings": rows.settings}
    if isinstance(rows, RowMixture):
        return {name: fingerprint(source, given) for name, source in rows.sources.items()}
    size = len(rows)
    name = given if isinstance(given, str) else getattr(rows, "fingerprint", None)
    if given is False:
        content = ""
    elif isinstance(name, str):
        content = name
    else:
        probes = sorted({i * (size - 1) // (PROBES - 1) for i in range(PROBES)})
        probed = _copy(rows)
        content = hashlib.sha256("\n".join(_content(probed, probe) for probe in probes).encode()).hexdigest()[:32]
    return {"rows": size, "content": content}


def _copy(rows: Any) -> Any:
    """A shallow copy, so that a file that rows open when they are first read is not opened in the original.

    That is sent to workers, and open files can't be.
    """
    if not hasattr(rows, "__dict__") or isinstance(rows, torch.Tensor | np.ndarray):
        return rows
    try:
        return copy.copy(rows)
    except Exception:  # it can't be copied
        return rows


def _content(rows: Any, row: int) -> str:
    """A digest of a row, or what kind it is if it differs each time."""
    calls = KeyedRandom()

    def read(seed: Callable[[int], None]) -> Any:
        seed(key_of("fingerprint", row))
        return read_rows(rows, [row])[0]

    try:
        first, second = calls.call(read), calls.call(read)
    except Exception as error:  # the loader reports it, if it comes to this row
        return type(error).__name__
    digests = [_digest(value) for value in (first, second)]
    return digests[0] if digests[0] == digests[1] else type(first).__name__


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _add(digest.update, value, DEEP)
    return digest.hexdigest()


def _add(update: Any, value: Any, deep: int) -> None:
    """Add a value to a digest. Of objects of unknown classes only the class counts."""
    update(f"{type(value).__name__}:".encode())
    if value is None or isinstance(value, str | int | float | complex | bool | np.generic):
        update(repr(value).encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        update(bytes(value))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        update(f"{value.dtype}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        data = value.detach().cpu().contiguous().reshape(-1)
        update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    elif deep and isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            update(repr(name).encode(errors="surrogatepass"))
            _add(update, value[name], deep - 1)
    elif deep and isinstance(value, list | tuple):
        for inner in value:
            _add(update, inner, deep - 1)
    elif deep and is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add(update, getattr(value, field.name), deep - 1)
    update(b";")
