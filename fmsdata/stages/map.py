"""Map: applies a function to each item."""

from collections.abc import Callable, Iterable

import numpy.typing as npt

from fmsdata.core.chunk import Item
from fmsdata.core.stage import Stage


class Map(Stage):
    """Each item, passed through a function that returns an item or just new tokens.

    The function must not draw random numbers: a subclass of `Stage` gets a key for that.

    >>> clipped = Map(docs, lambda document: document.tokens[:1000])     # doctest: +SKIP
    """

    def __init__(self, below: Stage, fn: Callable[[Item], Item | npt.ArrayLike]) -> None:
        super().__init__(below)
        self.fn = fn

    def transform(self, item: Item, key: int) -> Iterable[Item]:  # noqa: ARG002
        made = self.fn(item)
        return [made if isinstance(made, Item) else item.replace(made)]
