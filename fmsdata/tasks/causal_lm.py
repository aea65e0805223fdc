"""CausalLM: each token is predicted from the tokens before it."""

from dataclasses import dataclass

import torch

from fmsdata.core.checks import flag, whole
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import IGNORED
from fmsdata.tasks.batch import Batch


@dataclass(frozen=True)
class CausalLM:
    """Predict the next token.

    With `shift=True`, `labels` are shifted by one token: `labels[i]` is what a model predicts at
    position `i`. With `shift=False`, `labels[i]` is `input_ids[i]`, for models that shift labels
    themselves, as those of Hugging Face do. Shifted twice, a model learns to skip every other
    token.

    Labels are -100, which losses ignore, for padding and in the first `prompt_len` places of a
    line. With `cross_documents=False` they are also -100 for the first token of each document,
    which the document before does not predict.

    >>> task = CausalLM(shift=False, cross_documents=False)
    """

    prompt_len: int = 0
    shift: bool = True
    cross_documents: bool = True

    def __post_init__(self) -> None:
        whole("prompt_len", self.prompt_len)
        flag("shift", self.shift)
        flag("cross_documents", self.cross_documents)

    @property
    def extra_tokens(self) -> int:
        return int(self.shift)

    @property
    def needs_lines(self) -> bool:
        return not self.cross_documents

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        extra, length = self.extra_tokens, batch.length
        if max(self.prompt_len, 1 - extra) >= length:
            raise ConfigError(
                f"prompt_len {self.prompt_len} leaves nothing to predict in lines of {counted(length, 'token')}"
                if self.prompt_len
                else "shift=False leaves nothing to predict in lines of 1 token; use a longer seq_len"
            )
        inputs, labels = batch.shifted()
        if not self.cross_documents:
            line, position = batch.document_starts
            inside = position >= extra
            labels[line[inside], position[inside] - extra] = IGNORED
        if self.prompt_len:
            labels[:, : self.prompt_len] = IGNORED
        if any(batch.padding):
            for row, padding in enumerate(batch.padding):
                if padding:
                    labels[row, -padding:] = IGNORED
        return {"input_ids": inputs, "labels": labels}
