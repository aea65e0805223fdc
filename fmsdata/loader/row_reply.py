"""Batches of rows in shared memory: tensors as they are, and everything else pickled behind them."""

import io
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from fmsdata.loader.device import is_packable, pack, packed_size, unpack
from fmsdata.loader.reply import Reply, ReplySize
from fmsdata.loader.shared_memory import SharedMemory


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a batch without its tensors, which are collected. Knows classes of scripts and notebooks."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if is_packable(value) and not value.requires_grad:
            self.tensors.append(value)
            return _tensor, (len(self.tensors) - 1,)
        return super().reducer_override(value)


_LOADING = threading.local()  # the tensors of the batch that a thread loads


def _tensor(number: int) -> torch.Tensor:
    found: torch.Tensor = _LOADING.tensors[number]
    return found


def write_batch(memory: SharedMemory, batch: Any) -> ReplySize:
    """Write a batch, and return the message that announces it."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(batch)
    tensors = pickler.tensors
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    description = pickle.dumps((kinds, file.getvalue()), pickle.HIGHEST_PROTOCOL)
    size = packed_size(tensors)
    view = memory.reserve(size + len(description))
    pack(tensors, torch.frombuffer(view, dtype=torch.uint8, count=size))
    view[size:] = description
    return ReplySize(size, len(description))


def read_batch(memory: SharedMemory, size: ReplySize, pin: bool) -> Any:
    """The batch. Its tensors are copied: the memory is going to be reused."""
    data = memory.read(size.tokens + size.description)
    described = pickle.loads(data[size.tokens :])
    if isinstance(described, Reply):  # of a worker that failed
        return described
    kinds, rest = described
    flat = torch.empty(size.tokens, dtype=torch.uint8, device="cpu", pin_memory=pin)
    flat.numpy()[:] = np.frombuffer(data[: size.tokens], np.uint8)
    _LOADING.tensors = unpack(flat, _shapes(kinds))
    try:
        return pickle.loads(rest)
    finally:
        del _LOADING.tensors


def _shapes(kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in kinds]
