"""Fields: the batch that a loader hands out, a dict that a person can read."""

from collections import OrderedDict
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fmsdata.core.outline import Outline, outline_of
from fmsdata.core.wording import counted, shown

VALUES = 6  # of a tensor, in its line


class Fields(dict[Any, Any]):
    """A batch: tensors and lists by name. It is a dict, and its `repr` has a line for each of them.

    `fmsdata.show` prints the rows. torch's pytree, `default_collate` and the trainers make another one of it, as they
    do with a dict. It is saved and sent as an OrderedDict, so that reading it takes torch alone.

    >>> next(loader)     # doctest: +SKIP
    batch of 8 rows
    ├── input_ids: int64 (8, 4096) 5, 17, 3, 290, 8, 44 ...
    └── labels: int64 (8, 4096) 17, 3, 290, 8, 44, 61 ...
    """

    def outline(self) -> Outline:
        """The fields, in lines for people."""
        rows = [len(value) for value in self.values() if isinstance(value, torch.Tensor) and value.ndim]
        below = tuple(_line(str(name), value) for name, value in self.items())
        return Outline(f"batch of {counted(rows[0], 'row')}" if rows else "batch", below=below)

    def __repr__(self) -> str:
        return outline_of(self).text()

    def _repr_html_(self) -> str:
        return outline_of(self).html()

    def __copy__(self) -> "Fields":
        return Fields(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def _line(name: str, value: Any) -> Outline:
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return Outline(f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}", _begin(value), name)
    if isinstance(value, list):
        return Outline(f"list of {len(value):,}", shown(value[0]) if len(value) == 1 else "", name)
    return Outline(type(value).__name__, shown(value), name)


def _begin(tensor: torch.Tensor) -> str:
    try:
        numbers = tensor.flatten()[:VALUES].tolist()
    except (RuntimeError, NotImplementedError):  # it has no values, or none that can be read in order
        return ""
    return ", ".join(map(str, numbers)) + " ..." * (tensor.numel() > VALUES)


def _names(fields: Fields) -> tuple[Any, ...]:
    return tuple(fields)


# Functions over trees of tensors, such as torch's own for FSDP2 and torch.func, find those of a batch.
pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), _names(fields)),
    lambda values, names: Fields(zip(names, values, strict=True)),
    serialized_type_name="fmsdata.Fields",
    flatten_with_keys_fn=lambda fields: (
        [(pytree.MappingKey(name), value) for name, value in fields.items()],
        _names(fields),
    ),
)
