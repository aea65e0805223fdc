"""Sets of rows that are taken out, and their compact text in a state.

A few ids are a JSON list. Many are a compressed bitmap: a million of ten million rows are some
800 KB. The text is made once, however many states it is in.
"""

import base64
import json
import zlib
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch

from fmsdata.core.keys import Ints
from fmsdata.core.state import EDITED, is_count
from fmsdata.core.wording import counted, shown
from fmsdata.errors import ConfigError, StateError

FEW = 64  # ids that are written as a list


class Exclusions:
    """An immutable set of rows.

    >>> some = Exclusions.none().with_ids(np.array([17, 3]))
    >>> some.text, len(some.without_ids(np.array([3])))
    ('[3, 17]', 1)
    """

    def __init__(self, ids: Ints) -> None:
        self.ids = ids  # sorted, each once

    @classmethod
    def none(cls) -> "Exclusions":
        return cls(np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    def with_ids(self, ids: Ints) -> "Exclusions":
        return Exclusions(_each_once(np.concatenate([self.ids, ids])))

    def without_ids(self, ids: Ints) -> "Exclusions":
        if not len(ids):
            return self
        ids = _each_once(ids)
        at = np.minimum(np.searchsorted(ids, self.ids), len(ids) - 1)
        return Exclusions(self.ids[ids[at] != self.ids])

    @cached_property
    def text(self) -> str:
        """The set as a text for a state."""
        if len(self.ids) <= FEW:
            return json.dumps(self.ids.tolist())
        bits = np.zeros(int(self.ids[-1]) + 1, np.bool_)
        bits[self.ids] = True
        return base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 1)).decode()

    @classmethod
    def parse(cls, text: Any, rows: int) -> "Exclusions":
        """The set of a text that comes from a state of a dataset with this many rows."""
        try:
            if text.startswith("["):
                listed = json.loads(text)
                if not all(map(is_count, listed)):
                    raise ValueError("ids are whole numbers")
                ids = np.array(listed, np.int64)
            else:
                unpack = zlib.decompressobj()
                data = unpack.decompress(base64.b64decode(text, validate=True), rows // 8 + 1)
                if not unpack.eof:
                    raise ValueError("it is longer than the rows")
                ids = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8)))
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as error:
            raise StateError(f"the excluded rows are {shown(text)} ({error}): {EDITED}") from None
        if len(ids) and (ids[0] < 0 or ids[-1] >= rows or (np.diff(ids) <= 0).any()):
            raise StateError(f"the excluded rows are {shown(text)}, expected different ids below {rows}: {EDITED}")
        return cls(ids)


def checked_ids(ids: Any, rows: int) -> Ints:
    """The ids of rows that a user gave, or an error that names the wrong one."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ConfigError(f"ids is {shown(ids)}; it must be the ids of some rows, as in exclude([3, 17])")
    try:
        listed = ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids
        given = np.asarray(listed if hasattr(listed, "__array__") else _listed(listed, rows)).reshape(-1)
    except ValueError:  # lists of different lengths
        given = np.array([None])
    if given.size and given.dtype.kind not in "iu":
        raise ConfigError(f"ids are {shown(ids)}; the id of a row is a whole number, its `index`")
    wrong = given[(given < 0) | (given >= rows)]
    if wrong.size:
        raise ConfigError(
            f"{wrong[0]} is not the id of a row: there are {counted(rows, 'row')}, with the ids 0 to {rows - 1}; "
            "use the `index` that is in the batch"
        )
    return _each_once(given.astype(np.int64))


def _listed(ids: Iterable[Any], rows: int) -> list[Any]:
    """The ids. One without a length may have no end, so it can name each row twice at most."""
    try:
        most = len(ids)  # type: ignore[arg-type]
    except TypeError:
        most = 2 * rows
    listed = list(islice(ids, most + 1))
    if len(listed) > most:
        raise ConfigError(
            f"ids is {shown(ids)}, which gave more than {counted(most, 'id')} for {counted(rows, 'row')}; give a list"
        )
    return listed


def _each_once(ids: Ints) -> Ints:
    """The ids sorted, without repetitions. `np.unique` takes ten times as long."""
    ids = np.sort(ids)
    return ids[np.append(True, ids[1:] != ids[:-1])] if len(ids) else ids
