"""Filter: keeps the items for which a function returns true."""

from collections.abc import Callable, Iterable

from fmsdata.core.chunk import Item
from fmsdata.core.stage import Stage


class Filter(Stage):
    """Only the items for which a function returns true.

    >>> long = Filter(docs, lambda document: len(document) > 100)     # doctest: +SKIP
    """

    def __init__(self, below: Stage, fn: Callable[[Item], bool]) -> None:
        super().__init__(below)
        self.fn = fn

    def transform(self, item: Item, key: int) -> Iterable[Item]:  # noqa: ARG002
        return [item] if self.fn(item) else []
