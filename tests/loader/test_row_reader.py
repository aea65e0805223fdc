"""Rows are joined like torch's `default_collate` does, whatever they are."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from fmsdata.loader.row_reader import joined

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]


def field(shape: tuple[int, ...], dtype: torch.dtype, value: int) -> torch.Tensor:
    return torch.full(shape, value).to(dtype)


@given(st.data())
def test_fields_of_any_shape_and_kind_are_joined_as_by_torch(data: st.DataObject) -> None:
    kinds = st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(DTYPES))
    fields = data.draw(st.dictionaries(st.sampled_from("abc"), kinds, min_size=1))
    numbers = st.integers(-(2**40), 2**40)
    rows = [
        {name: field(shape, dtype, data.draw(numbers)) for name, (shape, dtype) in fields.items()}
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    found, expected = joined(rows), default_collate(rows)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride())


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor(True),
        torch.tensor(7, dtype=torch.int32),
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.float64),
        torch.tensor(0.5, requires_grad=True),
        torch.tensor(1j),
        torch.tensor([7]),
        torch.tensor([]),
        torch.tensor(7, device="meta"),
        torch.tensor(2**63 + 1, dtype=torch.uint64),
        7,
        None,
    ],
)
def test_integers_among_other_values_are_joined_as_by_torch(other: Any) -> None:
    def outcome(join: Any) -> Any:
        try:
            value = join([{"x": torch.tensor(3)}, {"x": other}])["x"]
        except (TypeError, RuntimeError) as error:
            return type(error), str(error)
        return value.dtype, value.requires_grad, value.device, value.tolist() if value.device.type == "cpu" else None

    assert outcome(joined) == outcome(default_collate)


def test_a_batch_of_integers_has_a_memory_of_its_own() -> None:
    numbers = torch.arange(4)
    found = joined([{"x": number} for number in numbers])["x"]
    found += 1
    assert numbers.tolist() == [0, 1, 2, 3]
    assert found.tolist() == [1, 2, 3, 4]
