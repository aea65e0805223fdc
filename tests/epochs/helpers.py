"""Ranks of a sampler or a loader, simulated in one process."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Sample(NamedTuple):
    """A row as it was handed out."""

    row: int
    epoch_id: int
    padding: bool


class Ranks:
    """All ranks of a run, each with a sampler and a loader of its own."""

    def __init__(
        self,
        rows: Any,
        *,
        global_batch: int,
        world_size: int,
        steps: int = 1,
        states: State | Sequence[State] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """`steps` is how many steps a global batch is spread over."""
        self.samplers = [
            fmsdata.EpochSampler(rows, global_batch=global_batch, rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]
        self.loaders = [
            fmsdata.StatefulDataLoader(
                rows, sampler=sampler, batch_size=global_batch // world_size // steps, num_workers=num_workers
            )
            for sampler in self.samplers
        ]
        if states is not None:
            for loader in self.loaders:
                loader.load_state_dict(states)

    def epoch(self) -> list[list[Sample]]:
        """The global samples of each step to the end of the epoch."""
        found: list[list[Sample]] = []
        iterators = [iter(loader) for loader in self.loaders]
        while True:
            batches = [next(iterator, None) for iterator in iterators]
            if any(batch is None for batch in batches):
                assert all(batch is None for batch in batches), "ranks have different numbers of steps"
                return found
            found.append(_dealt(batches))

    def step(self) -> list[Sample]:
        """The global samples of the next step, in this epoch or the next."""
        return _dealt([next(loader) for loader in self.loaders])

    def exclude(self, ids: Any) -> None:
        for sampler in self.samplers:
            sampler.exclude(ids)

    def states(self) -> list[State]:
        return [loader.state_dict() for loader in self.loaders]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def _dealt(batches: list[Any]) -> list[Sample]:
    """What the ranks got, in the order of global samples: sample p belongs to rank p mod world size."""
    parts = [samples(batch) for batch in batches]
    return [parts[at % len(parts)][at // len(parts)] for at in range(sum(map(len, parts)))]


def samples(batch: Any) -> list[Sample]:
    assert batch["row"].tolist() == batch["index"].tolist() == batch["pair"][:, 0].tolist()
    values = (batch[name].tolist() for name in ("index", "epoch_id", "is_padding"))
    return [Sample(*sample) for sample in zip(*values, strict=True)]


def joined(batches: list[list[Sample]]) -> list[Sample]:
    return [sample for batch in batches for sample in batch]
