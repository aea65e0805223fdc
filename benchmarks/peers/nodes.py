"""torchdata.nodes: a map-style dataset of documents, weighted sampling, and a packing node of one's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    Loader,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    StopCriteria,
)

from peers.corpus import EOS, Corpus
from peers.protocol import Batch, Setup, own, shifted

PACKAGE = "torchdata"
DOES = "mixes documents and shuffles; packed by a node of the script, in the main process"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:  # noqa: ARG001
    for source, (first, stop) in corpus.firsts.items():
        (folder / source).mkdir(parents=True, exist_ok=True)
        ends = corpus.ends[first : stop + 1]
        np.save(folder / source / "tokens.npy", np.arange(ends[0] + 1, ends[-1] + 1, dtype=np.int32))
        np.save(folder / source / "ends.npy", ends - ends[0])


class Documents:
    def __init__(self, folder: Path) -> None:
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._ends = np.load(folder / "ends.npy")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        return self._tokens[self._ends[index] : self._ends[index + 1]].astype(np.int64)


class Pack(BaseNode[Any]):  # type: ignore[misc]
    """Concatenates documents and cuts them. Its state holds the tokens that wait for the next row."""

    def __init__(self, source: BaseNode[Any], size: int) -> None:
        super().__init__()
        self._source, self._size = source, size
        self._rest = np.empty(0, np.int64)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._source.reset(initial_state["source"] if initial_state else None)
        self._rest = np.array(initial_state["rest"] if initial_state else [], np.int64)

    def next(self) -> Any:
        parts, size = [self._rest], len(self._rest)
        while size < self._size:
            try:
                document = next(self._source)
            except StopIteration:
                if not size:
                    raise
                parts += [np.zeros(self._size - size, np.int64)]  # the last row is filled up
                break
            parts += [document, np.array([EOS])]
            size += len(document) + 1
        stream = np.concatenate(parts)
        self._rest = stream[self._size :]
        return stream[: self._size]

    def get_state(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "rest": self._rest.tolist()}


def collate(rows: list[Any]) -> Batch:
    return shifted(torch.from_numpy(np.stack(rows)))


class Batches:
    def __init__(self, setup: Setup) -> None:
        sources = {}
        for name in setup.sources:
            documents = Documents(Path(setup.folder) / name)
            sampler: Any = DistributedSampler(documents, setup.world, setup.rank, shuffle=True)  # type: ignore[arg-type]
            node: Any = SamplerWrapper(sampler)
            method = {"method": "process", "multiprocessing_context": "forkserver"} if setup.workers else {}
            parallel = setup.workers or setup.threads
            sources[name] = ParallelMapper(node, documents.__getitem__, num_workers=parallel, **method)
        weights = {name: float(setup.weights[name]) if setup.weights else 1.0 for name in setup.sources}
        criteria = StopCriteria.CYCLE_FOREVER if setup.weights else StopCriteria.ALL_DATASETS_EXHAUSTED
        mixed = MultiNodeWeightedSampler(sources, weights, criteria, rank=setup.rank, world_size=setup.world)
        batched = Batcher(Pack(mixed, setup.length + 1), setup.batch, drop_last=False)
        self.loader = Loader(Prefetcher(ParallelMapper(batched, collate, num_workers=0), prefetch_factor=4))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    batches = Batches(setup)
    if states is not None:
        batches.loader.load_state_dict(own(setup, states))
    return batches
