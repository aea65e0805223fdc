"""Rows per second of map-style rows, beside torch's DataLoader with a DistributedSampler.

    python benchmarks/rows.py [--rows 20000] [--rounds 5] [--batch 32] [--kinds Words datasets]

Rows are dicts of two tensors, of 512 tokens: views of a tensor, which cost next to nothing; tokens that are
stored in 16 bits; the same with a transform that draws from torch's generator; text that is tokenized when it
is read; and a dataset of Hugging Face. Both loaders take turns
in one process, for an epoch each, with 0 and 2 workers; the median of each counts. Workers are persistent,
and started before. Beside it is the time of the processor in all processes, which other programs disturb less.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import datasets
import numpy as np
import psutil
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fmsdata

LENGTH = 512


class Slices(Dataset[dict[str, torch.Tensor]]):
    """Rows that cost next to nothing: views of a tensor."""

    def __init__(self, rows: int) -> None:
        self._tokens = torch.randint(0, 50_000, (rows, LENGTH))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[row]
        return {"input_ids": tokens, "label": tokens[0]}


class Stored(Dataset[dict[str, torch.Tensor]]):
    """Rows as they are stored, in 16 bits, which become `input_ids` and `labels`."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.random.default_rng(0).integers(0, 50_000, (rows, LENGTH + 1), np.uint16)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._tokens[row].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Random(Stored):
    """The same, with a tenth of the tokens masked at random."""

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        fields = super().__getitem__(row)
        return {**fields, "input_ids": torch.where(torch.rand(LENGTH) < 0.1, 0, fields["input_ids"])}


class Words(Dataset[dict[str, torch.Tensor]]):
    """Text that is tokenized when it is read, as in fine-tuning."""

    def __init__(self, rows: int) -> None:
        rng = np.random.default_rng(0)
        words = np.array(["the", "model", "reads", "a", "row", "of", "text", "and", "learns", "from", "it"])
        self._texts = [" ".join(words[rng.integers(0, len(words), LENGTH)]) for _ in range(rows)]
        vocabulary = {word: number for number, word in enumerate(words.tolist())}
        self._tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="it"))
        self._tokenizer.pre_tokenizer = Whitespace()

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(self._tokenizer.encode(self._texts[row]).ids)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def stored_by_datasets(rows: int) -> Any:
    """A dataset of Hugging Face, which returns the rows of a batch together."""
    tokens = np.random.default_rng(0).integers(0, 50_000, (rows, LENGTH), np.int64)
    return datasets.Dataset.from_dict({"input_ids": list(tokens)}).with_format("torch")


class Measured(NamedTuple):
    seconds: float
    processor: float  # seconds of this process and of its workers

    @classmethod
    def now(cls) -> "Measured":
        used = time.process_time()
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                used += sum(child.cpu_times()[:2])
        return cls(time.perf_counter(), used)


def epoch(loader: Iterable[Any]) -> Measured:
    start = Measured.now()
    for _ in loader:
        pass
    end = Measured.now()
    return Measured(end.seconds - start.seconds, end.processor - start.processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--kinds", nargs="*", help="some of Slices, Stored, Random, Words, datasets")
    args = parser.parse_args()
    kinds: dict[str, Callable[[int], Any]] = {
        "Slices": Slices,
        "Stored": Stored,
        "Random": Random,
        "Words": Words,
        "datasets": stored_by_datasets,
    }
    for kind, make in kinds.items():
        if args.kinds and kind not in args.kinds:
            continue
        rows = make(args.rows)
        for workers in (0, 2):
            theirs: Any = DataLoader(
                rows,
                batch_size=args.batch,
                sampler=DistributedSampler(rows, num_replicas=1, rank=0, seed=0, drop_last=True),
                num_workers=workers,
                persistent_workers=workers > 0,
                drop_last=True,
            )
            sampler = fmsdata.EpochSampler(rows, global_batch=args.batch, rank=0, world_size=1)
            ours = fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=args.batch, num_workers=workers)
            found: dict[str, list[Measured]] = {"torch": [], "fmsdata": []}
            for _ in range(args.rounds + 1):
                found["torch"].append(epoch(theirs))
                found["fmsdata"].append(epoch(ours))
            rates = {name: args.rows / median(one.seconds for one in rounds[1:]) for name, rounds in found.items()}
            costs = {name: sum(one.processor for one in rounds[1:]) for name, rounds in found.items()}
            micro = {name: cost / args.rounds / args.rows * 1e6 for name, cost in costs.items()}
            ratio = costs["torch"] / costs["fmsdata"]
            print(
                f"{kind:8} {workers} workers: torch {rates['torch']:9,.0f} rows/s, fmsdata "
                f"{rates['fmsdata']:9,.0f} rows/s, ratio {rates['fmsdata'] / rates['torch']:.2f}; processor "
                f"{micro['torch']:5.1f} and {micro['fmsdata']:5.1f} us a row, ratio {ratio:.2f}",
                flush=True,
            )
            ours.close()
            del theirs


if __name__ == "__main__":
    main()
