"""Rows per second of map-style rows, beside torch's DataLoader with a DistributedSampler.

    python benchmarks/rows.py [--rows 20000] [--rounds 5] [--batch 32] [--kinds Words datasets]

Rows are dicts of two tensors, of 512 tokens: views of a tensor, which cost next to nothing; tokens that are
stored in 16 bits; the same with a transform that draws from torch's generator; text that is tokenized when it
is read; and a dataset of Hugging Face. The loaders take turns in one process, for an epoch each, with 0 and 2
workers; the median of each counts. Workers are persistent, and started before. Beside it is the time of the
processor in all processes, which other programs disturb less.

What rows draw depends on seed, epoch and row in fmsdata, and in torch's DataLoader on what was drawn before. So
rows that draw are also compared with rows of torch that are seeded by hand (`SeededByHand`): the line "by hand".
"""

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Value
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
SEED = 0


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


class SeededByHand(Random):
    """The same numbers for a row in each epoch, whatever was read before, and the trainer's generator as it was.

    It knows that rows draw from torch's generator alone, and seeds it in the fastest way: `torch.manual_seed`, which
    also seeds accelerators, takes 100 times as long.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.epoch = Value("q", 0, lock=False)  # persistent workers see it change

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(hash((SEED, self.epoch.value, row)))
        try:
            return super().__getitem__(row)
        finally:
            generator.set_state(before)


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


def of_torch(rows: Any, batch: int, workers: int) -> Any:
    return DataLoader(
        rows,
        batch_size=batch,
        sampler=DistributedSampler(rows, num_replicas=1, rank=0, seed=SEED, drop_last=True),
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )


def report(what: str, peer: list[Measured], own: list[Measured], rows: int) -> None:
    """Rows per second and microseconds of the processor, of torch's loader and of fmsdata's."""
    rates = [rows / median(epoch.seconds for epoch in epochs) for epochs in (peer, own)]
    micro = [sum(epoch.processor for epoch in epochs) / len(epochs) / rows * 1e6 for epochs in (peer, own)]
    print(
        f"{what}: torch {rates[0]:9,.0f} rows/s, fmsdata {rates[1]:9,.0f} rows/s, ratio {rates[1] / rates[0]:.2f}; "
        f"processor {micro[0]:5.1f} and {micro[1]:5.1f} us a row, ratio {micro[0] / micro[1]:.2f}",
        flush=True,
    )


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
            loaders: dict[str, Any] = {"": of_torch(rows, args.batch, workers)}
            if kind == "Random":
                by_hand = SeededByHand(args.rows)
                loaders["by hand"] = of_torch(by_hand, args.batch, workers)
            sampler = fmsdata.EpochSampler(rows, global_batch=args.batch, rank=0, world_size=1, seed=SEED)
            ours = fmsdata.StatefulDataLoader(rows, sampler=sampler, batch_size=args.batch, num_workers=workers)
            loaders["fmsdata"] = ours
            found: dict[str, list[Measured]] = {name: [] for name in loaders}
            for number in range(args.rounds + 1):
                if "by hand" in loaders:
                    by_hand.epoch.value = number
                for name, loader in loaders.items():
                    found[name].append(epoch(loader))
            own = found.pop("fmsdata")[1:]
            for name, epochs in found.items():
                report(f"{kind:8} {workers} workers {name:7}", epochs[1:], own, args.rows)
            ours.close()
            del loaders


if __name__ == "__main__":
    main()
