"""Lists of tokens that pyarrow decoded, as one array."""

from typing import Any

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError


def holds_lists(kind: Any) -> bool:
    """Whether a column of this type holds lists of integers."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests) and bool(pa.types.is_integer(kind.value_type))


def flatten_lists(column: Any, name: str) -> tuple[Tokens, Ints]:
    """The tokens of all rows, and where rows end. A null row is empty; a null token is an error.

    >>> tokens, ends = flatten_lists(pa.chunked_array([[[5, 6], None, [7]]]), "a.parquet")
    >>> tokens.tolist(), ends.tolist()
    ([5, 6, 7], [0, 2, 2, 3])
    """
    fixed = pa.types.is_fixed_size_list(column.type)
    chunks = [chunk.fill_null([]) if chunk.null_count and not fixed else chunk for chunk in column.chunks]
    length = [chunk.value_lengths().fill_null(0).to_numpy().astype(np.int64) for chunk in chunks]
    values = [chunk.flatten() for chunk in chunks]
    if any(each.null_count for each in values):
        raise DataError(f"{name}: the token column holds nulls; every token must be a number")
    dtype = np.dtype(str(column.type.value_type))
    tokens = [each.to_numpy(zero_copy_only=True) for each in values] or [np.empty(0, dtype)]
    lengths = np.concatenate(length) if length else np.empty(0, np.int64)
    return tokens[0] if len(tokens) == 1 else np.concatenate(tokens), offsets(lengths)
