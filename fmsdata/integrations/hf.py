"""The Trainer of transformers: it takes loaders where it takes datasets, and its checkpoints hold their position.

>>> from fmsdata.integrations.hf import Trainer                                          # doctest: +SKIP
>>> trainer = Trainer(model, arguments, train_dataset=loader, eval_dataset=evaluation)   # doctest: +SKIP
>>> trainer.train(resume_from_checkpoint=True)                                           # doctest: +SKIP

The Trainer reads the batches of one gradient accumulation at once, and saves after a step of the
optimizer. So what the loader has handed out is then what was trained on.
"""

import inspect
import os
from collections.abc import Iterator
from typing import Any, cast

from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.integrations.state_file import read_state, write_state
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.loader.rows import RowLoader
from fmsdata.loader.trainers import check_labels

try:
    import transformers
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    needed = "fmsdata.integrations.hf needs transformers; install it with: pip install transformers accelerate"
    raise ConfigError(needed) from error


class TrainerMixin:
    """Loaders for a `transformers.Trainer`, or for a subclass of it.

    `train_dataset` may be a loader, and `eval_dataset` an evaluation loader or a dict of them. Arguments
    under which the run would not be exact are refused.

    >>> class MyTrainer(TrainerMixin, transformers.Trainer): ...     # doctest: +SKIP
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if isinstance(trainer.train_dataset, str | os.PathLike):
            path = os.fspath(trainer.train_dataset)
            raise ConfigError(
                f"train_dataset is {path!r}, expected a loader. Write\n"
                f"    Trainer(..., train_dataset=fmsdata.build_loader({path!r}))"
            )
        if isinstance(trainer.train_dataset, StatefulDataLoader):
            _check_training(trainer, trainer.train_dataset)
            trainer.args.ignore_data_skip = True  # the loader resumes by itself
            trainer.train_dataset.keeper = "transformers"
            self._saver = SaveLoader(trainer.train_dataset)
            trainer.add_callback(self._saver)
        evaluations = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
        for evaluation in evaluations.values():
            _check_evaluation(trainer, evaluation)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        trainer, parent = cast(Any, self), cast(Any, super())
        if isinstance(trainer.train_dataset, StatefulDataLoader):
            if kwargs.get("trial") is not None:
                raise ConfigError(
                    "a search of hyperparameters trains several times, and a loader has one position: each trial would "
                    "get other samples. Build a Trainer with a loader of its own for each"
                )
            path = resume_from_checkpoint
            if path is True:
                path = get_last_checkpoint(trainer.args.output_dir)
            if path:
                trainer.train_dataset.load_state_dict(read_state(path))
        return parent.train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        trainer: Any = self
        if isinstance(trainer.train_dataset, StatefulDataLoader):
            return Batches(trainer.train_dataset, _fields(trainer), self._saver)
        parent: Any = super()
        return parent.get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        trainer: Any = self
        loader = trainer.eval_dataset if eval_dataset is None else eval_dataset
        loader = trainer.eval_dataset[loader] if isinstance(loader, str) else loader
        if isinstance(loader, StatefulDataLoader):
            _check_evaluation(trainer, loader)
            return Batches(loader, _fields(trainer))
        parent: Any = super()
        return parent.get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if isinstance(test_dataset, StatefulDataLoader):
            return self.get_eval_dataloader(test_dataset)
        parent: Any = super()
        return parent.get_test_dataloader(test_dataset)


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose `train_dataset` is a loader, and whose `eval_dataset` is one for evaluation.

    >>> trainer = Trainer(model, arguments, train_dataset=fmsdata.build_loader("run.yaml"))     # doctest: +SKIP
    """


class Batches:
    """What the Trainer iterates over: the batches of a loader, with the fields that the model takes."""

    def __init__(self, loader: StatefulDataLoader, fields: set[str] | None, saver: "SaveLoader | None" = None) -> None:
        self._loader, self._fields, self._saver = loader, fields, saver
        self.batch_size = loader.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            if self._saver is not None:
                self._saver.ahead += 1
            if self._fields is None or not isinstance(batch, dict):
                yield batch
            else:
                yield {name: value for name, value in batch.items() if name in self._fields}

    def __len__(self) -> int:
        return len(self._loader)


class SaveLoader(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes the position of a loader into each checkpoint of a Trainer."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self._loader = loader
        self.ahead = 0  # batches that were handed out, and not yet trained on

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ahead = 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.ahead -= 1

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Correct the epoch that is logged: the Trainer counts from the batch at which it was resumed."""
        self.ahead -= 1
        state.epoch = state.global_step * args.gradient_accumulation_steps / self._epoch(args, state)

    def _epoch(self, args: Any, state: Any) -> int:
        try:
            return len(self._loader)
        except TypeError:  # the stream has no end
            return int(state.max_steps * args.gradient_accumulation_steps)

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.ahead:
            raise ConfigError(
                f"the Trainer saves while it holds {counted(self.ahead, 'batch')} that it has not trained on: lost on "
                "resume. It reads further ahead than one step of the optimizer; is get_batch_samples its own?"
            )
        gathered = self._loader.state_dict(gather=True)
        if args.should_save:
            write_state(os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"), gathered)


def _fields(trainer: Any) -> set[str] | None:
    """The fields of a batch that a model takes; None: all, if the arguments say so."""
    if not trainer.args.remove_unused_columns:
        return None
    return {*inspect.signature(trainer.model.forward).parameters, *trainer.label_names}


def _check_training(trainer: Any, loader: StatefulDataLoader) -> None:
    args = trainer.args
    if loader.evaluation:
        raise ConfigError("train_dataset is an evaluation loader, which has no position; pass it as eval_dataset")
    if loader.checkpoint is not None:
        raise ConfigError(
            f"the loader saves itself to {loader.checkpoint}, beside the checkpoints of the Trainer, which hold its "
            "position, too: remove `checkpoint` from the loader"
        )
    if args.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size begins again with other batches; set the batch_size of the loader")
    if args.train_batch_size != loader.batch_size:
        raise ConfigError(
            f"the batch size of the Trainer is {args.train_batch_size}, and that of the loader is {loader.batch_size}. "
            "Write\n    TrainingArguments(..., per_device_train_batch_size=loader.batch_size)"
        )
    tensor, context, sequence = (getattr(trainer, f"get_{kind}_size", lambda: 1)() for kind in ("tp", "cp", "sp"))
    if sequence > 1:
        raise ConfigError("the Trainer splits batches by itself with sequence parallelism, which a loader can't follow")
    if loader.world_size != (ranks := args.world_size // (tensor * context)):
        raise ConfigError(
            f"the loader reads as rank {loader.rank} of {loader.world_size}, but the Trainer has "
            f"{counted(ranks, 'data-parallel rank')}; build the loader after TrainingArguments, or with mesh="
        )
    _check_length(loader, args.gradient_accumulation_steps, args.max_steps)
    check_labels(trainer, getattr(loader, "task", loader.data))


def _check_length(loader: StatefulDataLoader, accumulation: int, max_steps: int) -> None:
    """An epoch that ends within a gradient accumulation can't be resumed: the Trainer counts from its start."""
    try:
        length = len(loader)
    except TypeError:
        return
    if length % accumulation and not 0 < max_steps * accumulation <= length:
        raise ConfigError(
            f"the loader has {counted(length, 'batch')}, which gradient_accumulation_steps={accumulation} does not "
            f"divide. Write\n    TrainingArguments(..., max_steps={length // accumulation})     # or change steps="
        )


def _check_evaluation(trainer: Any, loader: Any) -> None:
    if not isinstance(loader, StatefulDataLoader):
        return
    if not isinstance(loader, RowLoader) and not loader.evaluation:  # an iteration over rows is an epoch
        raise ConfigError(
            "eval_dataset is a loader that continues at each evaluation, with other samples. For the same set each "
            "time, write\n    StatefulDataLoader(data, batch_size=..., evaluation=True)     # or `evaluation: true`"
        )
    check_labels(trainer, getattr(loader, "task", loader.data))
    samples = len(loader.data) if isinstance(loader, RowLoader) else sum(loader.pass_lines)
    filled = loader.batch_size * loader.world_size
    if samples % filled:
        most = samples - samples % filled
        lines = f"Take {most} of them:\n    evaluation: {{samples: {most}}}     # or this number of rows"
        raise ConfigError(
            f"the evaluation has {counted(samples, 'sample')}, which do not fill batches of {loader.batch_size} on "
            f"{counted(loader.world_size, 'rank')}, and the Trainer averages over batches. "
            + (lines if most else f"Use smaller batches, or a set of at least {counted(filled, 'sample')}")
        )
