"""Batches on a device: one pinned staging buffer and one asynchronous copy for all tensors of a batch.

The thread that reads ahead packs the tensors of a batch into one staging buffer, and starts the copy
on a stream of its own, so that the copy overlaps with training. The tensors of the batch are views
of memory on the device that is new for each batch. A staging buffer is filled again only when the
copy from it has ended.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError

ALIGNMENT = 256  # bytes, as device allocators align; tensors of any type can start there


class Copied(Protocol):
    """The end of a copy, such as a `torch.Event`."""

    def query(self) -> bool:
        """Whether the copy has ended."""


class MovedBatch(NamedTuple):
    """The fields of a batch on a device, and what to call in the thread that uses them."""

    fields: dict[str, Any]
    wait: Callable[[], None]


def checked_device(device: Any) -> torch.device | None:
    """The device, if tensors can be moved to it here."""
    if device is None:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    known = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device is {shown(device)}; it must be the name of a device, such as {known[-1]!r}"
        ) from None
    if found.type not in known:
        raise ConfigError(
            f"device is {shown(device)}, but torch has only {' and '.join(map(repr, known))} here: "
            "leave it out to get batches in main memory"
        )
    count = 1 if found.type == "cpu" else torch.accelerator.device_count()
    if (found.index or 0) >= count:
        raise ConfigError(
            f"device is {shown(device)}, but there is only {found.type}:0 to {found.type}:{count - 1} here"
        )
    return found


class StagingBuffers:
    """Buffers in main memory. One is taken again only when the copy from it has ended.

    So there are as many as there are copies under way at the same time.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: list[tuple[torch.Tensor, Copied]] = []

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least this many bytes that nothing reads any more."""
        free = next((i for i, (_, copied) in enumerate(self._buffers) if copied.query()), None)
        if free is not None:
            buffer, _ = self._buffers.pop(free)
            if len(buffer) >= size:
                return buffer
        # Batches differ a little in size, and pinned memory is slow to get.
        return torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def give_back(self, buffer: torch.Tensor, copied: Copied) -> None:
        """Return a buffer, to be used again when the copy from it has ended."""
        self._buffers.append((buffer, copied))


class DeviceCopy:
    """Moves the tensors of batches to a device.

    It is created in the trainer's thread, because a device without a number is the current one of
    that thread, and called in the thread that reads ahead.
    """

    def __init__(self, device: torch.device) -> None:
        index: int | None = device.index
        if index is None and device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device, self._stream = device, _stream(device)
        self._staging = StagingBuffers(pinned=self._stream is not None)

    def __call__(self, fields: dict[str, Any]) -> MovedBatch:
        tensors = list({id(tensor): tensor for tensor in _tensors(fields) if is_packable(tensor)}.values())
        if not tensors:
            return MovedBatch(replaced(fields, self._moved), lambda: None)
        stream, size = self._stream, packed_size(tensors)
        buffer = self._staging.take(size)
        pack(tensors, buffer)
        on_stream: AbstractContextManager[Any] = nullcontext() if stream is None else stream
        with on_stream:
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            flat.copy_(buffer[:size], non_blocking=stream is not None)
        copied = None if stream is None else stream.record_event()
        self._staging.give_back(buffer, copied or _Ended())
        views = {id(tensor): view for tensor, view in zip(tensors, unpack(flat, tensors), strict=True)}

        def view_or_copy(tensor: torch.Tensor) -> torch.Tensor:
            return views[id(tensor)] if id(tensor) in views else self._moved(tensor)

        def wait() -> None:
            if copied is not None:
                current = torch.accelerator.current_stream(self._device)
                current.wait_event(copied)
                flat.record_stream(current)  # other copies get its memory only when this stream is done with it

        return MovedBatch(replaced(fields, view_or_copy), wait)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is moved by itself: a sparse one, or one that a task made on a device."""
        return tensor.to(self._device)


class _Ended:
    """The end of a copy that was waited for."""

    def query(self) -> bool:
        return True


def _stream(device: torch.device) -> torch.Stream | None:
    """A new stream, or None if the device has none: then copies are waited for."""
    try:
        return None if device.type == "cpu" else torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None


def is_packable(tensor: Any) -> bool:
    """Whether a value is a plain tensor in main memory."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value: itself, or in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (dict, list, tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


def replaced(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with its tensors replaced. Everything else stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {name: replaced(inner, function) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(inner, function) for inner in value)
    return value


def packed_size(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes that the tensors take in one buffer."""
    return max(1, sum(map(_room, tensors)))


def pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the tensors into a buffer of bytes."""
    for tensor, view in zip(tensors, unpack(buffer, tensors), strict=True):
        view.copy_(tensor)


def unpack(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a buffer of bytes at the places where `pack` puts these tensors."""
    starts = accumulate(map(_room, tensors), initial=0)
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
