"""Tasks: what a line becomes for the model. The data below is the same for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from fmsdata.arguments import whole
from fmsdata.batch import OUTPUTS, Batch, check_outputs, collect, widen
from fmsdata.chunk import Item
from fmsdata.errors import ConfigError

IGNORED = -100


class Task(Protocol):
    """Turns a batch of lines into the fields that the trainer gets."""

    @property
    def extra_tokens(self) -> int:
        """How many tokens a line is longer than what the model sees."""

    @property
    def needs_lines(self) -> bool:
        """Whether it looks at `batch.lines`. If not, worker processes need not send them."""

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class CausalLM:
    """Predict the next token: `labels` are `input_ids` one further on, and -100 where there is nothing to learn.

    >>> task = CausalLM(prompt_len=1)
    """

    prompt_len: int = 0
    extra_tokens: int = 1
    needs_lines: bool = False

    def __post_init__(self) -> None:
        whole("prompt_len", self.prompt_len)

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        if self.prompt_len >= batch.length:
            raise ConfigError(f"prompt_len {self.prompt_len} leaves nothing to learn of {batch.length} tokens a line")
        labels = widen(batch.tokens[:, 1:])
        if self.prompt_len:
            labels[:, : self.prompt_len] = IGNORED
        for row, padding in enumerate(batch.padding):
            if padding:
                labels[row, -padding:] = IGNORED
        return {"input_ids": widen(batch.tokens[:, :-1]), "labels": labels}


@dataclass(frozen=True)
class Collate:
    """Turns samples into a batch's fields: a `collate_fn` for torch's own DataLoader.

    Without it, samples are collated for `CausalLM`.

    >>> loader = DataLoader(data, batch_size=8, collate_fn=Collate(outputs=["position_ids"]))     # doctest: +SKIP
    """

    task: Task = CausalLM()  # immutable
    outputs: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not callable(self.task):
            raise ConfigError(f"task is {self.task!r}; it must be a task such as CausalLM()")
        check_outputs(self.outputs)

    def __call__(self, samples: Sequence[Item]) -> dict[str, Any]:
        return self.fields(collect([(item.chunk, 0) for item in samples], self.task.extra_tokens))

    def fields(self, batch: Batch) -> dict[str, Any]:
        return {**self.task(batch), **{name: OUTPUTS[name](batch) for name in self.outputs}}


def _collate(samples: Sequence[Item], **_: object) -> dict[str, Any]:
    return Collate()(samples)


default_collate_fn_map[Item] = _collate
