"""CausalLM: each token is predicted from the tokens before it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fmsdata.core.checks import whole
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import IGNORED
from fmsdata.tasks.batch import Batch, widen


@dataclass(frozen=True)
class CausalLM:
    """Predict the next token: `labels` are `input_ids` shifted by one token.

    Labels are -100, which losses ignore, for padding and for the first `prompt_len` tokens of a
    line.

    >>> task = CausalLM(prompt_len=1)
    """

    prompt_len: int = 0

    extra_tokens: ClassVar[int] = 1
    needs_lines: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole("prompt_len", self.prompt_len)

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        if self.prompt_len >= batch.length:
            raise ConfigError(
                f"prompt_len {self.prompt_len} leaves nothing to predict in lines of {batch.length} tokens"
            )
        labels = widen(batch.tokens[:, 1:])
        if self.prompt_len:
            labels[:, : self.prompt_len] = IGNORED
        for row, padding in enumerate(batch.padding):
            if padding:
                labels[row, -padding:] = IGNORED
        return {"input_ids": widen(batch.tokens[:, :-1]), "labels": labels}
