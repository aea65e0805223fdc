"""Collate: turns samples into the fields of a batch, also in torch's own DataLoader.

A plain `DataLoader(data, batch_size=8)` returns the same batches as `StatefulDataLoader`: see
`fmsdata/run/samples.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmsdata.core.checks import flag
from fmsdata.core.chunk import Item
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import Task
from fmsdata.tasks.batch import OUTPUTS, Batch, check_outputs, collect
from fmsdata.tasks.causal_lm import CausalLM

OF_SOURCES = ("source_ids", "label_source_ids")  # outputs that need the names of the sources


@dataclass(frozen=True)
class Collate:
    """Turns samples into the fields of a batch: a `collate_fn` for torch's own DataLoader.

    A DataLoader without a `collate_fn` collates samples for `CausalLM`. The outputs `source_ids`
    and `label_source_ids` need the names of all `sources`, which are `data.source_sizes`.
    `padding_segment` says whether padding is a segment of its own in `cu_seqlens`, `max_seqlen` and
    `position_ids`; by default only if the task is not causal.

    >>> collate = Collate(outputs=["position_ids"])
    >>> loader = DataLoader(data, batch_size=8, collate_fn=collate)     # doctest: +SKIP
    """

    task: Task = field(default_factory=CausalLM)
    outputs: Sequence[str] = ()
    sources: Collection[str] = ()
    padding_segment: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.task):
            raise ConfigError(f"task is {shown(self.task)}; it must be a task such as CausalLM()")
        check_outputs(self.outputs)
        if isinstance(self.sources, str) or not isinstance(self.sources, Collection):
            raise ConfigError(f"sources is {shown(self.sources)}; it must be the names, as in data.source_sizes")
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources and (needing := [name for name in self.outputs if name in OF_SOURCES]):
            raise ConfigError(
                f"output {needing[0]!r} needs the names of the sources: Collate(..., sources=data.source_sizes)"
            )
        if self.padding_segment is not None:
            flag("padding_segment", self.padding_segment)

    @property
    def needs_lines(self) -> bool:
        """Whether the fields depend on more than tokens and padding."""
        return bool(self.outputs) or getattr(self.task, "needs_lines", True)

    def __call__(self, samples: Sequence[Item]) -> dict[str, Any]:
        return self.fields(collect([(item.chunk, 0) for item in samples], self.task.extra_tokens))

    def fields(self, batch: Batch) -> dict[str, Any]:
        """The fields of a batch: those of the task, then the requested outputs."""
        if self.needs_lines:
            apart = self.padding_segment
            if apart is None:  # what looks ahead must not find padding in its segment
                apart = not getattr(self.task, "causal", True)
            batch = replace(batch, sources=self.sources, padding_segment=apart)
        return {**self.task(batch), **{name: OUTPUTS[name](batch) for name in self.outputs}}
