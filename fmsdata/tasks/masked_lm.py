"""MaskedLM: some tokens are masked or replaced, and predicted from all the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fmsdata.core.checks import rate, whole
from fmsdata.core.keys import key_of, mix_array, uniform
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import IGNORED
from fmsdata.tasks.batch import Batch

SALT = np.uint64(key_of("masked_lm"))


@dataclass(frozen=True, kw_only=True)
class MaskedLM:
    """Predict some tokens, which are masked, from all the others.

    Each token is chosen with probability `rate`. `labels` hold the chosen tokens, and -100
    elsewhere.

    Of the chosen tokens, a share `mask_rate` is replaced by the token `mask`, a share `random_rate`
    by a random token below `vocab_size`, and the rest stays. Padding and the tokens in `special`
    are never chosen.

    >>> task = MaskedLM(mask=103, vocab_size=30_522, special=[101, 102])
    """

    mask: int
    vocab_size: int
    rate: float = 0.15
    mask_rate: float = 0.8
    random_rate: float = 0.1
    special: Sequence[int] = ()

    extra_tokens: ClassVar[int] = 0
    needs_lines: ClassVar[bool] = True
    causal: ClassVar[bool] = False  # tokens are predicted from all others, those behind them too

    def __post_init__(self) -> None:
        whole("mask", self.mask)
        whole("vocab_size", self.vocab_size, least=1)
        for name in ("rate", "mask_rate", "random_rate"):
            rate(name, getattr(self, name))
        if self.mask_rate + self.random_rate > 1:
            raise ConfigError(
                f"mask_rate {self.mask_rate} and random_rate {self.random_rate} add up to more than 1: "
                "they are shares of the chosen tokens"
            )
        if not isinstance(self.special, Sequence):
            raise ConfigError(f"special is {shown(self.special)}; it must be a list of tokens")
        special = tuple(whole("a token of special", value) for value in self.special)
        object.__setattr__(self, "special", special)  # a tuple, so that the task is hashable

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        tokens = batch.tokens.astype(np.int64)
        position = np.arange(batch.length)
        keys = mix_array(batch.keys ^ SALT)[:, None] + position.astype(np.uint64)
        chosen = uniform(keys, 0) < self.rate
        chosen &= position < batch.length - np.array(batch.padding)[:, None]
        chosen &= ~np.isin(tokens, self.special)
        labels = np.where(chosen, tokens, IGNORED)
        keys = keys[chosen]
        kind = uniform(keys, 1)
        random_token = (uniform(keys, 2) * self.vocab_size).astype(np.int64)
        tokens[chosen] = np.select(
            [kind < self.mask_rate, kind < self.mask_rate + self.random_rate], [self.mask, random_token], tokens[chosen]
        )
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
