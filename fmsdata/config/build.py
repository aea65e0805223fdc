"""Build the stages and the loader that a configuration describes."""

import logging
import os
import sys
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fmsdata.config.read import read_config
from fmsdata.config.sections import Config, DocumentsConfig, PhaseConfig, SourceConfig
from fmsdata.core.checks import suggestion
from fmsdata.core.stage import Stage
from fmsdata.corpus.listing import VALIDATION, all_shards, arrow_first, find_shards, held_out, is_leftover
from fmsdata.corpus.planned import find_unmoved
from fmsdata.corpus.selection import has_patterns
from fmsdata.errors import ConfigError, DataError
from fmsdata.formats import SUFFIXES, format_of
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.differences import lowest
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.mixture import Mixture, Phase
from fmsdata.stages.own import with_stages
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.stages.tokenize import Tokenize, is_counted
from fmsdata.storage.location import Location, same_kind
from fmsdata.tasks.base import Task
from fmsdata.tasks.registry import task_from

log = logging.getLogger("fmsdata")


def build_loader(
    config: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    section: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
    read_only: bool = False,
) -> StatefulDataLoader:
    """The loader that a dict or a YAML file describes, or the `section` of it that holds its keys.

    With `read_only` it resumes as the run would, and writes and removes no checkpoint.

    >>> loader = build_loader("configs/demo.yaml", {"loader.batch_size": 4}, rank=0, world_size=1)     # doctest: +SKIP
    """
    parsed = read_config(config, overrides, section=section)
    ranks: Any = {"rank": rank, "world_size": world_size, "mesh": mesh, "process_group": process_group}
    return make_loader(parsed, build_data(parsed), read_only=read_only, **ranks)


def make_loader(
    config: Config,
    data: Rescalable,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    read_only: bool = False,
    **ranks: Any,
) -> StatefulDataLoader:
    """The loader that a configuration describes, over stages already built from it."""
    return StatefulDataLoader(
        data,
        **dict(config.loader),
        task=make_task(config),
        checkpoint=make_checkpoints(config, read_only=read_only),
        evaluation=evaluation_of(config),
        rank=rank,
        world_size=world_size,
        **ranks,
    )


def build_data(config: Config) -> Rescalable:
    """The stages that a configuration describes."""
    documents, pack = config.documents, config.pack
    lines = Pack(
        Delimit(_mixture(config), bos=documents.bos, eos=documents.eos),
        seq_len=pack.seq_len + make_task(config).extra_tokens,
        mode=pack.mode,
        bol=pack.bol,
        eol=pack.eol,
        pad=pack.pad,
        crop=pack.crop,
        max_documents=pack.max_documents,
    )
    epochs = config.epochs or (1 if config.evaluation else None)
    stages = with_stages(lines, pack.stages, config.folder)
    return Rescalable(Shuffle(stages, **dict(config.shuffle)), lanes=config.lanes, seed=config.seed, epochs=epochs)


def evaluation_of(config: Config) -> bool | dict[str, int | None]:
    """The `evaluation` of a configuration, as a loader takes it."""
    return config.evaluation if isinstance(config.evaluation, bool) else dict(config.evaluation)


def make_task(config: Config) -> Task:
    """The task that a configuration names."""
    return task_from(config.task, config.folder)


def make_checkpoints(config: Config, *, read_only: bool = False) -> Checkpoints | None:
    """The folder of checkpoints that a configuration names."""
    if config.checkpoint is None:
        return None
    section = dict(config.checkpoint)
    options = options_for(config, section["path"])
    return Checkpoints(**{**section, "storage_options": options, "storage": config.storage}, read_only=read_only)


def options_for(config: Config, path: str) -> dict[str, Any] | None:
    """The options for a folder of checkpoints: its own, or those of `path` if of the same kind."""
    own = config.checkpoint.storage_options if config.checkpoint is not None else None
    return config.storage_options if own is None and same_kind(config.path, path) else own


def _mixture(config: Config) -> Mixture:
    root = Location(config.path, config.storage_options, config.storage)
    sources = config.sources or {}
    readers = {
        name: _reader(path, name, root, config, sources.get(name))
        for name, path in _source_paths(root, config.sources).items()
    }

    def own_weights(temperature: float | None) -> dict[str, float]:
        numbers = {name: source.weight for name, source in sources.items() if source.weight != "natural"}
        return {**_natural_weights(readers, temperature, readers.keys() - numbers.keys()), **numbers}

    def phase(section: PhaseConfig) -> Phase:
        weights, temperature = section.weights, section.temperature or config.temperature
        if weights is None:
            weights = own_weights(temperature)
        elif weights == "natural":
            weights = _natural_weights(readers, temperature, readers.keys())
        return Phase(until_tokens=section.until_tokens, weights=weights)

    return Mixture(
        readers,
        own_weights(config.temperature),
        phases=[phase(section) for section in config.phases],
        find=partial(_find_removed, root, config),
    )


def _reader(path: Location, name: str, root: Location, config: Config, source: SourceConfig | None = None) -> Stage:
    documents, source = config.documents, source or SourceConfig()
    return with_stages(_documents(path, name, root, documents, source), documents.stages, config.folder)


def _documents(
    path: Location, name: str, root: Location, documents: DocumentsConfig, source: SourceConfig
) -> ShardReader | Tokenize:
    folder = path.inside(root)
    reader = ShardReader(
        path, name=name, files=source.files, column=documents.column, max_epochs=source.max_epochs, folder=folder
    )
    if not reader.holds_text():
        return reader.without_short(documents.strip, documents.min_length)
    if documents.tokenizer is None:
        raise ConfigError(
            f"source {name!r} holds text; say how to tokenize it, such as `documents: {{tokenizer: tokenizer.json}}`, "
            "or make shards of tokens of it with `fmsdata prepare`"
        )
    return Tokenize(reader, documents.tokenizer, strip=documents.strip, min_length=documents.min_length)


def _find_removed(root: Location, config: Config, name: str, description: Mapping[str, Any]) -> Stage:
    """A source that was removed from the configuration, in the folder that it had before."""
    reader = lowest(description)
    files = reader.get("files")
    source = SourceConfig(files=None if files is None else tuple(files))
    return _reader(root / reader["folder"], name, root, config, source)


def _natural_weights(
    readers: Mapping[str, Stage], temperature: float | None, needed: Collection[str]
) -> dict[str, float]:
    """The sources' numbers of tokens as weights. The larger the temperature, the flatter."""
    counted = {name: is_counted(reader) for name, reader in readers.items()}
    for name in sorted(needed):
        if not counted[name] and len(readers) > 1:
            raise ConfigError(
                f"source {name!r} holds text, so its number of tokens, its natural weight, is not known; give every "
                "source a `weight`, or count the tokens once: `fmsdata index CORPUS --tokenizer TOKENIZER`"
            )
    known = [name for name in readers if counted[name] or len(readers) == 1]
    tokens = {name: float(max(1, readers[name].size().tokens)) for name in known}
    if temperature is None or not tokens:
        return tokens
    most = max(tokens.values())
    return {name: max((size / most) ** (1 / temperature), sys.float_info.min) for name, size in tokens.items()}


def _source_paths(root: Location, sources: Mapping[str, SourceConfig] | None) -> dict[str, Location]:
    """The folders of the sources. Remote folders are listed here, all at once."""
    root = root.listed()
    if (root.local is not None or sources is None) and not root.is_dir():
        raise DataError(f"{root}: {root.why_no_folder()}; check `path`")
    if sources is None:
        return _folders_with_shards(root)
    for name, source in sources.items():
        if source.path is not None and has_patterns([source.path]) and not (root / source.path).exists():
            raise ConfigError(
                f"sources.{name}.path: {source.path!r} is a pattern; name the folder, and use `files` for it"
            )
    paths = {name: root / (source.path or name) for name, source in sources.items()}
    planned = {name for name, path in paths.items() if sources[name].files is None and find_unmoved(path, root)}
    root = root.listed(*(source.path or name for name, source in sources.items() if name not in planned))
    for name, path in paths.items():
        if name in planned or path.exists():
            continue
        if not root.is_dir():
            raise DataError(f"{root}: {root.why_no_folder()}; check `path`")
        if path.parent.is_dir():
            existing = [folder for folder in path.parent.folders() if folder != "meta"]
            raise DataError(f"source {name!r}: there is no folder {path}; {suggestion(path.name, existing)}")
    return paths


def _folders_with_shards(root: Location) -> dict[str, Location]:
    """The folders that hold shards: Arrow shards, if there are any."""
    planned = find_unmoved(root := root.listed("meta"), root)
    if planned is not None:
        names, others = planned.rows.examples, planned.others
    elif root.local is not None:
        shards = find_shards(root)
        names, others = shards.names, shards.others
    else:
        level = root.level()
        folders = [name for name in level.folders if not name.startswith(".")]
        root = root.listed(*folders)
        names = [file.name for file in level.files if file.name.endswith(SUFFIXES) and not is_leftover(file.name)]
        for folder in folders:
            names += [f"{folder}/{name}" for name in all_shards(root / folder).names if folder != "meta"]
        names, others = arrow_first(names)
    found = sorted({shard.partition("/")[0] for shard in names if "/" in shard})
    if VALIDATION in found:  # what `fmsdata prepare` held out is no source, unless it is named
        found = [name for name in found if name not in held_out(root)]
    kinds = {format_of(shard).kind for shard in names if "/" in shard}
    loose = [shard for shard in names if "/" not in shard and format_of(shard).kind in kinds]
    if found and loose:
        raise DataError(f"{root}: {loose[0]} is in no source; move it into a folder, or name the `sources`")
    if not found:
        raise DataError(
            f"{root}: no sub-folder holds shards ({', '.join(SUFFIXES)}); check `path`, or name the `sources`"
        )
    if ignored := sorted({name.partition("/")[0] for name in others if "/" in name} - set(found)):
        log.warning("%s: not read, as they hold no Arrow shards: %s; name the `sources`", root, ", ".join(ignored))
    return {name: root / name for name in found}
