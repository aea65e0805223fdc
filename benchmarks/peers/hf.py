"""Hugging Face datasets, streaming: Parquet files, interleaved, shuffled in a buffer, packed by `map`.

The packing is the one of its tutorials: concatenate a batch of documents, cut it, drop the rest.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from peers.corpus import EOS, Corpus, shards
from peers.protocol import Batch, Setup, own, shifted

PACKAGE = "datasets"
DOES = "mixes documents and shuffles; packed in `map`, which drops what is left of each batch of documents"


def prepare(corpus: Corpus, folder: Path, length: int) -> None:  # noqa: ARG001
    for path, documents in shards(corpus, folder, "parquet"):
        column = pa.array([corpus.document(number) for number in documents], pa.list_(pa.int32()))
        pq.write_table(pa.table({"tokens": column}), path, row_group_size=1000)


def group(batch: dict[str, Any], size: int) -> dict[str, Any]:
    stream = np.concatenate([part for document in batch["tokens"] for part in (document, [EOS])])
    return {"row": list(stream[: len(stream) // size * size].reshape(-1, size))}


def collate(rows: list[dict[str, Any]]) -> Batch:
    return shifted(torch.from_numpy(np.stack([np.asarray(row["row"], np.int64) for row in rows])))


class Batches:
    def __init__(self, setup: Setup) -> None:
        sources = []
        for name in setup.sources:
            files = sorted(str(path) for path in (Path(setup.folder) / name).glob("*.parquet"))
            sources.append(datasets.load_dataset("parquet", data_files=files, split="train", streaming=True))
        if setup.weights:
            weights = [setup.weights[name] for name in setup.sources]
            total = sum(weights)
            shares = [weight / total for weight in weights]
            mixed = datasets.interleave_datasets(sources, shares, seed=0, stopping_strategy="all_exhausted")
        else:
            mixed = datasets.interleave_datasets(sources, stopping_strategy="all_exhausted_without_replacement")
        mixed = mixed.shuffle(seed=0, buffer_size=setup.buffer).with_format("numpy")
        if setup.world > 1:
            mixed = split_dataset_by_node(mixed, rank=setup.rank, world_size=setup.world)
        pack = partial(group, size=setup.length + 1)
        rows = mixed.map(pack, batched=True, batch_size=setup.buffer, remove_columns=["tokens"])
        self.loader = StatefulDataLoader(rows, batch_size=setup.batch, num_workers=setup.workers, collate_fn=collate)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    batches = Batches(setup)
    if states is not None:
        batches.loader.load_state_dict(own(setup, states))
    return batches
