"""What each loader's module has, so that all are measured in the same way.

A module has the constants `PACKAGE` (whose version is reported) and `DOES` (what it does while it
reads, and what it leaves out), and two functions:

    prepare(corpus, folder, length)    write the corpus in the loader's own format
    open_loader(setup, states)         batches, from the start or from the states of all ranks
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

Batch = dict[str, Any]  # input_ids and labels, int64


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to read a corpus."""

    folder: str
    sources: list[str]
    batch: int
    length: int
    rank: int = 0
    world: int = 1
    workers: int = 0
    weights: dict[str, float] | None = None  # none: one pass, in which each document comes once
    threads: int = 0  # instead of workers, of torchdata nodes
    lanes: int | None = None  # of fmsdata; none: the default
    prefetch: int | None = None  # the batches that the thread of fmsdata makes ahead; 0: no thread; none: the default
    buffer: int = 1000  # documents in a shuffle buffer


class Loader(Protocol):
    """Batches of one rank. Iterating again is the next pass."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state(self) -> Any:
        """The position after the batches so far, or none if the loader has no such thing."""


def shifted(rows: Any) -> Batch:
    """Rows of one token more than the model sees, as inputs and labels."""
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def own(setup: Setup, states: list[Any]) -> Any:
    """The state of this rank; a new rank is given that of another, as there is nothing else to give."""
    return states[setup.rank % len(states)]
