"""The memory budget of a process for remote shards: who uses how much of it."""

import math
from dataclasses import dataclass

RESERVED = 3 / 8  # with a spool: for plans of lines, responses on their way, layouts, and what the allocator keeps
LENT = 3 / 4  # of the budget, for what the pipeline holds: the rest is for what comes next


@dataclass(eq=False)
class Budget:
    """`storage.prefetch_bytes`, and what it is used for.

    Each user keeps its own number up to date.
    """

    bytes: int
    reserved: int = 0  # for what is not counted here
    ahead: int = 0  # fetched ahead, or being fetched
    lent: int = 0  # held by the pipeline
    whole: int = 0  # sources that are kept whole

    @property
    def total(self) -> int:
        """For blocks, but for the sources that are kept whole."""
        return self.bytes - self.reserved - self.whole

    @property
    def used(self) -> int:
        return self.ahead + self.lent

    @property
    def most_lent(self) -> float:
        return self.total * LENT if self.total else math.inf
