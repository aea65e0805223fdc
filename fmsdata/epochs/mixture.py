"""RowMixture: several datasets with a length as one, in which each has a share of the rows of an epoch.

It is a recipe: rows, weights and the size of an epoch. The order of an epoch is made by
`fmsdata.epochs.mixed_order`, and positions are in the state of the `EpochSampler`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fmsdata.core.checks import whole
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.wording import counted, shown
from fmsdata.epochs.rows import length, read_rows
from fmsdata.errors import ConfigError
from fmsdata.stages.mixture.weights import as_shares, check_weights

DATASET_IDX = "dataset_idx"


class RowMixture:
    """Rows of several datasets, for an `EpochSampler`. Only their names matter, not their order.

    Without `weights` an epoch is as many rows as there are, or with a `temperature` above 1 more of the small
    datasets: `rows ** (1 / temperature)`. With weights, an epoch has the same number of rows (or
    `epoch_size`), in these shares at any moment. A dataset that is read to its end starts again,
    in a new order, and one that is not continues in the next epoch. So no row comes a second time
    before all others of its dataset have come.

    A row that is a dict gets `dataset_idx`: the number of its dataset in `names`, which are sorted.

    >>> mix = RowMixture({"code": ["a", "b"], "math": ["c"]}, weights={"code": 0.5, "math": 0.5})
    >>> len(mix), mix[2], mix.locate(2)
    (3, 'c', ('math', 0))
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        temperature: float | None = None,
        epoch_size: int | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ConfigError(f"sources is {shown(sources)}; it must be a dict of datasets by name, with at least one")
        if wrong := [name for name in sources if not isinstance(name, str)]:
            raise ConfigError(f"the name of a source is {wrong[0]!r}; it must be a string")
        self.names = tuple(sorted(sources))
        self.sources = {name: sources[name] for name in self.names}
        self.sizes = tuple(length(rows, f"source {name!r}") for name, rows in self.sources.items())
        self.starts: Ints = offsets(np.array(self.sizes, np.int64))
        if temperature is not None:
            if weights is not None:
                raise ConfigError("temperature is for mixtures without weights: give one of the two")
            if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < 1e6:
                raise ConfigError(f"temperature is {temperature!r}; it must be a number above zero")
        self.temperature = temperature
        self.weights = None if weights is None else self.checked_weights(weights)
        self.epoch_size = None if epoch_size is None else whole("epoch_size", epoch_size, least=1)

    @property
    def has_fixed_size(self) -> bool:
        """Whether an epoch has a number of rows that does not follow from the rows that are left."""
        return self.weights is not None or self.temperature is not None or self.epoch_size is not None

    def checked_weights(self, weights: Mapping[str, float]) -> dict[str, float]:
        """These weights as shares of 1, or an error."""
        check_weights(self.sources, weights)
        return as_shares(self.sources, weights)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, index: int) -> tuple[str, int]:
        """The name of the dataset that a row belongs to, and the number of the row in it."""
        source, row = self._locate(index)
        return self.names[source], row

    def _locate(self, index: int) -> tuple[int, int]:
        index = whole("index", index, least=None)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a mixture of {counted(len(self), 'row')}")
        source = int(np.searchsorted(self.starts, index, side="right")) - 1
        return source, index - int(self.starts[source])

    def __getitem__(self, index: int) -> Any:
        source, row = self._locate(index)
        return _marked(self.sources[self.names[source]][row], source)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Some rows. Those of a dataset are read together, if it has `__getitems__`."""
        located = [self._locate(index) for index in indices]
        found: list[Any] = [None] * len(located)
        for source in sorted({source for source, _ in located}):
            at = [i for i, (of, _) in enumerate(located) if of == source]
            rows = read_rows(self.sources[self.names[source]], [located[i][1] for i in at])
            for i, row in zip(at, rows, strict=True):
                found[i] = _marked(row, source)
        return found

    def __repr__(self) -> str:
        parts = (f"{name}: {counted(size, 'row')}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"RowMixture({', '.join(parts)})"


def _marked(row: Any, source: int) -> Any:
    return {**row, DATASET_IDX: source} if isinstance(row, dict) else row
