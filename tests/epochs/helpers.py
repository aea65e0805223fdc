"""Ranks of a sampler or a loader, simulated in one process."""

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

import torch

import fmsdata
from fmsdata.core.state import State


class Rows:
    """Rows that say which they are."""

    def __init__(self, rows: int, name: str = "rows") -> None:
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self._rows:
            raise IndexError(row)
        return {"row": row, "text": f"{self._name} {row}", "pair": torch.tensor([row, -row])}


Step = TypeVar("Step")


class Sample(NamedTuple):
    """A row as it was handed out."""

    row: int
    epoch_id: int
    padding: bool


class RankLoaders(ABC, Generic[Step]):
    """All ranks of a run, each with a sampler and a loader of its own."""

    def __init__(
        self,
        rows: Any,
        *,
        world_size: int,
        steps: int = 1,
        states: Any = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """`steps` is how many steps a global batch is spread over."""
        self.samplers = [
            fmsdata.EpochSampler(rows, rank=rank, world_size=world_size, **options) for rank in range(world_size)
        ]
        size = None if "max_tokens" in options else options["global_batch"] // world_size // steps
        self.loaders = [
            fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=size, num_workers=num_workers)
            for sampler in self.samplers
        ]
        if states is not None:
            for loader in self.loaders:
                loader.load_state_dict(states)

    @abstractmethod
    def dealt(self, batches: list[Any]) -> Step:
        """What the ranks got together in a step."""

    def epoch(self) -> list[Step]:
        """The steps to the end of the epoch."""
        found: list[Step] = []
        iterators = [iter(loader) for loader in self.loaders]
        while True:
            batches = [next(iterator, None) for iterator in iterators]
            if any(batch is None for batch in batches):
                assert all(batch is None for batch in batches), "ranks have different numbers of steps"
                return found
            found.append(self.dealt(batches))

    def step(self) -> Step:
        """The next step, in this epoch or the next."""
        return self.dealt([next(loader) for loader in self.loaders])

    def exclude(self, ids: Any) -> None:
        for sampler in self.samplers:
            sampler.exclude(ids)

    def states(self) -> list[State]:
        return [loader.state_dict() for loader in self.loaders]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


class Ranks(RankLoaders[list[Sample]]):
    """The global samples of each step."""

    def dealt(self, batches: list[Any]) -> list[Sample]:
        """In the order of global samples: sample p belongs to rank p mod world size."""
        parts = [samples(batch) for batch in batches]
        return [parts[at % len(parts)][at // len(parts)] for at in range(sum(map(len, parts)))]


def samples(batch: Any) -> list[Sample]:
    assert batch["row"].tolist() == batch["index"].tolist() == batch["pair"][:, 0].tolist()
    values = (batch[name].tolist() for name in ("index", "epoch_id", "is_padding"))
    return [Sample(*sample) for sample in zip(*values, strict=True)]


def joined(batches: list[list[Sample]]) -> list[Sample]:
    return [sample for batch in batches for sample in batch]
