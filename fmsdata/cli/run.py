"""What a command looks at: the data of a run and how its loader is made, from YAML or from Python."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from fmsdata.cli.common import endless, parse_overrides, without_checkpoint
from fmsdata.config.build import build_data, evaluation_of, make_checkpoints, make_task, options_for
from fmsdata.config.read import read_config
from fmsdata.config.sections import Config
from fmsdata.core.own import OwnName
from fmsdata.core.stage import Stage, is_named
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.loader.rows import RowLoader
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.mixture import Mixture, stages_down_to_mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.stages.tokenize import Tokenize, reader_of
from fmsdata.tasks.base import Task
from fmsdata.tasks.causal_lm import CausalLM

OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
KEEPS_DOCUMENTS = (ShardReader, Tokenize, Mixture, Delimit, Pack, Shuffle)  # stages that change no token of them
BATCH_SIZE = 8  # of data without a loader, as in a configuration
OF_LOADER = ("batch_size", "num_workers", "outputs", "prefetch")  # what a loader of the user's own says


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that a command looks at."""

    data: Rescalable
    task: Task = field(default_factory=CausalLM)
    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of StatefulDataLoader
    evaluation: bool | dict[str, int | None] = False
    checkpoints: Checkpoints | None = None  # read only
    checkpoints_at: Callable[[str], Checkpoints] = lambda path: Checkpoints(path, read_only=True)
    tokenizer: str | None = None
    in_python: bool = False  # the stages are those of a function of the user's own
    was_finite: bool = False  # it has an end, but is looked at without it

    @classmethod
    def of_config(cls, config: Config, data: Rescalable | None = None) -> "Run":
        """The run that a configuration describes, or over stages already built from it."""

        def checkpoints_at(path: str) -> Checkpoints:
            options = options_for(config, path)
            return Checkpoints(path, read_only=True, storage_options=options, storage=config.storage)

        return cls(
            data=build_data(config) if data is None else data,
            task=make_task(config),
            settings=dict(config.loader),
            evaluation=evaluation_of(config),
            checkpoints=make_checkpoints(config, read_only=True),
            checkpoints_at=checkpoints_at,
            tokenizer=config.documents.tokenizer,
        )

    @classmethod
    def of_function(cls, written: str, arguments: Mapping[str, Any]) -> "Run":
        """The run whose data a function of the user's own returns."""
        name = OwnName.found_from("function", written, None)
        name.check_arguments(arguments)
        made = name.load()(**arguments)
        if isinstance(made, StatefulDataLoader) and not isinstance(made, RowLoader):
            made.close()
            return cls(
                data=_without_rank(made.data),
                task=made.task,
                settings={setting: getattr(made, setting) for setting in OF_LOADER},
                evaluation={"samples": made.evaluation_samples} if made.evaluation else False,
                checkpoints=made.checkpoint,
                in_python=True,
            )
        if not isinstance(made, Rescalable):
            raise ConfigError(
                f"{name} returned {shown(made)}; it must return the data, a Rescalable, or a StatefulDataLoader of one"
            )
        return cls(data=_without_rank(made), settings={"batch_size": BATCH_SIZE}, in_python=True)

    @property
    def batch_size(self) -> int:
        return int(self.settings["batch_size"])

    @property
    def num_workers(self) -> int:
        return int(self.settings.get("num_workers", 0))

    @property
    def pack(self) -> Pack:
        """The stage that makes the lines."""
        for stage in stages_down_to_mixture(self.data.lines):
            if isinstance(stage, Pack):
                return stage
        raise ConfigError("the pipeline has no Pack above its mixture, so the length of its lines is unknown")

    @property
    def seq_len(self) -> int:
        """The tokens of a line that the model sees."""
        return self.pack.seq_len - self.task.extra_tokens

    @property
    def mixture(self) -> Mixture:
        """The mixture of the pipeline; of a pipeline without one, a mixture of its only source."""
        return mixture_of(self.data)

    @property
    def readers(self) -> dict[str, ShardReader]:
        """The reader of each source of the mixture."""
        readers = {name: reader_of(stage) for name, stage in self.mixture.sources.items()}
        for name, reader in readers.items():
            if reader is None:
                raise ConfigError(f"source {name!r} does not read shards with a ShardReader, so it can't be planned")
        return cast(dict[str, ShardReader], readers)

    @property
    def own_stages(self) -> list[str]:
        """The stages of the user's own, which may drop and change documents, by name."""
        stages, known = _stages(self.data.lines), KEEPS_DOCUMENTS if self.in_python else Stage
        return sorted({type(stage).__name__ for stage in stages if is_named(stage) or not isinstance(stage, known)})

    def make_loader(self, rank: int, world_size: int, **changes: Any) -> StatefulDataLoader:
        """A loader of the run, with some arguments replaced. It has no checkpoints."""
        arguments = {**self.settings, "task": self.task, "evaluation": self.evaluation, **changes}
        return StatefulDataLoader(self.data, rank=rank, world_size=world_size, **arguments)


def open_run(
    config: Path,
    overrides: Sequence[str] | None,
    section: str | None = None,
    *,
    with_checkpoints: bool = False,
    finite: bool = True,
) -> Run:
    """The run of a YAML file, of a section of it, or of a function `module:function`.

    Unless `with_checkpoints`, it is looked at from its start, and its checkpoints are not. Unless
    `finite`, it has no end.
    """
    written, given = str(config), parse_overrides(list(overrides or []))
    if OWN.fullmatch(written) and not config.exists():
        if section is not None:
            raise ConfigError(f"--section is for YAML files, and {written} is a function")
        run = Run.of_function(written, given)
        run = run if with_checkpoints else replace(run, checkpoints=None)
        if finite:
            return run
        ends = run.data.epochs is not None or bool(run.evaluation)
        return replace(run, data=_without_rank(run.data, epochs=None), evaluation=False, was_finite=ends)
    given = given if with_checkpoints else without_checkpoint(given)
    whole = read_config(config, given, section=section)
    if finite:
        return Run.of_config(whole)
    run = Run.of_config(read_config(config, endless(given), section=section))
    return replace(run, was_finite=bool(whole.epochs or whole.evaluation))


def mixture_of(data: Rescalable) -> Mixture:
    """The mixture of a pipeline; of a pipeline without one, a mixture of its only source."""
    lowest = stages_down_to_mixture(data.lines)[-1]
    if isinstance(lowest, Mixture):
        return lowest
    name = lowest.source_name()
    return Mixture({name: lowest}, {name: 1})


def _stages(stage: Stage) -> Iterator[Stage]:
    yield stage
    for child in stage.children().values():
        yield from _stages(child)


def _without_rank(data: Rescalable, **changes: Any) -> Rescalable:
    """The same data, for any rank."""
    arguments: dict[str, Any] = {"lanes": data.lanes, "seed": data.seed, "epochs": data.epochs, **changes}
    return Rescalable(data.lines, **arguments)
