"""Ray Train: checkpoints of a TorchTrainer that hold the position of a loader.

    loader = fmsdata.build_loader("run.yaml")         # in the function that each worker runs
    checkpoint = restore(loader)                      # that of ray.train.get_checkpoint()
    report({"loss": loss}, loader, folder)            # instead of ray.train.report

Build the loader in the function that each worker runs, where the ranks are known, and leave it out of
`prepare_data_loader`, which reads a batch ahead.
"""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from fmsdata.errors import ConfigError
from fmsdata.integrations.state_file import read_state, write_state
from fmsdata.loader.loader import StatefulDataLoader


def restore(loader: StatefulDataLoader) -> Any:
    """Move the loader to the position in the checkpoint that the run resumes from, and return that checkpoint.

    None if the run starts anew. Call it on all workers, before the first batch.

    >>> checkpoint = restore(loader)     # doctest: +SKIP
    """
    if loader.checkpoint is not None:
        raise ConfigError(
            f"the loader resumes from its own folder {loader.checkpoint}, and Ray Train restores it with the model: "
            "it would be at another step than the model. Remove the section `checkpoint`"
        )
    loader.keeper = "ray"
    checkpoint = _train().get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            loader.load_state_dict(read_state(folder))
    return checkpoint


def report(
    metrics: Mapping[str, Any], loader: StatefulDataLoader, folder: str | os.PathLike[str] | None = None, **options: Any
) -> None:
    """`ray.train.report`, with a checkpoint of what is in `folder` and the position of a loader.

    Call it on all workers, after the same step. `folder` is that of this worker, None if it has nothing to add.

    >>> with tempfile.TemporaryDirectory() as folder:                         # doctest: +SKIP
    ...     torch.save(model.state_dict(), f"{folder}/model.pt")
    ...     report({"loss": float(loss)}, loader, folder)
    """
    train = _train()
    state = loader.state_dict(gather=True)
    with tempfile.TemporaryDirectory() as temporary:
        if train.get_context().get_world_rank() == 0:
            folder = folder or temporary
            write_state(folder, state)
        checkpoint = None if folder is None else train.Checkpoint.from_directory(os.fspath(folder))
        train.report(dict(metrics), checkpoint=checkpoint, **options)


def _train() -> Any:
    try:
        import ray.train
    except ImportError as error:
        raise ConfigError(
            f"fmsdata.integrations.ray needs Ray Train ({error}); install it with: pip install 'ray[train]'"
        ) from error
    return ray.train
