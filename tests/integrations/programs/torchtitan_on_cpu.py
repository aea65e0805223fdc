"""torchtitan on a machine without an accelerator, which its Trainer expects: the CPU takes the place of one.

Import this first. It answers the questions about the device. Kernels for accelerators, which nothing here
calls, are written in a language that the CPU build of torch lacks, so while torchtitan is imported there is
a stand-in for it. Nothing else is changed.
"""

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

cpu: Any = torch.cpu
cpu.get_device_name = lambda *_: "cpu"
cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
cpu.memory_stats = lambda *_: {}
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
cpu.device_count = lambda: 1
private: Any = torch._utils
private._get_available_device_type = lambda: "cpu"

sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
for name in ("torchtitan.trainer", "torchtitan.models.llama3"):
    import_module(name)


def dense_attention(query: Any, key: Any, value: Any, *, block_mask: Any, scale: Any, enable_gqa: Any, **_: Any) -> Any:
    """What the compiled flex_attention returns, whose backward pass needs an accelerator."""
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    mask = create_mask(block_mask.mask_mod, *shape, device="cpu")
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa), AuxOutput()


attention: Any = import_module("torchtitan.models.common.attention")
attention._compiled_create_block_mask = create_block_mask
attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
utilities: Any = import_module("torchtitan.distributed.utils")
utilities.set_pg_timeouts = lambda **_: None  # gloo has no barrier for devices


def sum_gradients(model: Any) -> None:
    """What torchtitan does, with a reduction that gloo has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


fsdp: Any = import_module("torchtitan.distributed.fsdp")
fsdp.disable_fsdp_gradient_division = sum_gradients
