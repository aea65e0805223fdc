"""The memory budget of a process for remote shards: who uses how much of it."""

import math
from dataclasses import dataclass

LENT = 3 / 4  # of the budget, for what the pipeline holds: the rest is for what comes next


@dataclass(eq=False)
class Budget:
    """`storage.prefetch_bytes`, and what it is used for.

    Each user keeps its own number up to date.
    """

    bytes: int
    ahead: int = 0  # fetched ahead, or being fetched
    lent: int = 0  # held by the pipeline
    whole: int = 0  # sources that are kept whole

    @property
    def total(self) -> int:
        """For all but the sources that are kept whole."""
        return self.bytes - self.whole

    @property
    def used(self) -> int:
        return self.ahead + self.lent

    @property
    def most_lent(self) -> float:
        return self.total * LENT if self.total else math.inf
