"""The sections of a configuration: which keys a YAML file may have, and what each value must be.

The text below a key is its description in the JSON schema, which editors show.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)

from fmsdata.config.values import (
    AS_LIST,
    ONE_OF_OUTPUTS,
    TASK,
    ByteCount,
    KeyPath,
    NestedErrors,
    OwnStages,
    Positive,
    Seconds,
    Temperature,
    Text,
    TokenCount,
    Weight,
    Weights,
    Whole,
    Window,
    collected,
)
from fmsdata.core.checks import suggestion, unnamed
from fmsdata.core.options import PREFETCH, Mode
from fmsdata.errors import ConfigError
from fmsdata.storage.settings import CacheSettings, SettingKind, SpoolSettings, Storage

FROM_ENVIRONMENT = {"type": "string", "pattern": r"^\$\{env:\w+(:-[^}]*)?\}$"}


def _for_editors(schema: dict[str, Any]) -> None:
    """Allow a file to leave keys to the files it includes, and values to the environment."""
    schema.pop("required", None)
    for field in schema["properties"].values():
        if field.get("type") in ("integer", "number", "boolean"):
            kind = {name: field.pop(name) for name in list(field) if name not in ("title", "description", "default")}
            field["anyOf"] = [kind]
        if "anyOf" in field:
            field["anyOf"] = [*field["anyOf"], FROM_ENVIRONMENT]


def _for_editors_of_files(schema: dict[str, Any]) -> None:
    _for_editors(schema)
    file: dict[str, Any] = {"type": "string"}
    schema["properties"]["include"] = {
        "anyOf": [file, {"type": "array", "items": file}],
        "description": "YAML files, relative to this file. The keys here are merged over theirs, mapping by mapping.",
    }
    sources = schema["properties"]["sources"]["anyOf"][0]  # null removes a source of an included file
    sources["additionalProperties"] = {"anyOf": [sources["additionalProperties"], {"type": "null"}]}
    schema["patternProperties"] = {"^x-": {"description": "Ignored: a place for anchors."}}


class Section(BaseModel):
    """A section of the configuration. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_for_editors,
    )


def _checked_stages(stages: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
    """The stages, if each can be found and takes its arguments."""
    errors: list[tuple[KeyPath, str]] = []
    for number, described in enumerate(stages):
        from fmsdata.stages.own import check_described  # only if there are any: the stages import torch

        try:
            check_described(described, info.context)
        except ConfigError as error:
            errors.append(((number,), str(error)))
    if errors:
        raise NestedErrors(errors)
    return stages


class SourceConfig(Section):
    """A source: a folder of shards, and its share of the mix."""

    weight: Weight = "natural"
    """Share of the tokens, relative to the other sources. `natural`: the source's number of tokens.

    With 0 it is not read, and keeps its position for later."""
    path: Text | None = None
    """Folder below the top-level `path`, or a URL of its own; by default the source's name."""
    files: Text | Annotated[tuple[Text, ...], AS_LIST, Field(min_length=1)] | None = None
    """Which files of the folder to read: a pattern such as `*.parquet`, or a list of names and patterns."""
    max_epochs: Annotated[float, Field(gt=0)] | None = None
    """The most epochs of the source to read. After that, its share goes to the other sources."""


class DocumentsConfig(Section):
    """What happens to each document before it is packed."""

    bos: Whole | None = None
    """A token to insert before each document."""
    eos: Whole | None = None
    """A token to insert after each document."""
    strip: Annotated[tuple[Whole, ...], AS_LIST] = ()
    """Tokens to remove from both ends of a document, however often they are there."""
    min_length: Whole = 1
    """Documents with fewer tokens (after `strip`) are skipped."""
    column: str | None = None
    """The column, or the field of JSON lines, that holds the documents.

    By default `tokens` or the only column with tokens of Arrow shards, `text` or `tokens` of Parquet files, and
    the field `text` of JSON lines."""
    tokenizer: Text | None = None
    """Tokenizes sources of text: a tokenizer.json, a folder of one, `tiktoken:NAME`, or `bytes`.

    Fixed for a run of text. `fmsdata preview` decodes with it."""
    stages: OwnStages = ()
    """Stages of your own for the documents of each source: `module:Class`, or its `name` and arguments.

    Modules are found beside the YAML file, in the current directory, or on Python's search path. Fixed for a run."""

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        return _checked_stages(value, info)


class PackConfig(Section):
    """How documents are packed into lines of equal length."""

    mode: Mode = "split"
    """`split`: documents continue over lines. `pad`: a document that doesn't fit starts a line.

    `bestfit`: documents are placed where they fit best; only those longer than a line are split."""
    seq_len: Positive
    """The number of tokens of a line that the model sees."""
    bol: Whole | None = None
    """A token to start each line with; for mode `bestfit` the BOS of every document, and required."""
    eol: Whole | None = None
    """A token to end each line with."""
    pad: Whole | None = None
    """The token that fills up lines; required for modes `pad` and `bestfit`, and ignored by mode `split`."""
    crop: bool = False
    """For mode `bestfit`: never pad; throw away what a line has too much (about 0.3% of the tokens)."""
    max_documents: Positive | None = None
    """For mode `bestfit`: the most documents in a line."""
    stages: OwnStages = ()
    """Stages of your own for the lines, between packing and shuffling: `module:Class`, or its `name` and arguments."""

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        return _checked_stages(value, info)

    @model_validator(mode="after")
    def _options_fit_the_mode(self) -> "PackConfig":
        from fmsdata.stages.pack import check_options  # the stages import torch; describing a configuration must not

        with collected():
            options = self.model_dump(exclude={"mode", "seq_len", "stages"})
            check_options(self.mode, **options)
        return self


class ShuffleConfig(Section):
    """How lines are shuffled."""

    window: Window = "auto"
    """The number of lines of a lane that are shuffled together; 1 keeps their order.

    `auto`: three times `distance`, but at most an eighth of what a lane reads in an epoch."""
    distance: Positive | None = None
    """How many samples apart two neighbouring lines of a lane shall be on average; by default 10,000.

    For window `auto`. It holds at one lane per rank; with more lanes they are further apart."""

    @model_validator(mode="after")
    def _window_or_distance(self) -> "ShuffleConfig":
        if self.window != "auto" and self.distance is not None:
            raise ValueError("`window` is a number, so `distance` has no effect; give one of the two")
        return self


class PhaseConfig(Section):
    """A part of the run with its own mix."""

    until_tokens: TokenCount | None = None
    """The phase ends when the run has read this many tokens in total.

    Only the last phase may leave this out, and then it never ends."""
    weights: Weights = None
    """A number for every source (0: it is not read in this phase), or `natural`.

    By default the sources' own weights."""
    temperature: Temperature | None = None
    """Like the top-level `temperature`, for this phase."""


class LoaderConfig(Section):
    """How each rank gets its batches. None of this changes the stream."""

    batch_size: Positive = 8
    """Lines in a batch, on each rank."""
    num_workers: Whole = 0
    """Worker processes that read, on each rank. Tokenized data needs none."""
    outputs: Annotated[tuple[str, ...], AS_LIST, Field(json_schema_extra=ONE_OF_OUTPUTS)] = ()
    """Fields of a batch in addition to those of the task."""
    padding_segment: bool | None = None
    """Whether padding is a segment of its own in `cu_seqlens`; by default only if the task is not causal."""
    prefetch: Whole = PREFETCH
    """Batches that a thread prepares ahead; 0: each batch is made when it is requested."""
    pin_memory: bool = False
    """Copy batches into pinned memory. With `device` that is not needed."""
    device: Text | None = None
    """The device that batches are copied to ahead of the trainer, such as `cuda`; by default none."""
    persistent_workers: bool = True
    """Keep the workers after an iteration has ended."""
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers are started; by default from a fork server."""
    stall_warning: Seconds = 30.0
    """Seconds without a batch after which the loader warns, and says what it waits for."""
    stall_timeout: Seconds | None = None
    """Seconds without a batch after which the loader raises an error; by default it waits."""
    steps: Positive | None = None
    """Steps after which an iteration ends, and the loader's length; null: it never ends."""

    @field_validator("outputs")
    @classmethod
    def _known_outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from fmsdata.tasks.batch import check_outputs

        with collected():
            check_outputs(value)
        return value


def _section_of(settings: type[Any], name: str, **sections: Any) -> Any:
    """The section of a dataclass of settings: the same fields, descriptions and defaults, as YAML
    has them.

    The validated section is an instance of the dataclass, which makes its own checks.
    """
    fields: dict[str, Any] = {}
    for setting in dataclasses.fields(settings):
        kind = setting.metadata["kind"]
        values = sections[setting.name] if kind is SettingKind.SECTION else SETTINGS[kind]
        if kind is SettingKind.SECTION or setting.default is None:
            values |= None
        default = ... if setting.default is dataclasses.MISSING else setting.default
        fields[setting.name] = values, Field(default, description=setting.metadata["description"])
    description = " ".join((inspect.getdoc(settings) or "").partition("\n\n")[0].split())
    model = create_model(name, __base__=Section, __doc__=description, **fields)

    def to_settings(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, settings):
            return value
        section = validate(value)
        with collected():
            return settings(**dict(section))

    return Annotated[model, WrapValidator(to_settings)]


SETTINGS: dict[SettingKind, Any] = {
    SettingKind.BYTES: ByteCount,
    SettingKind.COUNT: Whole,
    SettingKind.POSITIVE_COUNT: Positive,
    SettingKind.SECONDS: Seconds,
    SettingKind.LOCAL_FOLDER: Text,
}
if TYPE_CHECKING:
    StorageConfig: TypeAlias = Storage
else:
    StorageConfig = _section_of(
        Storage,
        "StorageConfig",
        cache=_section_of(CacheSettings, "CacheConfig"),
        spool=_section_of(SpoolSettings, "SpoolConfig"),
    )


class EvaluationConfig(Section):
    """Which part of the set an evaluation reads."""

    samples: Positive | None = None
    """Only the first samples of the set, the same ones at every world size; null: all of them."""


class CheckpointConfig(Section):
    """Where the loader saves its state, and resumes from."""

    path: Text
    """A folder on any fsspec filesystem."""
    every: Positive | None = 1000
    """Steps between checkpoints; null: only when `loader.save()` is called."""
    keep: Positive | None = 3
    """The number of complete checkpoints to keep; null: all."""
    step: Whole | None = None
    """Go back to this step, once; null: resume from the newest."""
    on_sigterm: bool = False
    """Also save on SIGTERM, which schedulers send before they end a job."""
    storage_options: Annotated[dict[str, Any] | None, Field(repr=False)] = None
    """Options for the filesystem; by default the top-level options, if both are of one kind."""


class Config(Section):
    """A run: its sources, what happens to their documents, and how batches are made."""

    model_config = ConfigDict(title="A run of fmsdata", json_schema_extra=_for_editors_of_files)
    _folder: str | None = PrivateAttr(default=None)

    @property
    def folder(self) -> str | None:
        """The folder of the YAML file, if there is one: modules of the user's own are looked up there."""
        return self._folder

    def in_folder(self, folder: str | None) -> "Config":
        """The same configuration, read from a file in this folder."""
        config = self.model_copy()
        config._folder = folder
        return config

    seed: int = 0
    """Determines every random order. Fixed for a run."""
    path: Text
    """The folder that holds the sources' folders, on a disk or on any filesystem of fsspec."""
    storage_options: Annotated[dict[str, Any], Field(repr=False)] = {}
    """Options for the filesystem of `path`, such as credentials. Use `${env:VAR}` for secrets."""
    storage: StorageConfig = Storage()
    """How remote shards are read, by each worker. None of this changes the stream."""
    sources: dict[str, SourceConfig] | None = None
    """The sources by name; by default all sub-folders of `path` with shards, natural weights."""
    temperature: Temperature | None = None
    """For natural weights: tokens ** (1 / temperature). 1 is natural, larger is flatter."""
    phases: Annotated[tuple[PhaseConfig, ...], AS_LIST] = ()
    """Mixes for parts of the run, in order. After the last, the sources' own weights apply."""
    documents: DocumentsConfig = DocumentsConfig()
    """What happens to each document before it is packed."""
    pack: PackConfig
    """How documents are packed into lines of equal length."""
    task: Annotated[str | dict[str, Any], TASK] = "causal_lm"
    """The model's inputs: a task's name, `module:function`, or a mapping of `name` and options."""
    shuffle: ShuffleConfig = ShuffleConfig()
    """How lines are shuffled."""
    lanes: Positive = 192
    """Independent pipelines, fixed for a run. World sizes that divide them read the same stream."""
    epochs: Positive | None = None
    """Read each document this many times, then stop, at the same step on every rank; null: endlessly."""
    evaluation: bool | EvaluationConfig = False
    """Read the set from the top at each iteration, without a state: `true`, or how much of it."""
    loader: LoaderConfig = LoaderConfig()
    """How each rank gets its batches. None of this changes the stream."""
    checkpoint: CheckpointConfig | None = None
    """Where the loader saves its state, and resumes from; by default nowhere."""

    @field_validator("documents", "shuffle", "loader", "storage", "storage_options", "phases", "task", mode="before")
    @classmethod
    def _null_is_the_default(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _no_checkpoint(cls, value: object) -> object:
        return None if value == {} else value

    @field_validator("evaluation", mode="before")
    @classmethod
    def _flag_or_section(cls, value: object) -> object:
        if not isinstance(value, bool | dict | EvaluationConfig | None):
            raise ValueError(f"it must be true, false, or a part of the set such as {{samples: 1000}}, not {value!r}")
        return False if value is None else value

    @model_validator(mode="after")
    def _finite_or_endless(self) -> "Config":
        if self.epochs is None and not self.evaluation:
            return self
        name = "evaluation" if self.evaluation else "epochs"
        if self.phases:
            raise NestedErrors(
                [(("phases",), f"`{name}` reads every source to its end, and has no phases; remove one of the two")]
            )
        if self.evaluation and self.checkpoint is not None:
            raise NestedErrors(
                [(("checkpoint",), "an evaluation has no state, so it has no checkpoints; remove one of the two")]
            )
        return self

    @field_validator("task")
    @classmethod
    def _known_task(cls, value: str | dict[str, Any], info: ValidationInfo) -> str | dict[str, Any]:
        from fmsdata.tasks.registry import task_from

        with collected():
            task_from(value, info.context)
        return value

    @field_validator("sources")
    @classmethod
    def _one_kind_of_weight(cls, sources: dict[str, SourceConfig] | None) -> dict[str, SourceConfig] | None:
        if sources is None:
            return None
        if not sources:
            raise ValueError(
                "`sources` is empty; name at least one source, or leave it out to use every sub-folder with shards"
            )
        if "" in sources:
            raise ValueError("a source has no name")
        natural = [name for name, source in sources.items() if source.weight == "natural"]
        numbers = [name for name, source in sources.items() if source.weight not in ("natural", 0)]
        if not natural and not numbers:
            raise ValueError("no source has a weight above 0, so there is nothing to read")
        if natural and numbers:
            first = natural[0]
            raise NestedErrors(
                [
                    (
                        (first,),
                        f"its weight is {'natural' if 'weight' in sources[first].model_fields_set else 'left out'}, "
                        f"but the weight of {numbers[0]!r} is a number: the two can't be compared; "
                        "give numbers to all sources or to none",
                    )
                ]
            )
        return sources

    @field_validator("temperature")
    @classmethod
    def _temperature_needs_natural_weights(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not _natural(info.data.get("sources")):
            raise ValueError("temperature is for `weight: natural`, but the weights of the sources are numbers")
        return value

    @field_validator("phases")
    @classmethod
    def _phases_in_order(cls, phases: tuple[PhaseConfig, ...], info: ValidationInfo) -> tuple[PhaseConfig, ...]:
        if errors := list(_phase_errors(phases, info.data.get("sources"))):
            raise NestedErrors(errors)
        return phases


def _natural(sources: dict[str, SourceConfig] | None) -> bool:
    return sources is None or any(source.weight == "natural" for source in sources.values())


def _phase_errors(
    phases: tuple[PhaseConfig, ...], sources: dict[str, SourceConfig] | None
) -> Iterator[tuple[KeyPath, str]]:
    before = 0
    for index, phase in enumerate(phases):
        until = phase.until_tokens
        if until is None and index < len(phases) - 1:
            yield (index,), "until_tokens is missing; only the last phase may be without end"
        elif until is not None and until <= before:
            yield (index, "until_tokens"), "it must be more than in the phase before"
        before = until or before
        if isinstance(phase.weights, dict):
            if not any(phase.weights.values()):
                yield (index, "weights"), "no source has a weight above 0, so there is nothing to read"
            unknown = [name for name in phase.weights if sources is not None and name not in sources]
            for name in unknown:
                yield (index, "weights", name), f"no such source; {suggestion(name, sources or ())}"
            if not unknown and (missing := unnamed(sources or (), phase.weights)):
                yield (index, "weights"), missing
        if phase.temperature is not None and not (
            phase.weights == "natural" or (phase.weights is None and _natural(sources))
        ):
            yield (
                (index, "temperature"),
                "temperature is for natural weights, but the weights of this phase are numbers",
            )
