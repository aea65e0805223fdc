"""Batches on a device: packed into one buffer, copied once, and never overwritten.

There is no accelerator here. What does not need one runs as it is, with main memory in the place of
the device; for the calls of streams and events, torch's functions are stood in for.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.core.options import OUTPUT_NAMES
from fmsdata.loader import device as device_module
from fmsdata.loader.device import DeviceCopy, StagingBuffers, checked_device, pack, packed_size, unpack
from tests.helpers import maker

CPU = torch.device("cpu")
DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.complex128]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    slack=st.integers(0, 300),
)
def test_tensors_of_any_type_and_shape_come_out_of_a_buffer_as_they_went_in(
    shapes: list[tuple[torch.dtype, list[int], bool]], slack: int
) -> None:
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = []
    for dtype, shape, turned in shapes:
        tensor = torch.randint(0, 2**7, shape, generator=generator).to(dtype)
        tensors.append(tensor.T if turned and tensor.ndim == 2 else tensor)
    buffer = torch.full((packed_size(tensors) + slack,), 255, dtype=torch.uint8)
    pack(tensors, buffer)
    views = unpack(buffer, tensors)
    assert all(map(same, views, tensors))
    used = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views if view.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(used)), "they share no byte"


class Copied:
    """The end of a copy that the test decides."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended


def test_a_staging_buffer_is_filled_again_only_when_the_copy_from_it_has_ended() -> None:
    staging, copies = StagingBuffers(pinned=False), [Copied() for _ in range(3)]
    buffers = []
    for copied in copies:
        buffers.append(staging.take(1000))
        staging.give_back(buffers[-1], copied)
    assert len({buffer.data_ptr() for buffer in buffers}) == 3, "none has ended"
    copies[1].ended = True
    assert staging.take(1024) is buffers[1]
    assert len({staging.take(900).data_ptr(), buffers[0].data_ptr(), buffers[2].data_ptr()}) == 3
    copies[0].ended = copies[2].ended = True
    larger = staging.take(5000)
    assert len(larger) >= 5000
    assert staging.take(1) is buffers[2], "the first that was free was too small for that and is gone"


def fields_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (3, 40 + seed), generator=generator)
    return {
        "input_ids": ids,
        "again": ids,
        "pair": (ids + 1, [ids.to(torch.int32), "text"]),
        "nested": {"mask": ids > 4, "none": None},
        "sparse": torch.eye(3).to_sparse(),
        "max_seqlen": 40,
        "provenance": [[("web", "a.arrow", 1, 0, 3)]],
        "empty": torch.empty(0),
    }


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from flat(inner)
    else:
        yield value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value


def test_all_tensors_of_a_batch_arrive_in_one_piece_of_memory_and_the_rest_stays_as_it_is() -> None:
    copy = DeviceCopy(CPU)
    held = []
    for seed in range(8):
        fields = fields_of(seed)
        moved = copy(fields)
        moved.wait()
        assert list(moved.fields) == list(fields)
        assert all(map(same, flat(moved.fields), flat(fields)))
        assert moved.fields["provenance"] == fields["provenance"]
        assert moved.fields["again"] is moved.fields["input_ids"], "what was one tensor is one tensor"
        storage = moved.fields["input_ids"].untyped_storage().data_ptr()
        assert moved.fields["pair"][0].untyped_storage().data_ptr() == storage
        assert moved.fields["nested"]["mask"].untyped_storage().data_ptr() == storage
        held.append((moved.fields, fields))
    for moved_fields, fields in held:
        assert all(map(same, flat(moved_fields), flat(fields))), "nothing that the trainer holds is overwritten"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_hands_out_the_same_batches_on_a_device(corpus: Path, workers: int, prefetch: int) -> None:
    options: dict[str, Any] = {"loader__outputs": list(OUTPUT_NAMES), "loader__batch_size": 4, "lanes": 4}
    expected = list(islice(maker(corpus, **options)(0, 1), 20))
    for device in (None, "cpu"):
        loader = maker(corpus, **options, loader__device="cpu", loader__num_workers=workers, loader__prefetch=prefetch)(
            0, 1
        )
        if device is None:  # through the staging buffers, which main memory does not need
            loader._finish = replace(loader._finish, copy=DeviceCopy(CPU))
        got = list(islice(loader, 20))
        for mine, other in zip(got, expected, strict=True):
            assert list(mine) == list(other)
            assert all(same(mine[name], other[name]) for name in mine)
        loader.close()


class Stream:
    """A stream that notes what happens on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"off {self.name}")

    def record_event(self) -> Any:
        self.log.append(f"end noted on {self.name}")
        return SimpleNamespace(query=lambda: False, of=self.name)

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.of}")


def test_the_trainers_stream_waits_for_the_copy_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    side, trainer = Stream("side", log), Stream("trainer", log)

    def staging(*, pinned: bool) -> StagingBuffers:
        log.append(f"pinned {pinned}")
        return StagingBuffers(pinned=False)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        log.append(f"{tensor.nbytes} bytes kept for {stream.name}")

    monkeypatch.setattr(device_module, "_stream", lambda _: side)
    monkeypatch.setattr(device_module, "StagingBuffers", staging)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: trainer)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    moved = DeviceCopy(CPU)({"input_ids": torch.arange(9), "labels": torch.arange(9)})
    assert log == ["pinned True", "on side", "off side", "end noted on side"]
    moved.wait()
    assert log[4:] == ["trainer waits for side", "512 bytes kept for trainer"]


def test_a_device_without_a_number_is_the_current_one_of_the_trainers_thread(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads have a current device each: in the thread that reads ahead it is always the first."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(device_module, "_stream", lambda _: None)
    loader = maker(corpus, loader__device="cuda")(0, 1)
    copy = loader._finish.opened().copy
    assert copy is not None
    assert copy._device == torch.device("cuda", 2)
    assert loader._finish.copy is None, "it is found when the first batch is requested"
    for name, device in (("cuda:3", torch.device("cuda", 3)), ("cpu", CPU)):
        assert checked_device(name) == device
    with pytest.raises(fmsdata.ConfigError, match=r"device is 'cuda:4', but there is only cuda:0 to cuda:3 here"):
        checked_device("cuda:4")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", r"device is 'gpu'; it must be the name of a device, such as 'cpu'"),
        ("cuda:x", r"device is 'cuda:x'; it must be the name of a device"),
        (1.5, r"device is 1.5; it must be the name of a device"),
        ("cuda", r"device is 'cuda', but torch has only 'cpu' here: leave it out"),
        ("meta", r"device is 'meta', but torch has only 'cpu' here"),
        ("cpu:3", r"device is 'cpu:3', but there is only cpu:0"),
        (torch.device("mps"), r"device is device\(type='mps'\), but torch has only 'cpu' here"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_device_that_is_not_there_is_an_error_that_says_so(corpus: Path, device: Any, message: str) -> None:
    data = maker(corpus)(0, 1).data
    with pytest.raises(fmsdata.ConfigError, match=message):
        fmsdata.StatefulDataLoader(data, batch_size=1, device=device, rank=0, world_size=1)
