"""Accelerate: `save_state` and `load_state` save and restore the position of a loader.

`accelerator.prepare` leaves a loader of fmsdata as it is, and `register_for_checkpointing` keeps what one
process returns, as a pickle. Hooks are called on all processes, so the state can be gathered there.
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, FmsdataWarning
from fmsdata.integrations.state_file import NAME, read_state, write_state
from fmsdata.loader.loader import StatefulDataLoader

try:
    import accelerate
except ImportError as error:
    needed = "fmsdata.integrations.accelerate needs Accelerate; install it with: pip install accelerate"
    raise ConfigError(needed) from error


_registered: WeakKeyDictionary[accelerate.Accelerator, dict[str, StatefulDataLoader]] = WeakKeyDictionary()


def register(accelerator: accelerate.Accelerator, loader: StatefulDataLoader, name: str = NAME) -> None:
    """Let the checkpoints of an accelerator hold the position of a loader, for any number of processes.

    Call it once, before `load_state`. `name` is the file in the folder of a checkpoint, for several loaders.

    >>> accelerator = accelerate.Accelerator()           # doctest: +SKIP
    >>> loader = fmsdata.build_loader("run.yaml")        # doctest: +SKIP
    >>> register(accelerator, loader)                    # doctest: +SKIP
    >>> accelerator.save_state("checkpoint")             # doctest: +SKIP
    """
    if not isinstance(loader, StatefulDataLoader):
        raise ConfigError(f"register takes a loader, as fmsdata.build_loader returns it, not {shown(loader)}")
    loaders = _registered.setdefault(accelerator, {})
    if loaders.get(name) is loader:
        return
    if name in loaders:
        raise ConfigError(
            f"another loader is registered as {name}, and one file can't hold the positions of both. Give this one a "
            'name of its own:\n    register(accelerator, loader, "second.json")'
        )
    if accelerator.step:
        warnings.warn(
            f"register is called after load_state, or during training: if a state with {name} was loaded, the loader "
            "did not get its position, and begins at the start of the stream. Call register before load_state",
            FmsdataWarning,
            stacklevel=2,
        )

    def save(_models: Any, _weights: Any, folder: str) -> None:
        if not accelerator.sync_gradients:
            raise ConfigError(
                "save_state was called between the batches of one gradient accumulation: their gradients are not "
                "saved, and the batches would be lost on resume. Save after a step of the optimizer:\n"
                "    if accelerator.sync_gradients:\n"
                "        accelerator.save_state(...)"
            )
        state = loader.state_dict(gather=True)
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            write_state(folder, state, name)

    def load(_models: Any, folder: str) -> None:
        loader.load_state_dict(read_state(folder, name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    loaders[name] = loader
    loader.keeper = "accelerate"
