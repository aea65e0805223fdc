"""`fmsdata preview`: what the model will see first, and where it comes from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import typer
from rich.console import Console
from rich.text import Text

from fmsdata.cli.common import (
    AsJson,
    ConfigFile,
    Overrides,
    Rank,
    WorldSize,
    console,
    parse_overrides,
    print_json,
    without_checkpoint,
)
from fmsdata.config.build import build_data, make_task
from fmsdata.config.read import read_config
from fmsdata.core.chunk import BEGINS, BUFFER, DOCUMENT, LENGTH, POSITION, TAIL, Chunk, Span
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.tasks.base import IGNORED, Task
from fmsdata.tasks.batch import Batch

Decode: TypeAlias = Callable[[Sequence[int]], str]
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
HEAD, TAIL_SHOWN = 32, 16  # tokens of a long piece that are shown
READING: dict[str, Any] = {"loader.num_workers": 0, "loader.prefetch": 0, "loader.pin_memory": False}


def preview(
    config: ConfigFile,
    overrides: Overrides = None,
    batches: Annotated[int, typer.Option(min=1, help="How many batches to show.")] = 1,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Show only so many rows of each batch.", show_default="all")
    ] = None,
    rank: Rank = 0,
    world_size: WorldSize = 1,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Decode with this tokenizer.json, or the one in this folder.", show_default="show ids"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all tokens, however many.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the first batches: the documents in each row, and where they come from.

    Each piece of a document has a line: SOURCE/SHARD#DOCUMENT[START:STOP], the epoch, and the tokens. ⟨ ⟩ encloses
    tokens that are in no shard, such as EOS and padding. The run's checkpoints are neither read nor written.

    Example: fmsdata preview run.yaml --rows 2 --tokenizer tokenizer.json pack.seq_len=128
    """
    decode = _as_ids if tokenizer is None else _decoder(tokenizer)
    told = read_config(config, {**without_checkpoint(parse_overrides(overrides)), **READING})
    data = build_data(told)
    loader = StatefulDataLoader(
        data,
        batch_size=told.loader.batch_size,
        task=_Look(make_task(told)),
        prefetch=0,
        rank=rank,
        world_size=world_size,
    )
    report = [_batch(step, fields, loader, rows) for step, fields in enumerate(islice(loader, batches))]
    if as_json:
        plain = [_plain(one, decode) for one in report]
        print_json({"rank": rank, "world_size": world_size, "batches": plain}, indent=None)
    else:
        _show(report, decode, full, console())


@dataclass(frozen=True)
class _Look:
    """A task that hands out the lines too, as they were before it."""

    task: Task
    needs_lines: bool = True

    @property
    def extra_tokens(self) -> int:
        return self.task.extra_tokens

    def __call__(self, batch: Batch) -> dict[str, Any]:
        return {"": batch, **self.task(batch)}


class Piece(NamedTuple):
    """A run of tokens of one row. What is in no shard has no origin."""

    tokens: list[int]
    begins: bool  # a new document, or padding
    origin: Span | None = None
    epoch: int = 0


class ShownRow(NamedTuple):
    sample: int
    pieces: list[Piece]
    ignored: int  # labels
    changed: list[int] | None  # what the task made of the tokens, if it did


class ShownBatch(NamedTuple):
    step: int
    fields: dict[str, list[int]]  # the shape of each
    rows: list[ShownRow]


def _batch(step: int, fields: dict[str, Any], loader: StatefulDataLoader, most: int | None) -> ShownBatch:
    batch: Batch = fields.pop("")
    mine = loader.data.lanes_of(loader.rank, loader.world_size)
    shapes = {name: list(value.shape) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    shown = []
    for row in range(len(batch))[:most]:
        line, lane = divmod(step * loader.batch_size + row, len(mine))
        ids, labels = (fields[name][row] if name in shapes else None for name in ("input_ids", "labels"))
        tokens = batch.tokens[row].tolist()
        shown.append(
            ShownRow(
                line * loader.data.lanes + mine[lane],
                list(_pieces(batch.lines, row, tokens)),
                0 if labels is None else int((labels == IGNORED).sum()),
                None if ids is None or ids.tolist() == tokens[: batch.length] else ids.flatten().tolist(),
            )
        )
    return ShownBatch(step, shapes, shown)


def _pieces(lines: Chunk, row: int, tokens: list[int]) -> Iterator[Piece]:
    place = 0
    for span in lines.slice(row, row + 1).spans.tolist():
        end = place + span[LENGTH]
        behind, begins = end - (span[TAIL] > 0), bool(span[BEGINS])  # the stored tokens end here
        if span[DOCUMENT] < 0:
            yield Piece(tokens[place:behind], begins)
        elif place < behind:
            origin = lines.buffers[span[BUFFER]]
            stop = span[POSITION] + behind - place
            where = Span(origin.source, origin.shard, span[DOCUMENT], span[POSITION], stop)
            yield Piece(tokens[place:behind], begins, where, origin.epoch)
        if behind < end:
            yield Piece(tokens[behind:end], place == behind and begins)
        place = end


def _plain(batch: ShownBatch, decode: Decode) -> dict[str, Any]:
    def piece(one: Piece) -> dict[str, Any]:
        text = {} if decode is _as_ids else {"text": decode(one.tokens)}
        where = {} if one.origin is None else {**one.origin._asdict(), "epoch": one.epoch}
        return {"inserted": one.origin is None, **where, "tokens": one.tokens, **text}

    def row(one: ShownRow) -> dict[str, Any]:
        changed = {} if one.changed is None else {"input_ids": one.changed}
        pieces = [piece(each) for each in one.pieces]
        return {"sample": one.sample, "ignored_labels": one.ignored, "pieces": pieces, **changed}

    return {"step": batch.step, "fields": batch.fields, "rows": [row(one) for one in batch.rows]}


def _show(report: list[ShownBatch], decode: Decode, full: bool, out: Console) -> None:
    for batch in report:
        fields = ", ".join(f"{name} {tuple(shape)}" for name, shape in batch.fields.items())
        out.print(Text(f"step {batch.step}: {fields}", style="bold"))
        for number, row in enumerate(batch.rows):
            documents = len({piece.origin[:3] for piece in row.pieces if piece.origin})
            parts = [
                f"row {number}, sample {row.sample}: {_count(sum(len(one.tokens) for one in row.pieces), 'token')}",
                f"{_count(documents, 'document')}",
                *([f"{row.ignored} labels ignored ({IGNORED})"] if row.ignored else []),
            ]
            out.print(Text("\n" + ", ".join(parts)))
            _show_row(row, decode, full, out)
        out.print()


def _show_row(row: ShownRow, decode: Decode, full: bool, out: Console) -> None:
    """A line for each document, and what is inserted before or behind it."""
    colours = dict(zip(dict.fromkeys(one.origin[:3] for one in row.pieces if one.origin), cycle(COLOURS), strict=False))
    lines = [Text()]
    for piece in row.pieces:
        if piece.begins and lines[-1]:
            lines.append(Text())
        line, origin = lines[-1], piece.origin
        if origin is None:
            times = f" x {len(piece.tokens)}" if len(piece.tokens) > 1 else ""
            line.append(f" ⟨{decode(piece.tokens[:1])}{times}⟩", "dim")
        else:
            colour, where = colours[origin[:3]], f"{origin.source}/{origin.shard}#{origin.document}"
            line.append(f" {where}[{origin.start}:{origin.stop}]", f"bold {colour}")
            line.append(f" epoch {piece.epoch}: ", "dim")
            line.append(_shortened(piece.tokens, decode, full), colour)
    for line in lines:
        out.print(Text(" ") + line)
    if row.changed is not None:
        out.print(Text(f"  input_ids, as the task made them: {_shortened(row.changed, decode, full)}"))


def _shortened(tokens: list[int], decode: Decode, full: bool) -> str:
    left_out = len(tokens) - HEAD - TAIL_SHOWN
    if full or left_out <= HEAD:
        return decode(tokens)
    return f"{decode(tokens[:HEAD])} ... {left_out} tokens ... {decode(tokens[-TAIL_SHOWN:])}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _as_ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _decoder(path: Path) -> Decode:
    """Decodes with a tokenizer.json; control characters are written out, so that they can't disturb a terminal."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the library `tokenizers`: pip install 'fmsdata[tokenizers]'; or leave it off to see ids"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; --tokenizer takes a tokenizer.json, or a folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{file} is not a tokenizer that the library `tokenizers` can read: {error}") from None

    def decode(tokens: Sequence[int]) -> str:
        text = ""
        for known, some in groupby(tokens, key=lambda one: tokenizer.id_to_token(one) is not None):
            ids = list(some)
            text += tokenizer.decode(ids, skip_special_tokens=False) if known else f"⟨{_as_ids(ids)}⟩"
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)

    return decode
