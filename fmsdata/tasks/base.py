"""The protocol of a task: it turns the lines of a batch into the tensors that the trainer gets."""

from typing import Protocol

import torch

from fmsdata.core.options import IGNORED as IGNORED
from fmsdata.tasks.batch import Batch


class Task(Protocol):
    """Turns a batch of lines into the fields that the trainer gets.

    Random choices must be derived from `batch.keys`, so that a line gives the same fields wherever
    it is read. A task whose model also looks at the tokens behind has an attribute `causal =
    False`. See `CausalLM` for an example.
    """

    @property
    def extra_tokens(self) -> int:
        """How many tokens a line has more than the model sees."""

    @property
    def needs_lines(self) -> bool:
        """Whether the task uses `batch.lines` or `batch.keys`.

        If not, worker processes do not send them.
        """

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]: ...
