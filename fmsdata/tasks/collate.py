"""Collate: samples become a batch's fields, also in torch's own DataLoader."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data._utils.collate import default_collate_fn_map

from fmsdata.core.chunk import Item
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import Task
from fmsdata.tasks.batch import OUTPUTS, Batch, check_outputs, collect
from fmsdata.tasks.causal_lm import CausalLM


@dataclass(frozen=True)
class Collate:
    """Turns samples into a batch's fields: a `collate_fn` for torch's own DataLoader.

    Without it, samples are collated for `CausalLM`.

    >>> loader = DataLoader(data, batch_size=8, collate_fn=Collate(outputs=["position_ids"]))     # doctest: +SKIP
    """

    task: Task = field(default_factory=CausalLM)
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
