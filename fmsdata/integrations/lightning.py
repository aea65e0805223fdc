"""A DataModule for Lightning: exact on any number of processes, under any of its launchers.

    data = fmsdata.integrations.lightning.DataModule("run.yaml")
    trainer = lightning.Trainer(max_steps=1000)
    trainer.fit(model, datamodule=data, ckpt_path="last")

Lightning reads one batch ahead where the length of the data is not known. So the loader gets a length,
and its position is that of the batch that was trained on last.
"""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fmsdata.errors import ConfigError, StateError
from fmsdata.integrations.building import Source, build
from fmsdata.loader.loader import StatefulDataLoader

LOADER = "loader"  # the key of its state


def _library() -> Any:
    """Lightning, by the name that the script uses: its classes exist twice."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ConfigError("fmsdata.integrations.lightning needs Lightning; install it with: pip install lightning")


if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule
else:
    LightningDataModule = _library().LightningDataModule


class DataModule(LightningDataModule):  # type: ignore[misc]
    """The batches of a run, for `Trainer.fit`; with `evaluation`, also those of a set to evaluate on.

    Both are a configuration, or a function that takes `rank` and `world_size` and returns a loader,
    because ranks are known only when training starts. The state is part of the checkpoints of Lightning, as
    that of all ranks after the batch that was trained on last. It loads on any number of processes.

    An epoch of Lightning is `len(loader)` batches, as `steps` of the loader, or all batches up to
    `max_steps` of the Trainer.

    >>> data = DataModule("run.yaml", evaluation="evaluation.yaml")             # doctest: +SKIP
    >>> trainer.fit(model, datamodule=data, ckpt_path="last")                  # doctest: +SKIP
    """

    def __init__(
        self, train: Source, evaluation: Source | None = None, *, overrides: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.loader: StatefulDataLoader | None = None
        self.evaluation_loader: StatefulDataLoader | None = None
        self._train, self._evaluation = train, evaluation
        self._overrides = overrides
        self._restored = False

    def setup(self, stage: str) -> None:
        """Build the loaders: called by Lightning in each process, when the ranks are known."""
        ranks = _ranks(self.trainer)
        if stage == "fit" and self.loader is None:
            self.loader = build(self._train, "Lightning", self._overrides, **ranks)
        if self._evaluation is not None and self.evaluation_loader is None:
            self.evaluation_loader = build(self._evaluation, "Lightning", **ranks)
            if not getattr(self.evaluation_loader, "evaluation", True):  # rows begin again by themselves
                raise ConfigError(
                    "`evaluation` is a stream that continues at each evaluation, with other samples; for the same set "
                    "each time, write `evaluation: true`, or `{samples: N}`, in its configuration"
                )
        self._restored = False

    def train_dataloader(self) -> "Batches":
        """What Lightning iterates over."""
        if self.loader is None:
            raise ConfigError("the loader is not built yet; pass this module to Trainer.fit(datamodule=...)")
        if self.trainer.ckpt_path and not self._restored:
            raise StateError(
                f"{self.trainer.ckpt_path} has no state of {type(self).__qualname__}, so the data would start again "
                "from the first sample; resume from a checkpoint that was saved while training with this module"
            )
        if self.trainer.overfit_batches:
            raise ConfigError(
                f"overfit_batches is {self.trainer.overfit_batches}, but the stream goes on in every epoch; "
                "to read the same samples in every epoch, give a configuration with `evaluation: {samples: N}`"
            )
        return Batches(self.loader, _length(self.loader, self.trainer))

    def val_dataloader(self) -> StatefulDataLoader | list[Any]:
        """The set to evaluate on, from the top each time."""
        return [] if self.evaluation_loader is None else self.evaluation_loader

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks: a collective, which Lightning calls on each of them."""
        return {} if self.loader is None else {LOADER: self.loader.state_dict(gather=True)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state. Lightning calls this after `setup`."""
        if self.loader is not None:
            self.loader.load_state_dict(state_dict[LOADER])
            self._restored = True

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """End the threads and processes that read ahead."""
        for loader in (self.loader, self.evaluation_loader):
            if loader is not None:
                loader.close()


class Batches:
    """A loader with a length. Lightning does not look into it, and leaves its state to the DataModule."""

    def __init__(self, loader: StatefulDataLoader, length: int) -> None:
        self._loader, self._length = loader, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader) if _has_length(self._loader) else iter(self._loader.__next__, None)

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Empty. Lightning restores it only in the middle of an epoch, and warns if there is none."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing: the DataModule restores the loader."""


def _ranks(trainer: Any) -> dict[str, Any]:
    """The data-parallel rank: as Lightning gives it to a DistributedSampler."""
    found = trainer.distributed_sampler_kwargs
    if found is None:
        return {"rank": trainer.global_rank, "world_size": trainer.world_size}
    return {"rank": found["rank"], "world_size": found["num_replicas"]}


def _length(loader: StatefulDataLoader, trainer: Any) -> int:
    """How many batches an epoch of Lightning has."""
    if _has_length(loader):
        return len(loader)
    if isinstance(trainer.limit_train_batches, int):
        return int(trainer.limit_train_batches)
    if trainer.max_steps > 0:
        return int(trainer.max_steps * trainer.accumulate_grad_batches)
    raise ConfigError(
        "the stream has no end, and Lightning reads a batch ahead of what it trains on where it knows no length: "
        "the batch would be lost on resume. Give Trainer(max_steps=...), or the loader `steps`, its batches per epoch"
    )


def _has_length(loader: StatefulDataLoader) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True
