"""What every task is."""

from typing import Protocol

import torch

from fmsdata.tasks.batch import Batch

IGNORED = -100  # the label where there is nothing to learn


class Task(Protocol):
    """Turns a batch of lines into the fields that the trainer gets.

    All that is random in it must be drawn from `batch.keys`, so that a line becomes the same wherever it is read.
    """

    @property
    def extra_tokens(self) -> int:
        """How many tokens a line is longer than what the model sees."""

    @property
    def needs_lines(self) -> bool:
        """Whether it looks at the lines' origins or keys. If not, worker processes need not send them."""

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]: ...
