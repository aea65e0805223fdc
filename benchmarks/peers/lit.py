"""LitData: chunks of tokens, from which rows are cut while it reads, mixed by rows."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from peers.corpus import EOS, SHARDS, Corpus
from peers.protocol import Batch, Setup, own, shifted

PACKAGE = "litdata"
DOES = "mixes rows and shuffles; cuts rows from chunks of tokens, and drops what is left of a chunk"


def documents_of(shard: int, corpus: Corpus, source: str) -> Iterator[torch.Tensor]:
    for number in corpus.shard(source, shard):
        yield torch.from_numpy(np.append(corpus.document(number), np.int32(EOS)))


def prepare(corpus: Corpus, folder: Path, length: int) -> None:
    for source, (first, stop) in corpus.firsts.items():
        rows = int(corpus.ends[stop] - corpus.ends[first]) // (length + 1)
        optimize(
            fn=partial(documents_of, corpus=corpus, source=source),
            inputs=list(range(SHARDS)),
            output_dir=str(folder / source),
            chunk_size=(length + 1) * max(1, min(4000, rows // SHARDS)),
            item_loader=TokensLoader(),
            num_workers=1,
            reorder_files=False,
            verbose=False,
        )


class Batches:
    def __init__(self, setup: Setup) -> None:
        blocks = partial(TokensLoader, block_size=setup.length + 1)
        datasets = [
            StreamingDataset(
                str(Path(setup.folder) / name), item_loader=blocks(), shuffle=True, drop_last=setup.world > 1
            )
            for name in setup.sources
        ]
        weights = [setup.weights[name] for name in setup.sources] if setup.weights else None
        dataset = CombinedStreamingDataset(datasets, weights=weights, iterate_over_all=weights is None)
        self.loader = StreamingDataLoader(dataset, batch_size=setup.batch, num_workers=setup.workers)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.loader:
            yield shifted(rows.long())

    def state(self) -> Any:
        return self.loader.state_dict()


def open_loader(setup: Setup, states: list[Any] | None) -> Batches:
    batches = Batches(setup)
    if states is not None:
        batches.loader.load_state_dict(own(setup, states))
    return batches
