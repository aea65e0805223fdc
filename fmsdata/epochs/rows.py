"""What a dataset of rows must have: a length and `[]`; `__getitems__` is used where there is one."""

import sys
from collections.abc import Sequence
from operator import length_hint
from typing import Any, Protocol

import torch

from fmsdata.core.keys import Keys
from fmsdata.epochs.keyed_random import Seeder
from fmsdata.errors import ConfigError, DataError


class Rows(Protocol):
    """A dataset with a length and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def length(rows: Any, name: str = "rows") -> int:
    """The number of rows, at least 1."""
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or isinstance(rows, dict | str | bytes):
        raise ConfigError(
            f"{name} is a {type(rows).__name__}; it must be a dataset with a length and rows by number, such as a list "
            "or a Dataset of torch or of Hugging Face"
        )
    size = len(rows)
    if not size:
        raise ConfigError(f"{name} has no rows: {type(rows).__name__} of length 0; check how it was made")
    return size


def read_tensors(rows: Any, ids: Sequence[int]) -> dict[str, torch.Tensor] | None:
    """These rows of a Hugging Face dataset as a tensor for each column; None if they must be read one by one.

    It has them like this. Its `__getitems__` takes them apart, for others to join them again.
    """
    hugging_face = sys.modules.get("datasets")
    if hugging_face is None or type(rows) is not hugging_face.Dataset or rows.format["type"] != "torch":
        return None
    try:
        found = rows[list(ids)]
    except Exception:  # reading them one by one raises it again, and says which row it was
        return None
    columns = list(found.values()) if type(found) is dict else []
    whole = all(type(column) is torch.Tensor and column.shape[:1] == (len(ids),) for column in columns)
    return found if columns and whole else None


def read_seeded(rows: Any, ids: Sequence[int], keys: Keys, seeder: Seeder) -> list[Any]:
    """The rows with these ids, each read when the generators were seeded with its key."""
    left, seeded = iter(ids), seeder.each(keys)
    if hasattr(rows, "__getitems__"):
        return [read_rows(rows, [row])[0] for row, _ in zip(left, seeded, strict=True)]
    try:
        return [rows[row] for row, _ in zip(left, seeded, strict=True)]
    except Exception as error:
        error.add_note(f"while reading row {ids[-1 - length_hint(left)]} of {type(rows).__name__}")
        raise


def read_rows(rows: Any, ids: Sequence[int]) -> list[Any]:
    """The rows with these ids."""
    left = iter(ids)
    try:
        if not hasattr(rows, "__getitems__"):
            return [rows[row] for row in left]
        found = list(rows.__getitems__(list(ids)))
    except Exception as error:
        at = length_hint(left)
        which = f"rows {', '.join(map(str, ids))}" if at == len(ids) else f"row {ids[-1 - at]}"
        error.add_note(f"while reading {which} of {type(rows).__name__}")
        raise
    if len(found) != len(ids):
        raise DataError(
            f"{type(rows).__name__}.__getitems__ returned {len(found)} rows for {len(ids)} ids; "
            "it must return a row for each of them"
        )
    return found
