"""Which orders a sampler deals out: rows, rows of a mixture, or lines that rows are packed into."""

from typing import Any, NamedTuple

from fmsdata.core.checks import whole
from fmsdata.epochs.fine_tuning import FineTuningRows
from fmsdata.epochs.line_order import LineOrders
from fmsdata.epochs.lines import Packing
from fmsdata.epochs.mixed_order import MixedOrders
from fmsdata.epochs.mixture import RowMixture
from fmsdata.epochs.order import OrderRecipe, RowOrders
from fmsdata.errors import ConfigError


class Orders(NamedTuple):
    """The orders of a dataset."""

    recipe: OrderRecipe
    mixture: RowMixture | None  # that the rows come from
    packing: Packing | None  # of rows that are packed into lines


def orders_of(rows: Any, seed: int, shuffle: bool, max_tokens: int | None) -> Orders:
    """The orders of these rows."""
    packed = isinstance(rows, FineTuningRows)
    mixture = rows.mixture if packed else rows if isinstance(rows, RowMixture) else None
    if mixture is None:
        recipe: OrderRecipe = RowOrders(len(rows), seed, shuffle)
    elif any(isinstance(source, FineTuningRows) for source in mixture.sources.values()):
        raise ConfigError("the sources of the mixture are FineTuningRows; mix first: FineTuningRows(RowMixture(...))")
    else:
        recipe = MixedOrders(mixture, seed, shuffle)
    if not packed:
        return Orders(recipe, mixture, None)
    packing = Packing(rows.mode, rows.seq_len, max_tokens)
    once = mixture is None or not mixture.has_fixed_size
    return Orders(LineOrders(recipe, rows, packing, each_row_once=once), mixture, packing)


def checked_tokens(max_tokens: Any, rows: Any) -> int:
    """The tokens of a batch, which must hold any row."""
    if not isinstance(rows, FineTuningRows):
        raise ConfigError(
            f"max_tokens is for FineTuningRows, and the rows are a {type(rows).__name__}; use global_batch"
        )
    tokens = whole("max_tokens", max_tokens)
    if tokens < rows.seq_len:
        raise ConfigError(
            f"max_tokens is {max_tokens}, but a row may have {rows.seq_len} tokens (seq_len); use at least that, or a "
            "smaller seq_len"
        )
    return tokens


def checked_batch(global_batch: int, world_size: int) -> int:
    """The size of a global batch, which all ranks must have equal parts of."""
    if global_batch % world_size:
        why = "some ranks would have no rows" if global_batch < world_size else "it does not divide"
        least = -(-global_batch // world_size) * world_size
        raise ConfigError(
            f"global_batch is {global_batch} and world size {world_size}: {why}; use a multiple of the world size, "
            f"such as {least}"
        )
    return global_batch
