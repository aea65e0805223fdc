"""From the lines of a plan to a batch of fine-tuning rows: tokens, labels, and where each row is.

It runs in worker processes, or in the trainer without them. Tokens come from the file that all of
them map.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fmsdata.core.checks import flag
from fmsdata.core.chunk import Chunk
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.options import IGNORED
from fmsdata.core.spans import BEGINS, COLUMNS, DOCUMENT, LENGTH, POSITION, Buffer
from fmsdata.epochs.cursor import RowRequest
from fmsdata.epochs.fine_tuning import FineTuningRows, fill_labels
from fmsdata.epochs.lines import Lines, Packing
from fmsdata.epochs.mixture import DATASET_IDX
from fmsdata.epochs.token_table import TokenTable
from fmsdata.errors import ConfigError
from fmsdata.loader.row_reader import FIELDS
from fmsdata.tasks.batch import OUTPUTS, Batch, check_outputs

ALWAYS = ("document_ids", "position_ids")  # outputs that every batch has
ON_REQUEST = (*ALWAYS, "cu_seqlens", "max_seqlen")
FILLER = 2  # tokens of a batch that only fills up


@dataclass(frozen=True, kw_only=True)
class LineRecipe:
    """How batches of lines are made."""

    table: TokenTable
    packing: Packing
    pad: int
    shift: bool
    sources: Ints | None  # where the rows of each dataset of a mixture start
    outputs: tuple[str, ...]
    padding_segment: bool
    names: tuple[str, ...]  # of the fields about rows that batches get

    @classmethod
    def of(
        cls, rows: FineTuningRows, packing: Packing, *, outputs: Sequence[str], padding_segment: bool | None, names: Any
    ) -> "LineRecipe":
        check_outputs(outputs)
        for name in outputs:
            if name not in ON_REQUEST:
                raise ConfigError(
                    f"output {name!r} is for streams; batches of FineTuningRows can hold {', '.join(ON_REQUEST)}"
                )
        return cls(
            table=rows.table,
            packing=packing,
            pad=rows.pad,
            shift=rows.shift,
            sources=None if rows.mixture is None else rows.mixture.starts,
            outputs=tuple(dict.fromkeys([*ALWAYS, *outputs])),
            padding_segment=False if padding_segment is None else flag("padding_segment", padding_segment),
            names=names,
        )

    def open(self) -> "LineReader":
        return LineReader(self)


class LineReader:
    """Makes one batch after the other."""

    def __init__(self, recipe: LineRecipe) -> None:
        self._recipe = recipe

    def read(self, request: RowRequest) -> dict[str, Any]:
        """The batch."""
        recipe, lines = self._recipe, request.lines
        if lines is None:
            raise RuntimeError("a request for lines has none")
        columns = list(request.columns)
        if recipe.packing.stacked and len(lines.row):  # rows are lines of their own
            columns[1:] = [np.repeat(column, len(lines.row)) for column in columns[1:]]
            lines = replace(lines, first=np.arange(len(lines.row) + 1))
        sizes = lines.sums(lines.stop - lines.start)
        width = recipe.packing.seq_len if recipe.packing.max_tokens is None else max(FILLER, int(sizes.max()))
        tokens, labels = self._filled(lines, width)
        batch: dict[str, Any] = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        described = Batch(
            tokens,
            (width - sizes).tolist(),
            0,
            lambda: _chunk(lines, tokens, recipe.pad),
            padding_segment=recipe.padding_segment,
        )
        batch |= {name: OUTPUTS[name](described) for name in recipe.outputs}
        batch |= {
            name: torch.from_numpy(values.copy())
            for name, values in zip(FIELDS, columns, strict=True)
            if name in recipe.names
        }
        if FIELDS[0] in recipe.names:
            batch["rows_per_line"] = torch.from_numpy(np.diff(lines.first))
            if recipe.sources is not None:
                batch[DATASET_IDX] = torch.from_numpy(np.searchsorted(recipe.sources, lines.row, side="right") - 1)
        batch["global_tokens"] = torch.tensor(request.global_tokens, device="cpu")
        return batch

    def _filled(self, lines: Lines, width: int) -> tuple[Ints, Ints]:
        """The tokens of lines, padded, and their labels."""
        recipe, shape = self._recipe, (len(lines), width)
        tokens, labels = np.full(shape, recipe.pad, np.int64), np.full(shape, IGNORED, np.int64)
        ends = offsets(lines.stop - lines.start)
        line = np.repeat(np.arange(len(lines)), np.diff(lines.first))
        places = (line * width + ends[:-1] - ends[lines.first[:-1]][line]).tolist()
        flat, flat_labels = tokens.reshape(-1), labels.reshape(-1)
        for row, start, stop, place in zip(
            lines.row.tolist(), lines.start.tolist(), lines.stop.tolist(), places, strict=True
        ):
            whole = recipe.table.tokens(row)
            if recipe.packing.mode != "split":
                whole = whole[: recipe.packing.seq_len]
            own = slice(place, place + stop - start)
            flat[own] = whole[start:stop]
            fill_labels(flat_labels[own], whole, recipe.table.runs(row), shift=recipe.shift, start=start, stop=stop)
        return tokens, labels


def _chunk(lines: Lines, tokens: Ints, pad: int) -> Chunk:
    """The lines as a chunk, which says where rows begin."""
    spans = np.zeros((len(lines.row), COLUMNS), np.int64)
    spans[:, LENGTH], spans[:, DOCUMENT], spans[:, POSITION] = lines.stop - lines.start, lines.row, lines.start
    spans[:, BEGINS] = 1
    return Chunk([Buffer(tokens.reshape(-1))], spans, lines.first).padded(tokens.shape[1], pad)
