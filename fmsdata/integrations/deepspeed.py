"""DeepSpeed: checkpoints of an engine that hold the position of a loader.

An engine keeps the `client_state` of one process. The state of all processes, gathered, is the same on
each of them. It is kept as JSON text.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from fmsdata.core.wording import counted
from fmsdata.errors import CheckpointError, ConfigError
from fmsdata.loader.loader import StatefulDataLoader

KEY = "fmsdata"


def save_checkpoint(
    engine: Any,
    folder: str | os.PathLike[str],
    loader: StatefulDataLoader,
    *,
    client_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """`engine.save_checkpoint(folder, ...)`, with the position of a loader. Call it on all processes.

    >>> save_checkpoint(engine, "checkpoints", loader)     # doctest: +SKIP
    """
    _check_batch_size(engine, loader)
    accumulated = engine.micro_steps % engine.gradient_accumulation_steps()
    if accumulated:
        raise ConfigError(
            f"the checkpoint is saved {counted(accumulated, 'batch')} into a gradient accumulation of "
            f"{engine.gradient_accumulation_steps()}: their gradients are not saved, and the batches would be lost on "
            "resume. Save where engine.micro_steps is a multiple of it"
        )
    if KEY in (client_state or {}):
        raise ConfigError(f"client_state has a key {KEY!r}, which the state of the loader is saved as: rename it")
    state = {**(client_state or {}), KEY: json.dumps(loader.state_dict(gather=True))}
    engine.save_checkpoint(os.fspath(folder), client_state=state, **options)


def load_checkpoint(
    engine: Any, folder: str | os.PathLike[str], loader: StatefulDataLoader, **options: Any
) -> tuple[str | None, dict[str, Any]]:
    """`engine.load_checkpoint(folder, ...)`, and move the loader to the position that was saved.

    Returns the path, which is None if there is no checkpoint, and the client state without that of the loader.

    >>> path, mine = load_checkpoint(engine, "checkpoints", loader)     # doctest: +SKIP
    """
    _check_batch_size(engine, loader)
    path, client_state = engine.load_checkpoint(os.fspath(folder), **options)
    if path is None:
        return None, {}
    if KEY not in client_state:
        raise CheckpointError(
            f"{path} does not hold the position in the stream: it was saved by engine.save_checkpoint. "
            "Start a new run with its weights, and save with\n"
            "    fmsdata.integrations.deepspeed.save_checkpoint(engine, folder, loader)"
        )
    loader.load_state_dict(json.loads(client_state[KEY]))
    return path, {name: value for name, value in client_state.items() if name != KEY}


def _check_batch_size(engine: Any, loader: StatefulDataLoader) -> None:
    """The engine scales and logs by its own batch size."""
    size = engine.train_micro_batch_size_per_gpu()
    if size != loader.batch_size:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {size}, and the batch size of the loader is {loader.batch_size}. "
            "Write\n"
            f'    config["train_micro_batch_size_per_gpu"] = {loader.batch_size}     # and no train_batch_size'
        )
