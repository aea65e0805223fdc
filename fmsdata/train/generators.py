"""The global random generators of a process: Python's, numpy's, and torch's on each device.

They are saved as plain data, and restored all at once or not at all.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from fmsdata.core.keys import key_of
from fmsdata.core.state import DAMAGE
from fmsdata.errors import ConfigError, StateError


def _torch_generators() -> dict[str, torch.Generator]:
    """The generators of torch on this machine, by device."""
    generators = {"torch": torch.default_generator}
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators |= {f"cuda:{device}": generator for device, generator in enumerate(torch.cuda.default_generators)}
    return generators


def generator_states() -> dict[str, Any]:
    """The state of every global generator, as plain data and tensors."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    if numpy_state["bit_generator"] != "MT19937":
        raise ConfigError(
            f"generators.numpy is a {numpy_state['bit_generator']}; "
            "numpy's global generator can only be saved if it is a MT19937"
        )
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    generators = {"python": random.getstate(), "numpy": numpy_state}
    return generators | {name: generator.get_state() for name, generator in _torch_generators().items()}


def prepare_generators(saved: Mapping[str, Any], seed: int, step: int, rank: int) -> list[Callable[[], object]]:
    """Calls that set every generator of this process, to its saved state or else to a new seed.

    The states are first loaded into separate generators, so that a damaged state leaves the global
    ones unchanged.
    """

    def key(name: str) -> int:
        return key_of(seed, "train state", step, rank, name)

    try:
        python, numpy = random.Random(key("python")), np.random.RandomState(np.random.MT19937(key("numpy")))
        if saved:
            python.setstate(saved["python"])
            inner = saved["numpy"]["state"]
            words = np.array(inner["key"], np.uint32)
            numpy.set_state({**saved["numpy"], "state": {**inner, "key": words}})
        ready: list[Callable[[], object]] = [
            partial(random.setstate, python.getstate()),
            partial(np.random.set_state, numpy.get_state(legacy=False)),
        ]
        for name, generator in _torch_generators().items():
            separate = torch.Generator(generator.device).manual_seed(key(name))
            if name in saved:
                separate.set_state(saved[name])
            ready.append(partial(generator.set_state, separate.get_state()))
    except (*DAMAGE, RuntimeError) as cause:
        raise StateError(f"the generators of rank {rank} can't be restored: {cause!r}") from cause
    return ready
