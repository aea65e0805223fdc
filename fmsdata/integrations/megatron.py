"""A loader for Megatron-core, as its external dataloaders are: exact at any data-parallel size.

    loader = fmsdata.integrations.megatron.ExternalLoader("run.yaml")
    batch = next(loader)               # tokens, labels, loss_mask, attention_mask, position_ids
    state = loader.save_state()        # on all data-parallel ranks; loader.restore_state(state)

For Megatron-LM, return it from the provider of dataloaders (`--dataloader-type external`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from fmsdata.core.state import State
from fmsdata.errors import ConfigError
from fmsdata.integrations.building import Source, build, check_shifted
from fmsdata.tasks.base import IGNORED


class ExternalLoader:
    """Microbatches with the names that Megatron has for them, for the data-parallel rank of this process.

    `source` is a configuration, or a function that takes `process_group=` and returns a loader. The
    options are those of Megatron, with its defaults. `attention_mask=False` belongs to
    `--no-create-attention-mask-in-dataloader`. With `reset_position_ids`, positions start again at each
    document. With `reset_attention_mask`, the mask ends at the borders of documents.

    `save_state` is the state of all data-parallel ranks. Any of them restores any rank's, at any
    data-parallel size.

    >>> loader = ExternalLoader("run.yaml", reset_position_ids=True, reset_attention_mask=True)     # doctest: +SKIP
    >>> loader.restore_state(torch.load("train_dataloader_dprank000.pt")["dataloader_state_dict"])  # doctest: +SKIP
    """

    def __init__(
        self,
        source: Source,
        overrides: Mapping[str, Any] | None = None,
        *,
        attention_mask: bool = True,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
    ) -> None:
        outputs = ["position_ids"] * reset_position_ids + ["document_ids"] * reset_attention_mask
        needed = {"loader.outputs": outputs} if outputs else {}
        group = _data_parallel_group()
        self.loader = build(source, "Megatron", {**(overrides or {}), **needed}, process_group=group)
        check_shifted(self.loader, "Megatron")
        if missing := sorted(set(outputs) - set(self.loader.outputs)):
            raise ConfigError(f"the loader does not return {', '.join(missing)}; give it outputs={outputs}")
        self._attention_mask = attention_mask
        self._reset_position_ids, self._reset_attention_mask = reset_position_ids, reset_attention_mask

    def __iter__(self) -> "ExternalLoader":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next microbatch. An evaluation starts again at its end."""
        try:
            batch = next(self.loader)
        except StopIteration:
            if not self.loader.evaluation:
                raise
            batch = next(self.loader)
        return self._renamed(batch)

    def _renamed(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        tokens, labels = batch["input_ids"], batch["labels"]
        learned = labels != IGNORED
        found = {
            "tokens": tokens,
            "labels": labels.where(learned, 0),  # Megatron looks each label up, and then multiplies by the mask
            "loss_mask": learned.float(),
            "position_ids": batch["position_ids"] if self._reset_position_ids else _positions(tokens),
        }
        if self._attention_mask:
            found["attention_mask"] = _mask(tokens, batch["document_ids"] if self._reset_attention_mask else None)
        return found

    def save_state(self) -> State:
        """The state of all data-parallel ranks: a collective, to be called on each of them."""
        return self.loader.state_dict(gather=True)

    def restore_state(self, state: State) -> None:
        """Resume from what `save_state` returned on any rank."""
        self.loader.load_state_dict(state)

    save_state_rank, restore_state_rank = save_state, restore_state  # the names of loaders that save rank by rank


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)


def _mask(tokens: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
    """True for what a token may not see: (batch, 1, length, length)."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1).repeat(len(tokens), 1, 1)
    if document_ids is not None:
        hidden |= document_ids[:, :, None] != document_ids[:, None, :]
    return hidden[:, None]


def _data_parallel_group() -> Any:
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise ConfigError(
            f"fmsdata.integrations.megatron needs Megatron-core ({error}); install it with: pip install megatron-core"
        ) from error
    if not parallel_state.is_initialized():
        raise ConfigError(
            "the data-parallel rank is not known yet; "
            "build the loader after parallel_state.initialize_model_parallel(...)"
        )
    return parallel_state.get_data_parallel_group()
