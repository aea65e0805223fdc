"""From the ids of rows to a batch: the rows are read, marked and collated.

It runs in worker processes, or in the trainer without them. Rows and collate functions may draw from
the global generators: what they get depends on the seed, the epoch and the row, and on nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from fmsdata.core.keys import Ints, key_of, mix
from fmsdata.epochs.cursor import PlannedBatch
from fmsdata.epochs.keyed_random import KeyedRandom, seed
from fmsdata.epochs.rows import read_rows
from fmsdata.errors import ConfigError, DataError

IS_PADDING = "is_padding"
FIELDS = ("index", "epoch_id", IS_PADDING)  # of `RowIds`
MANY = 8  # ids in a description


@dataclass(frozen=True)
class RowIds:
    """Which rows a batch has: `index` in the dataset, `epoch_id`, and which only fill up."""

    index: torch.Tensor
    epoch_id: torch.Tensor
    is_padding: torch.Tensor


class RowRequest(NamedTuple):
    """The rows of a batch, as they are sent to a worker."""

    epoch: int
    rows: Ints
    epoch_ids: Ints
    padding: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, planned: PlannedBatch) -> "RowRequest":
        return cls(planned.epoch, planned.rows, planned.epoch_ids, planned.padding)

    @property
    def ids(self) -> RowIds:
        return RowIds(*(torch.from_numpy(array.copy()) for array in (self.rows, self.epoch_ids, self.padding)))

    def __str__(self) -> str:
        more = f" and {len(self.rows) - MANY} more" if len(self.rows) > MANY else ""
        return f"epoch {self.epoch}, rows {', '.join(map(str, self.rows[:MANY].tolist()))}{more}"


@dataclass(frozen=True, kw_only=True)
class RowRecipe:
    """How batches are made."""

    rows: Any
    seed: int
    collate: Callable[[list[Any]], Any] | None
    names: tuple[str, ...]  # of the fields of `RowIds` that rows and batches get


class RowReader:
    """Reads one batch after the other."""

    def __init__(self, recipe: RowRecipe) -> None:
        self._recipe = recipe
        self._reading, self._collating = KeyedRandom(), KeyedRandom()

    def read(self, request: RowRequest) -> Any:
        """The batch."""
        key, ids = key_of(self._recipe.seed, "row", request.epoch), request.rows.tolist()
        dataset = self._recipe.rows

        def seeded(row: int) -> Any:
            seed(mix(key ^ row))
            return read_rows(dataset, [row])[0]

        rows = self._reading.call(lambda: read_rows(dataset, ids), lambda: [seeded(row) for row in ids])
        collate = self._collate if self._recipe.collate is None else self._own_collate

        def seeded_collate() -> Any:
            seed(key_of(self._recipe.seed, "collate", int(request.epoch_ids[0])))
            return collate(rows, request)

        return self._collating.call(lambda: collate(rows, request), seeded_collate)

    def _collate(self, rows: list[Any], request: RowRequest) -> Any:
        for row, index in zip(rows, request.rows, strict=True):
            if row is None:
                raise DataError(
                    f"row {index} of {type(self._recipe.rows).__name__} is None; return a row for each id, exclude it "
                    "(sampler.exclude), or give a collate_fn that leaves it out"
                )
        try:
            batch = default_collate(rows)
        except (TypeError, RuntimeError, KeyError, ValueError) as error:
            error.add_note(f"while joining {request}; rows that differ in shape or kind need a collate_fn")
            raise
        if isinstance(batch, dict):
            self._check_names(batch)
            ids = request.ids
            batch.update({name: getattr(ids, name) for name in self._recipe.names})
        return batch

    def _own_collate(self, rows: list[Any], request: RowRequest) -> Any:
        names = self._recipe.names
        if names and isinstance(rows[0], dict):
            self._check_names(rows[0])
            columns = [array.tolist() for array in (request.rows, request.epoch_ids, request.padding)]
            marks = [dict(zip(FIELDS, values, strict=True)) for values in zip(*columns, strict=True)]
            rows = [
                {**row, **{name: mark[name] for name in names}} if isinstance(row, dict) else row
                for row, mark in zip(rows, marks, strict=True)
            ]
        collate = self._recipe.collate
        return rows if collate is None else collate(rows)

    def _check_names(self, row: dict[Any, Any]) -> None:
        if taken := [name for name in self._recipe.names if name in row]:
            raise ConfigError(
                f"rows have a field {taken[0]!r} of their own, and the loader adds one of this name; rename it in the "
                "rows" + ("" if taken[0] == IS_PADDING else ", or give the loader row_ids=False")
            )


def field_names(row_ids: bool, drop_last: bool) -> tuple[str, ...]:
    """The fields that the loader adds to rows. Rows that fill up are always marked."""
    if row_ids:
        return FIELDS
    return () if drop_last else (IS_PADDING,)
