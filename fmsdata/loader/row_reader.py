"""From the ids of rows to a batch: the rows are read, marked and collated.

It runs in worker processes, or in the trainer without them. Rows and collate functions may draw from
the global generators: what they get depends on the seed, the epoch and the row, and on nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fmsdata.core.keys import Keys, key_of, mix_array
from fmsdata.epochs.cursor import Chunk, RowRequest
from fmsdata.epochs.keyed_random import KeyedRandom, Seeder
from fmsdata.epochs.mixture import RowMixture
from fmsdata.epochs.rows import read_rows, read_seeded, read_tensors
from fmsdata.errors import ConfigError, DataError

IS_PADDING = "is_padding"
COLUMNS = {"index": "rows", "epoch_id": "epoch_ids", IS_PADDING: "padding"}  # of a `RowRequest`
FIELDS = tuple(COLUMNS)  # of `RowIds`


@dataclass(frozen=True)
class RowIds:
    """Which rows a batch has: `index` in the dataset, `epoch_id`, and which only fill up."""

    index: torch.Tensor
    epoch_id: torch.Tensor
    is_padding: torch.Tensor

    @classmethod
    def of(cls, request: RowRequest) -> "RowIds":
        return cls(*(torch.from_numpy(array.copy()) for array in request.columns))


@dataclass(frozen=True, kw_only=True)
class RowRecipe:
    """How batches are made."""

    rows: Any
    seed: int
    collate: Callable[[list[Any]], Any] | None
    names: tuple[str, ...]  # of the fields of `RowIds` that rows and batches get

    def open(self) -> "RowReader":
        return RowReader(self)


class RowReader:
    """Reads one batch after the other."""

    def __init__(self, recipe: RowRecipe) -> None:
        self._recipe = recipe
        self._random, self._names = KeyedRandom(), frozenset(recipe.names)
        self._columns = [(name, RowRequest._fields.index(COLUMNS[name])) for name in recipe.names]
        self._collate = self._default_collate if recipe.collate is None else self._own_collate
        self._has_tensors = recipe.collate is None  # of its own: see `read_tensors`

    def read(self, request: RowRequest) -> Any:
        """The batch."""
        return self._random.call(self._read, request)

    def _read(self, seeder: Seeder, request: RowRequest) -> Any:
        """The batch. Rows that draw are read one by one, each seeded."""
        dataset, ids = self._recipe.rows, request.rows.tolist()
        if not self._random.draws:
            if self._has_tensors and (batch := read_tensors(dataset, ids)) is not None:
                return self._marked(batch, request)
            self._has_tensors = False  # looked for once, since reading them in vain takes long
            return self._collate(read_rows(dataset, ids), request)
        rows = read_seeded(dataset, ids, self._keys(request), seeder)
        if self._recipe.collate is not None:  # which may draw, too
            seeder(key_of(self._recipe.seed, "collate", int(request.epoch_ids[0])))
        return self._collate(rows, request)

    def _keys(self, request: RowRequest) -> Keys:
        """What rows are seeded with."""
        chunk = request.chunk or Chunk([column[None] for column in request.columns])
        if chunk.keys is None:
            rows, epoch_ids, _ = (column.astype(np.uint64) for column in chunk.columns)
            keys = mix_array(rows ^ np.uint64(key_of(self._recipe.seed, "row", request.epoch)))
            if isinstance(self._recipe.rows, RowMixture):  # a row may come twice in an epoch: with other numbers
                keys ^= epoch_ids
            chunk.keys = list(mix_array(keys))
        return chunk.keys[request.number]

    def _default_collate(self, rows: list[Any], request: RowRequest) -> Any:
        try:
            batch = joined(rows)
        except (TypeError, RuntimeError, LookupError, ValueError, AttributeError) as error:
            for row, index in zip(rows, request.rows, strict=True):
                if row is None:
                    raise DataError(
                        f"row {index} of {type(self._recipe.rows).__name__} is None; return a row for each id, exclude "
                        "it (sampler.exclude), or give a collate_fn that leaves it out"
                    ) from None
            error.add_note(f"while joining {request}; rows that differ in shape or kind need a collate_fn")
            raise
        return self._marked(batch, request) if isinstance(batch, dict) else batch

    def _marked(self, batch: dict[Any, Any], request: RowRequest) -> dict[Any, Any]:
        self._check_names(batch)
        for name, column in self._columns:
            batch[name] = torch.from_numpy(np.array(request[column]))  # the request is also the account of the batch
        return batch

    def _own_collate(self, rows: list[Any], request: RowRequest) -> Any:
        names = self._recipe.names
        if names and isinstance(rows[0], dict):
            self._check_names(rows[0])
            columns = [array.tolist() for array in request.columns]
            marks = [dict(zip(FIELDS, values, strict=True)) for values in zip(*columns, strict=True)]
            rows = [
                {**row, **{name: mark[name] for name in names}} if isinstance(row, dict) else row
                for row, mark in zip(rows, marks, strict=True)
            ]
        collate = self._recipe.collate
        return rows if collate is None else collate(rows)

    def _check_names(self, row: dict[Any, Any]) -> None:
        if not self._names.isdisjoint(row):
            taken = [name for name in self._recipe.names if name in row]
            raise ConfigError(
                f"rows have a field {taken[0]!r} of their own, and the loader adds one of this name; rename it in the "
                "rows" + ("" if taken[0] == IS_PADDING else ", or give the loader row_ids=False")
            )


def joined(rows: list[Any]) -> Any:
    """The same as `default_collate`, with a shortcut for tensors in dicts."""
    if type(rows[0]) is not dict:
        return default_collate(rows)
    batch = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if type(first) is not torch.Tensor:
            batch[name] = default_collate(values)
        elif first.dtype is torch.int64 and not first.ndim and first.is_cpu:
            batch[name] = _joined_integers(values)
        else:
            batch[name] = torch.stack(values)
    return batch


def _joined_integers(values: list[Any]) -> torch.Tensor:
    """`torch.stack` in less time, since it would make a view of each. It takes what other values are among them."""
    try:
        numbers = np.array(list(map(torch.Tensor.tolist, values)))
    except (TypeError, ValueError, RuntimeError):
        return torch.stack(values)
    return torch.from_numpy(numbers) if numbers.dtype == np.int64 and numbers.ndim == 1 else torch.stack(values)


def field_names(row_ids: bool, drop_last: bool) -> tuple[str, ...]:
    """The fields that the loader adds to rows. Rows that fill up are always marked."""
    if row_ids:
        return FIELDS
    return () if drop_last else (IS_PADDING,)
