"""Memory of batches is used again, but never while anything refers to it."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmsdata.tasks.batch import widen
from fmsdata.tasks.buffers import KEPT
from tests.helpers import documents, maker, write_source

TOKENS = np.arange(12, dtype=np.uint16).reshape(3, 4)


def content(held: Any) -> Any:
    return held.tolist() if hasattr(held, "tolist") else bytes(held)


def test_memory_is_used_again_when_a_tensor_is_gone() -> None:
    first = widen(TOKENS)
    place = first.data_ptr()
    del first
    assert widen(TOKENS + 1).data_ptr() == place


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1],
        lambda tensor: tensor.view(-1)[3:],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.unbind()[2],
        lambda tensor: tensor.detach(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: tensor.untyped_storage(),
    ],
)
def test_what_is_held_is_not_overwritten(keep: Any) -> None:
    """Also a view, an array or the storage of a tensor that is gone itself."""
    held = keep(widen(TOKENS))
    before = content(held)
    for value in range(3 * KEPT):
        widen(np.full((3, 4), value + 100, np.uint16))
    assert content(held) == before


def test_more_tensors_than_are_kept_are_all_different() -> None:
    held = [widen(np.full((3, 4), value, np.uint16)) for value in range(3 * KEPT)]
    assert [int(tensor[0, 0]) for tensor in held] == list(range(3 * KEPT))
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


def test_threads_do_not_share_memory() -> None:
    places: list[int] = []

    def work() -> None:
        tensors = [widen(TOKENS) for _ in range(50)]
        places.extend(tensor.data_ptr() for tensor in tensors)
        barrier.wait()

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(places)) == 150


@pytest.mark.parametrize("options", [{"loader__prefetch": 0}, {}, {"loader__num_workers": 1}], ids=str)
def test_a_trainer_may_hold_batches_as_long_as_it_likes(tmp_path: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    for name in ("web", "wiki"):
        write_source(tmp_path / name, documents(rng, 300, shortest=3))

    def batches(count: int) -> list[dict[str, torch.Tensor]]:
        loader = maker(tmp_path, **options)(0, 1)
        held = [next(loader) for _ in range(count)]
        loader.close()
        return held

    held = batches(100)
    copies = [{name: held[i][name].clone() for name in ("input_ids", "labels")} for i in range(100)]
    loader = maker(tmp_path, **options)(0, 1)
    for i in range(100):
        batch = next(loader)
        assert torch.equal(batch["input_ids"], copies[i]["input_ids"])
        batch["input_ids"].zero_()  # a trainer may write to its batch
    loader.close()
    assert all(torch.equal(held[i][name], copies[i][name]) for i in range(100) for name in copies[i])
