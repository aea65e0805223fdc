"""A memory-mapped array of rows that were cut before the run, and torch's DataLoader.

The state is the number of samples that all ranks consumed, and the sampler starts there: the usual
few lines of one's own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from peers.corpus import Corpus
from peers.protocol import Batch, Setup, shifted

PACKAGE = "torch"
DOES = "shuffles; mixed and packed before the run"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:
    order = np.random.default_rng(1).permutation(len(corpus.ends) - 1)
    np.save(folder / "rows.npy", corpus.rows(order, length + 1))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, path: Path) -> None:
        self._rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[index].astype(np.int64))


class Remaining(Sampler[int]):
    """The rows of this rank, in the random order of the epoch, behind those that were consumed."""

    def __init__(self, size: int, setup: Setup, consumed: int) -> None:
        self._size, self._setup, self._consumed = size, setup, consumed

    def __iter__(self) -> Iterator[int]:
        epoch, start = divmod(self._consumed, self._size)
        order = torch.randperm(self._size, generator=torch.Generator().manual_seed(epoch))
        return iter(order[start + self._setup.rank :: self._setup.world].tolist())


class Batches:
    def __init__(self, setup: Setup, consumed: int) -> None:
        self._setup, self._consumed = setup, consumed
        self._rows = Rows(Path(setup.folder) / "rows.npy")

    def __iter__(self) -> Iterator[Batch]:
        setup = self._setup
        sampler = Remaining(len(self._rows), setup, self._consumed)
        loader = DataLoader(self._rows, batch_size=setup.batch, sampler=sampler, num_workers=setup.workers)
        start = self._consumed
        for step, rows in enumerate(loader, 1):
            self._consumed = start + step * setup.batch * setup.world
            yield shifted(rows)
        self._consumed = -(-self._consumed // len(self._rows)) * len(self._rows)

    def state(self) -> int:
        return self._consumed


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    return Batches(setup, states[0] if states else 0)
