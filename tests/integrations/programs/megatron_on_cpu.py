"""Megatron-core on a machine without an accelerator, which it expects: the CPU takes the place of one.

Import this first. Tensors for the accelerator are made on the CPU, and dropout, which the tests do without,
needs no random numbers of a device. Nothing else is changed.
"""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel as GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """Calls with device="cuda" are calls with device="cpu"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


mode: Any = OnCPU()
mode.__enter__()
cuda: Any = torch.cuda
cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda *_: nullcontext()
