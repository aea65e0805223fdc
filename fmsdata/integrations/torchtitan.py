"""A dataloader for torchtitan: its batches and checkpoints, at any data-parallel degree.

    config = llama3_8b()
    config.dataloader = fmsdata.integrations.torchtitan.DataLoader.Config(dataset_path="run.yaml")
    config.build().train()

torchtitan checkpoints with torch.distributed.checkpoint, which merges the lanes of all ranks. So each
rank saves its own, and loads those that it has now.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fmsdata.core.state import State
from fmsdata.errors import ConfigError
from fmsdata.integrations.building import build, check_shifted

if TYPE_CHECKING:
    from torchtitan.components.dataloader import BaseDataLoader
else:
    try:
        from torchtitan.components.dataloader import BaseDataLoader
    except ImportError as error:
        raise ConfigError(
            f"fmsdata.integrations.torchtitan needs torchtitan 0.3 or later ({error}); "
            "install it with: pip install torchtitan"
        ) from error


class DataLoader(BaseDataLoader):  # type: ignore[misc]
    """The batches of a run, as torchtitan expects them: `input` and `positions`, and labels.

    `Config` names the YAML file of the run. Batch size and sequence length are those of torchtitan
    (`training.local_batch_size`, `training.seq_len`), and replace those of the file. Positions start
    again at each document, so that attention stays within documents.

    The same class serves `Validator.Config(dataloader=...)`, with a file that has `evaluation`.

    >>> config.dataloader = DataLoader.Config(dataset_path="run.yaml")     # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What torchtitan saves of the dataloader with its configuration."""

        infinite: bool = True  # False: the data must have an end. The Validator of torchtitan sets it

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        if not config.dataset_path:
            raise ConfigError(
                "dataset_path is not set; it must be the YAML file of the run, as in dataset_path='run.yaml'"
            )
        overrides = {
            "loader.batch_size": local_batch_size,
            "loader.outputs": ["position_ids"],
            "pack.seq_len": seq_len,
        }
        self.loader = build(config.dataset_path, "torchtitan", overrides, rank=dp_rank, world_size=dp_world_size)
        check_shifted(self.loader, "torchtitan")
        if not config.infinite and self.loader.data.epochs is None:
            raise ConfigError(
                f"{config.dataset_path} is an endless stream, and torchtitan reads its data to the end, because the "
                "validator has steps=-1; set its steps, or `evaluation: true` in the file"
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            yield {"input": batch["input_ids"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self) -> State:
        """The position of this rank, which torch.distributed.checkpoint merges with the others'."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Resume, at any data-parallel degree."""
        self.loader.load_state_dict(state_dict)
