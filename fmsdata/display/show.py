"""show: the rows of a batch, document by document. `fmsdata preview` prints the same."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, groupby
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from fmsdata.core.pieces import Piece
from fmsdata.core.wording import counted, few, shown
from fmsdata.display.decoding import Decode, decoder, shortened, show_ids
from fmsdata.display.printing import write
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import IGNORED

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
PIECES = "pieces"  # the output that `show` prints
MOST_ORIGINS = 4  # in the title of a row


class ShownRow(NamedTuple):
    """One row of a batch."""

    name: str
    pieces: list[Piece]
    ignored: int  # labels
    changed: list[int] | None = None  # the row's `input_ids`, if the task changed the tokens
    sample: int | None = None


class ShownBatch(NamedTuple):
    """One batch."""

    name: str
    fields: dict[str, list[int]]  # the shape of each
    rows: list[ShownRow]


def show(batch: Mapping[str, Any], tokenizer: object = None, *, rows: int | None = None, full: bool = False) -> None:
    """Print a batch: the documents in each row, where they come from, and their tokens or text.

    Ask the loader for the output `pieces`, which holds the tokens of each row with their origin. Without
    it, rows are shown without origins. `tokenizer` is what `Tokenize` takes, or a tokenizer of
    transformers or tokenizers; without one, tokens are numbers. `full` shows long documents in full.

    >>> loader = fmsdata.build_loader("run.yaml", {"loader.outputs": ["pieces"]})     # doctest: +SKIP
    >>> fmsdata.show(next(loader), tokenizer="tokenizer.json", rows=2)                # doctest: +SKIP
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise ConfigError(f"show takes a batch of a loader, a dict with `input_ids` of rows, not {shown(batch)}")
    decode = show_ids if tokenizer is None else decoder(tokenizer)
    out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if PIECES in batch:
        print_batches([inspect_batch(batch, rows)], decode, full, out)
        return
    _print_without_pieces(batch, rows, decode, full, out)


def inspect_batch(
    batch: Mapping[str, Any], most: int | None = None, *, step: int | None = None, samples: Sequence[int] | None = None
) -> ShownBatch:
    """The first rows (`most`, or all) of a batch with the output `pieces`."""
    rows = []
    for row, pieces in enumerate(batch[PIECES][:most]):
        ids, labels = (_row(batch, name, row) for name in ("input_ids", "labels"))
        tokens = [token for piece in pieces for token in piece.tokens]
        sample = samples[row] if samples is not None and row < len(samples) else None
        filled = (samples is not None and sample is None) or _is_padding(batch, row)
        rows.append(
            ShownRow(
                name=f"row {row}" + (", padding" if filled else "" if sample is None else f", sample {sample}"),
                pieces=pieces,
                ignored=0 if labels is None else int((labels == IGNORED).sum()),
                changed=None if ids is None or ids.tolist() == tokens[: ids.numel()] else ids.flatten().tolist(),
                sample=sample,
            )
        )
    return ShownBatch("batch" if step is None else f"step {step}", _shapes(batch), rows)


def print_batches(batches: Iterable[ShownBatch], decode: Decode, full: bool, out: Console) -> None:
    """Print batches row by row. `full` shows long pieces without leaving tokens out."""
    for batch in batches:
        _print_title(batch.name, batch.fields, out)
        for row in batch.rows:
            tokens = sum(len(piece.tokens) for piece in row.pieces)
            documents = len({piece.origin[:3] for piece in row.pieces if piece.origin})
            ignored = f", {counted(row.ignored, 'label')} ignored ({IGNORED})" if row.ignored else ""
            out.print()
            write(out, f"{row.name}: {counted(tokens, 'token')}, {counted(documents, 'document')}{ignored}")
            _print_row(row, decode, full, out)
        out.print()


def _print_row(row: ShownRow, decode: Decode, full: bool, out: Console) -> None:
    """A line for each document, with the tokens that are inserted before or after it."""
    documents = dict.fromkeys(piece.origin[:3] for piece in row.pieces if piece.origin)
    colours = dict(zip(documents, cycle(COLOURS), strict=False))
    lines = [Text()]
    for piece in row.pieces:
        if piece.begins and lines[-1]:
            lines.append(Text())
        line, origin = lines[-1], piece.origin
        if line:
            line.append(" ")
        if origin is None:
            times = f" x {len(piece.tokens)}" if len(piece.tokens) > 1 else ""
            token = decode(piece.tokens[:1]).removeprefix("⟨").removesuffix("⟩")  # an id without text has them already
            line.append(f"⟨{token}{times}⟩", "dim")
        else:
            colour, document = colours[origin[:3]], f"{origin.source}/{origin.shard}#{origin.document}"
            line.append(f"{document}[{origin.start}:{origin.stop}]", f"bold {colour}")
            line.append(f" epoch {piece.epoch}: ", "dim")
            line.append(shortened(piece.tokens, decode, full), colour)
    for line in lines:
        write(out, line, guide="  ", indent="    ")
    if row.changed is not None:
        made = shortened(row.changed, decode, full)
        write(out, f"input_ids, as the task made them: {made}", guide="  ", indent="    ")


def _print_without_pieces(batch: Mapping[str, Any], most: int | None, decode: Decode, full: bool, out: Console) -> None:
    _print_title("batch", _shapes(batch), out)
    for row, ids in enumerate(batch["input_ids"][:most]):
        padding = ", padding" if _is_padding(batch, row) else ""
        origins = batch["provenance"][row] if "provenance" in batch else []
        names = [f"{span.source}/{span.shard}#{span.document}[{span.start}:{span.stop}]" for span in origins]
        out.print()
        source = f" of {few(names, MOST_ORIGINS)}" if names else ""
        write(out, f"row {row}{padding}: {counted(ids.numel(), 'token')}{source}")
        for tokens in _documents(batch, row, ids.tolist()):
            write(out, shortened(tokens, decode, full), guide="  ", indent="    ")
    out.print()
    write(out, "The output 'pieces' of the loader adds where each token comes from.", "dim")


def _documents(batch: Mapping[str, Any], row: int, ids: list[int]) -> Iterator[list[int]]:
    """The tokens of a row, document by document if the batch says where they begin."""
    numbers = batch["document_ids"][row].tolist() if "document_ids" in batch else [0] * len(ids)
    for _, group in groupby(zip(numbers, ids, strict=True), key=lambda pair: pair[0]):
        yield [token for _, token in group]


def _print_title(name: str, fields: Mapping[str, Sequence[int]], out: Console) -> None:
    write(out, f"{name}: {', '.join(f'{field} {tuple(shape)}' for field, shape in fields.items())}", "bold")


def _shapes(batch: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _row(batch: Mapping[str, Any], name: str, row: int) -> torch.Tensor | None:
    value = batch.get(name)
    return value[row] if isinstance(value, torch.Tensor) and value.dim() else None


def _is_padding(batch: Mapping[str, Any], row: int) -> bool:
    mark = _row(batch, "is_padding", row)
    return mark is not None and bool(mark)
