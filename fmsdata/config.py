"""A run described as a dict or a YAML file: validated, and turned into stages."""

import difflib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from fmsdata.checkpoint import Checkpoints
from fmsdata.delimit import Delimit
from fmsdata.errors import ConfigError, DataError
from fmsdata.lanes import Rescalable
from fmsdata.loader import StatefulDataLoader
from fmsdata.mixture import Mixture, check_weights
from fmsdata.pack import Pack
from fmsdata.reader import ShardReader
from fmsdata.readers import SUFFIXES
from fmsdata.shuffle import Shuffle
from fmsdata.storage import list_files, local_path
from fmsdata.tasks import CausalLM


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceConfig(Section):
    weight: float
    path: str | None = None


class DocumentsConfig(Section):
    bos: int | None = None
    eos: int | None = None
    strip: tuple[int, ...] = ()
    min_length: int = 1
    column: str | None = None


class PackConfig(Section):
    mode: str = "split"
    seq_len: int
    bol: int | None = None
    eol: int | None = None
    pad: int | None = None


class TaskConfig(Section):
    name: Literal["causal_lm"] = "causal_lm"
    prompt_len: int = 0


class ShuffleConfig(Section):
    window: int = 256


class LoaderConfig(Section):
    batch_size: int = 8
    num_workers: int = 0
    outputs: tuple[str, ...] = ()
    prefetch: int = 4
    pin_memory: bool = False
    persistent_workers: bool = True
    multiprocessing_context: str | None = None


class CheckpointConfig(Section):
    path: str
    every: int | None = 1000
    keep: int | None = 3
    on_sigterm: bool = False


class Config(Section):
    """All of a run.

    `path` holds a folder per source; without `sources`, every sub-folder with shards is one,
    weighted by its tokens.
    """

    seed: int = 0
    path: str
    storage_options: dict[str, Any] = {}
    sources: dict[str, SourceConfig] | None = None
    documents: DocumentsConfig = DocumentsConfig()
    pack: PackConfig
    task: TaskConfig = TaskConfig()
    shuffle: ShuffleConfig = ShuffleConfig()
    lanes: int = 192
    phases: tuple[Any, ...] = ()
    checkpoint: CheckpointConfig | None = None
    loader: LoaderConfig = LoaderConfig()

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _no_checkpoint(cls, value: object) -> object:
        return value or None

    @field_validator("storage_options", "phases")
    @classmethod
    def _nothing_yet(cls, value: Any) -> Any:
        if value:
            raise ValueError("not available yet, leave it empty")
        return value

    @field_validator("task", mode="before")
    @classmethod
    def _task_by_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check a configuration, with dotted overrides such as `{"loader.batch_size": 4}` applied."""
    if isinstance(config, Mapping):
        name, values = "configuration", _deep_copy(config)
    elif not isinstance(config, str | os.PathLike):
        raise ConfigError(f"a configuration is a dict or the path of a YAML file, not {config!r}")
    else:
        name, values = str(config), _load_yaml(Path(config))
    if not isinstance(overrides or {}, Mapping) or not all(
        isinstance(key, str) for key in [*values, *(overrides or {})]
    ):
        raise ConfigError(f"{name}: keys and overrides are by name, as in {{'loader.batch_size': 4}}")
    for dotted, value in (overrides or {}).items():
        *parents, last = dotted.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"override {dotted!r}: {parent!r} is a value, not a section")
        section[last] = value
    try:
        return Config(**values)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{name}:", *map(_in_words, error.errors())])) from None


def build_loader(
    config: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> StatefulDataLoader:
    """A loader from a dict or a YAML file.

    >>> loader = build_loader("configs/demo.yaml", {"loader.batch_size": 4}, rank=0, world_size=1)     # doctest: +SKIP
    """
    told = read_config(config, overrides)
    return make_loader(told, build_data(told), rank=rank, world_size=world_size)


def make_loader(
    config: Config, data: Rescalable, *, rank: int | None = None, world_size: int | None = None
) -> StatefulDataLoader:
    """The loader that a configuration describes, over stages that were built of it before."""
    return StatefulDataLoader(
        data,
        **dict(config.loader),
        task=_task(config),
        checkpoint=None if config.checkpoint is None else Checkpoints(**dict(config.checkpoint)),
        rank=rank,
        world_size=world_size,
    )


def build_data(config: Config) -> Rescalable:
    """The stages that a configuration describes."""
    documents, pack = config.documents, config.pack
    lines = Pack(
        Delimit(_mixture(config), bos=documents.bos, eos=documents.eos),
        seq_len=pack.seq_len + _task(config).extra_tokens,
        mode=pack.mode,  # type: ignore[arg-type]  # Pack says which modes there are
        bol=pack.bol,
        eol=pack.eol,
        pad=pack.pad,
    )
    return Rescalable(Shuffle(lines, window=config.shuffle.window), lanes=config.lanes, seed=config.seed)


def _task(config: Config) -> CausalLM:
    return CausalLM(prompt_len=config.task.prompt_len)


def _mixture(config: Config) -> Mixture:
    root = local_path(config.path)
    paths = _source_paths(root, config.sources)

    def reader(name: str) -> ShardReader:
        return _reader(paths[name], name, root, config.documents)

    if config.sources is not None:
        weights = {name: source.weight for name, source in config.sources.items()}
        check_weights(paths, weights)
    readers = {name: reader(name) for name in paths}
    if config.sources is None:
        weights = {name: max(1, one.size().tokens) for name, one in readers.items()}
    return Mixture(readers, weights, find=partial(_find_removed, root, config.documents))


def _reader(path: Path, name: str, root: Path, documents: DocumentsConfig) -> ShardReader:
    return ShardReader(
        path,
        name=name,
        column=documents.column,
        strip=documents.strip,
        min_length=documents.min_length,
        folder=os.path.relpath(path, root),
    )


def _find_removed(root: Path, documents: DocumentsConfig, name: str, description: Mapping[str, Any]) -> ShardReader:
    """A source that is not in the configuration any more, where it was when the run was saved."""
    return _reader(root / description["folder"], name, root, documents)


def _source_paths(root: Path, sources: Mapping[str, SourceConfig] | None) -> dict[str, Path]:
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; check `path`")
    if sources is None:
        shards = list_files(root, SUFFIXES)
        found = sorted({shard.partition("/")[0] for shard in shards if "/" in shard})
        loose = [shard for shard in shards if "/" not in shard]
        if found and loose:
            raise DataError(f"{root}: {loose[0]} is in no source; move it into a folder, or name the `sources`")
        if not found:
            raise DataError(
                f"{root}: no sub-folder holds shards ({', '.join(SUFFIXES)}); check `path`, or name the `sources`"
            )
        return {name: root / name for name in found}
    if not sources:
        raise ConfigError("`sources` is empty; name at least one, or leave it out to take every sub-folder with shards")
    return {name: root / (source.path or name) for name, source in sources.items()}


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(values).__name__}")
    return values


def _deep_copy(value: Any) -> Any:
    return {name: _deep_copy(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _in_words(error: Any) -> str:
    where = [str(part) for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        given = "" if error["type"] == "missing" else f", not {error['input']!r}"
        return f"  {'.'.join(where)}: {error['msg']}{given}"
    section: Any = Config
    for part in where[:-1]:
        field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        section = SourceConfig if field is None else next(iter(get_args(field.annotation)), field.annotation)
    known = list(getattr(section, "model_fields", {}))
    close = difflib.get_close_matches(where[-1], known, n=1)
    return f"  {'.'.join(where)}: unknown key; " + (
        f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    )
