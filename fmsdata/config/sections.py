"""The sections of a configuration: what may stand in a YAML file, and what each value must be.

The text below each key is its description in editors, through the JSON schema.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fmsdata.core.checks import SIZE, byte_count, suggestion
from fmsdata.errors import ConfigError
from fmsdata.stages.mixture import LARGEST_WEIGHT
from fmsdata.stages.pack import Mode, check_pad
from fmsdata.storage.settings import CacheSettings, Storage
from fmsdata.tasks.batch import OUTPUTS, check_outputs
from fmsdata.tasks.registry import task_from

Natural: TypeAlias = Literal["natural"]
Location: TypeAlias = tuple[str | int, ...]
FROM_ENVIRONMENT = {"type": "string", "pattern": r"^\$\{env:\w+(:-[^}]*)?\}$"}


class Problems(ValueError):
    """All that is wrong below one key, each with its place there."""

    def __init__(self, problems: list[tuple[Location, str]]) -> None:
        super().__init__("; ".join(text for _, text in problems))
        self.problems = problems


@contextmanager
def _collected() -> Iterator[None]:
    """Let pydantic collect the project's own errors, to tell them with file and line."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _must_be(words: str, check: Callable[[Any], bool]) -> BeforeValidator:
    def checked(value: Any) -> Any:
        if not check(value):
            raise PydanticCustomError("must_be", words)
        return value

    return BeforeValidator(checked)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole_float(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: Any) -> Any:
    size = byte_count(value) if isinstance(value, str) else _whole_float(value)
    if not isinstance(size, int) or isinstance(size, bool):
        raise PydanticCustomError("must_be", "a number of bytes, or a size such as 256MB or 1.5GiB")
    return size


def _kind_of_weights(value: Any) -> str:
    return "by source" if isinstance(value, dict) else "otherwise"


Whole: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
TokenCount: TypeAlias = Annotated[int, BeforeValidator(_whole_float), Field(ge=1)]  # 1.0e12 is one
ByteCount: TypeAlias = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{SIZE.pattern}$"}]}),
]
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
Number: TypeAlias = Annotated[float, Field(ge=0, le=LARGEST_WEIGHT)]
Weight: TypeAlias = Annotated[
    Number | Natural,
    _must_be(
        f"a number from 0 to {LARGEST_WEIGHT:.0e}, or the word natural",
        lambda value: value == "natural" or (_is_number(value) and 0 <= value <= LARGEST_WEIGHT),
    ),
]
Weights: TypeAlias = Annotated[
    Annotated[dict[str, Number], Tag("by source")]
    | Annotated[
        Natural | None,
        _must_be("a mapping from sources to numbers, or the word natural", lambda value: value in ("natural", None)),
        Tag("otherwise"),
    ],
    Discriminator(_kind_of_weights),
]
Temperature: TypeAlias = Annotated[float, Field(gt=0)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
TASK = _must_be(
    "the name of a task, or a mapping with its name and options", lambda value: isinstance(value, str | dict)
)
AS_LIST = Field(strict=False)  # where a tuple is wanted, a list is meant
OUTPUT_NAMES: dict[str, Any] = {"items": {"enum": list(OUTPUTS)}}


def _for_editors(schema: dict[str, Any]) -> None:
    """What a file may do besides: leave to others what it includes, and to the environment what it can't know."""
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
        "description": "YAML files, relative to this one. What stands here is laid over them, mapping by mapping.",
    }
    sources = schema["properties"]["sources"]["anyOf"][0]  # null removes one that was included
    sources["additionalProperties"] = {"anyOf": [sources["additionalProperties"], {"type": "null"}]}
    schema["patternProperties"] = {"^x-": {"description": "Not looked at: a place for anchors."}}


class Section(BaseModel):
    """A part of the configuration: unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_for_editors,
    )


class SourceConfig(Section):
    """One source: a folder of shards, and its part in the mix."""

    weight: Weight = "natural"
    """Its share of the tokens, relative to the other sources'; `natural`: its number of tokens.

    With 0 it is not read and keeps its place."""
    path: Text | None = None
    """Its folder below the top-level `path`, or a URL of its own; by default its name."""
    max_epochs: Annotated[float, Field(gt=0)] | None = None
    """How often it is read at most. After that its share goes to the others."""


class DocumentsConfig(Section):
    """What happens to each document before it is packed."""

    bos: Whole | None = None
    """A token to put before each document."""
    eos: Whole | None = None
    """A token to put behind each document."""
    strip: Annotated[tuple[Whole, ...], AS_LIST] = ()
    """Tokens to remove at both ends of a document, as many as stand there."""
    min_length: Whole = 1
    """Documents with fewer tokens (after `strip`) are skipped."""
    column: str | None = None
    """The column of the shards that holds the tokens; by default `tokens`, or the only one."""


class PackConfig(Section):
    """How documents become lines of one length."""

    mode: Mode = "split"
    """`split`: documents run on over lines. `pad`: a document that does not fit starts a new line."""
    seq_len: Positive
    """How many tokens of a line the model sees."""
    bol: Whole | None = None
    """A token to start each line with."""
    eol: Whole | None = None
    """A token to end each line with."""
    pad: Whole | None = None
    """The token that fills up lines; only for mode `pad`, and needed there."""

    @model_validator(mode="after")
    def _pad_belongs_to_mode(self) -> "PackConfig":
        with _collected():
            check_pad(self.mode, self.pad)
        return self


class ShuffleConfig(Section):
    """How lines are shuffled."""

    window: Positive = 256
    """How many lines of a lane are shuffled together; 1 keeps their order."""


class PhaseConfig(Section):
    """A part of the run with a mix of its own."""

    until_tokens: TokenCount | None = None
    """The phase holds until the run has taken this many tokens in all.

    Only the last phase may leave it out, and then holds for ever."""
    weights: Weights = None
    """A number for each source that is read in this phase (the others are not), or `natural`.

    By default the sources' own weights."""
    temperature: Temperature | None = None
    """As the top-level `temperature`, for this phase."""


class LoaderConfig(Section):
    """Batches of one rank. None of this changes the stream."""

    batch_size: Positive = 8
    """Lines in a batch, on each rank."""
    num_workers: Whole = 0
    """Processes that read, on each rank. Tokenized data needs none."""
    outputs: Annotated[tuple[str, ...], AS_LIST, Field(json_schema_extra=OUTPUT_NAMES)] = ()
    """What a batch holds besides what the task gives."""
    prefetch: Whole = 4
    """Batches that a thread makes ahead; 0: each is made when it is asked for."""
    pin_memory: bool = False
    """Put batches into pinned memory."""
    persistent_workers: bool = True
    """Keep the workers when an iteration is left."""
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers are started; by default as the system does."""

    @field_validator("outputs")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        with _collected():
            check_outputs(value)
        return value


class CacheConfig(Section):
    """Where a node keeps what its processes fetched."""

    path: Text
    """A folder on a disk of the node, for all its processes."""
    limit: ByteCount
    """How much it holds at most, such as 200GB."""

    @model_validator(mode="after")
    def _on_a_disk(self) -> "CacheConfig":
        with _collected():
            self.settings()
        return self

    def settings(self) -> CacheSettings:
        return CacheSettings(path=self.path, limit=self.limit)


class StorageConfig(Section):
    """How shards that are not on a local disk are read, by each worker. None of this changes the stream."""

    prefetch_bytes: ByteCount = Storage.prefetch_bytes
    """How much of the shards is held in memory, fetched ahead or in use."""
    connections: Positive = Storage.connections
    """Requests at a time."""
    retries: Whole = Storage.retries
    """Attempts after the first, for each read."""
    timeout: Seconds = Storage.timeout
    """Seconds for one attempt."""
    deadline: Seconds = Storage.deadline
    """Seconds for a read with all its attempts; after that the run ends with an error, and can be resumed."""
    cache: CacheConfig | None = None
    """Where a node keeps what its processes fetched; by default nowhere."""

    def settings(self) -> Storage:
        told = dict(self)
        return Storage(**{**told, "cache": self.cache and self.cache.settings()})


class CheckpointConfig(Section):
    """Where the loader saves itself, and resumes from."""

    path: Text
    """A folder on any fsspec filesystem."""
    every: Positive | None = 1000
    """Steps between checkpoints; null: only when `loader.save()` is called."""
    keep: Positive | None = 3
    """How many complete checkpoints are kept; null: all."""
    on_sigterm: bool = False
    """Save also when the scheduler ends the job."""
    storage_options: Annotated[dict[str, Any] | None, Field(repr=False)] = None
    """Options for the filesystem; by default the top-level ones, if both paths are on the same kind."""


class Config(Section):
    """All of a run: its sources, what becomes of their documents, and how batches are handed out."""

    model_config = ConfigDict(title="A run of fmsdata", json_schema_extra=_for_editors_of_files)

    seed: int = 0
    """Decides the order of everything. Fixed for a run."""
    path: Text
    """The folder that holds the sources' folders, on a disk or on any filesystem that fsspec knows."""
    storage_options: Annotated[dict[str, Any], Field(repr=False)] = {}
    """Options for the filesystem of `path`, such as credentials; `${env:VAR}` keeps secrets out of the file."""
    storage: StorageConfig = StorageConfig()
    """How shards that are not on a local disk are read, by each worker. None of this changes the stream."""
    sources: dict[str, SourceConfig] | None = None
    """The sources by name; by default every sub-folder of `path` with shards, by its number of tokens."""
    temperature: Temperature | None = None
    """For natural weights: tokens ** (1 / temperature). 1 is natural, larger is flatter."""
    phases: Annotated[tuple[PhaseConfig, ...], AS_LIST] = ()
    """Other mixes for parts of the run, one after the other. Behind the last, the sources' own weights apply again."""
    documents: DocumentsConfig = DocumentsConfig()
    """What happens to each document before it is packed."""
    pack: PackConfig
    """How documents become lines of one length."""
    task: Annotated[str | dict[str, Any], TASK] = "causal_lm"
    """What a line becomes for the model: a name, `module:function`, or a mapping with `name` and options."""
    shuffle: ShuffleConfig = ShuffleConfig()
    """How lines are shuffled."""
    lanes: Positive = 192
    """Independent pipelines that make up the run. Fixed for a run; world sizes that divide it read the same stream."""
    loader: LoaderConfig = LoaderConfig()
    """Batches of one rank. None of this changes the stream."""
    checkpoint: CheckpointConfig | None = None
    """Where the loader saves itself, and resumes from; by default nowhere."""

    @field_validator("documents", "shuffle", "loader", "storage", "storage_options", "phases", "task", mode="before")
    @classmethod
    def _nothing_is_the_default(cls, value: object, info: ValidationInfo) -> object:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _no_checkpoint(cls, value: object) -> object:
        return None if value == {} else value

    @field_validator("task")
    @classmethod
    def _a_task_there_is(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        with _collected():
            task_from(value)
        return value

    @field_validator("sources")
    @classmethod
    def _one_kind_of_weight(cls, sources: dict[str, SourceConfig] | None) -> dict[str, SourceConfig] | None:
        if sources is None:
            return None
        if not sources:
            raise ValueError(
                "`sources` is empty; name at least one, or leave it out to take every sub-folder with shards"
            )
        if "" in sources:
            raise ValueError("a source has no name")
        natural = [name for name, source in sources.items() if source.weight == "natural"]
        numbers = [name for name, source in sources.items() if source.weight not in ("natural", 0)]
        if not natural and not numbers:
            raise ValueError("no source has a weight above 0, so there is nothing to read")
        if natural and numbers:
            first = natural[0]
            raise Problems(
                [
                    (
                        (first,),
                        f"its weight is {'natural' if 'weight' in sources[first].model_fields_set else 'left out'}, "
                        f"and that of {numbers[0]!r} is a number: the two can't be compared; "
                        "give numbers to all sources of the mix or to none",
                    )
                ]
            )
        return sources

    @field_validator("temperature")
    @classmethod
    def _natural_weights_have_temperature(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not _natural(info.data.get("sources")):
            raise ValueError("temperature is for `weight: natural`, and the sources' weights are numbers")
        return value

    @field_validator("phases")
    @classmethod
    def _one_phase_after_the_other(
        cls, phases: tuple[PhaseConfig, ...], info: ValidationInfo
    ) -> tuple[PhaseConfig, ...]:
        if problems := list(_wrong_phases(phases, info.data.get("sources"))):
            raise Problems(problems)
        return phases


def _natural(sources: dict[str, SourceConfig] | None) -> bool:
    return sources is None or any(source.weight == "natural" for source in sources.values())


def _wrong_phases(
    phases: tuple[PhaseConfig, ...], sources: dict[str, SourceConfig] | None
) -> Iterator[tuple[Location, str]]:
    before = 0
    for index, phase in enumerate(phases):
        until = phase.until_tokens
        if until is None and index < len(phases) - 1:
            yield (index,), "until_tokens is missing; only the last phase may go on for ever"
        elif until is not None and until <= before:
            yield (index, "until_tokens"), "it must be more than that of the phase before"
        before = until or before
        if isinstance(phase.weights, dict):
            if not any(phase.weights.values()):
                yield (index, "weights"), "no source has a weight above 0, so there is nothing to read"
            for name in phase.weights:
                if sources is not None and name not in sources:
                    yield (index, "weights", name), f"no such source; {suggestion(name, sources)}"
        if phase.temperature is not None and not (
            phase.weights == "natural" or (phase.weights is None and _natural(sources))
        ):
            yield (index, "temperature"), "temperature is for natural weights, and this phase's are numbers"
