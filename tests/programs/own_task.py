"""Tasks as a user writes them."""

from typing import Any

import numpy as np
import torch

from fmsdata.tasks.batch import Batch


def shuffled(batch: Batch, offset: int) -> dict[str, torch.Tensor]:
    """Each line in a random order of its own."""
    tokens = batch.tokens.astype(np.int64)
    rows = [np.random.default_rng(key).permutation(row) for key, row in zip(batch.keys.tolist(), tokens, strict=True)]
    return {"input_ids": torch.from_numpy(np.stack(rows)), "labels": torch.from_numpy(tokens + offset)}


def gives_a_list(batch: Batch) -> Any:
    return [batch.tokens]


def gives_numbers(batch: Batch) -> Any:
    return {1: batch.tokens}


def denies_it(batch: Batch) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.from_numpy(batch.keys.view(np.int64))}


denies_it.needs_lines = False  # type: ignore[attr-defined]
