"""The report of `fmsdata preview`: a line for each document of a row, in a colour of its own."""

from collections.abc import Iterable
from itertools import cycle

from rich.console import Console
from rich.text import Text

from fmsdata.cli.preview import Decode
from fmsdata.cli.preview_rows import ShownBatch, ShownRow
from fmsdata.core.wording import counted
from fmsdata.tasks.base import IGNORED

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
HEAD, TAIL = 32, 16  # tokens of a long piece that are shown


def print_batches(batches: Iterable[ShownBatch], decode: Decode, full: bool, out: Console) -> None:
    """Print batches row by row. `full` shows long pieces without leaving tokens out."""
    for batch in batches:
        fields = ", ".join(f"{name} {tuple(shape)}" for name, shape in batch.fields.items())
        out.print(Text(f"step {batch.step}: {fields}", style="bold"))
        for number, row in enumerate(batch.rows):
            tokens = sum(len(piece.tokens) for piece in row.pieces)
            documents = len({piece.origin[:3] for piece in row.pieces if piece.origin})
            ignored = f", {row.ignored} labels ignored ({IGNORED})" if row.ignored else ""
            name = "padding" if row.sample is None else f"sample {row.sample}"
            title = f"row {number}, {name}: {counted(tokens, 'token')}, {counted(documents, 'document')}"
            out.print(Text(f"\n{title}{ignored}"))
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
        if origin is None:
            times = f" x {len(piece.tokens)}" if len(piece.tokens) > 1 else ""
            token = decode(piece.tokens[:1]).removeprefix("⟨").removesuffix("⟩")  # an id without text has them already
            line.append(f" ⟨{token}{times}⟩", "dim")
        else:
            colour, document = colours[origin[:3]], f"{origin.source}/{origin.shard}#{origin.document}"
            line.append(f" {document}[{origin.start}:{origin.stop}]", f"bold {colour}")
            line.append(f" epoch {piece.epoch}: ", "dim")
            line.append(_shortened(piece.tokens, decode, full), colour)
    for line in lines:
        out.print(Text(" ") + line)
    if row.changed is not None:
        out.print(Text(f"  input_ids, as the task made them: {_shortened(row.changed, decode, full)}"))


def _shortened(tokens: list[int], decode: Decode, full: bool) -> str:
    left_out = len(tokens) - HEAD - TAIL
    if full or left_out <= HEAD:
        return decode(tokens)
    return f"{decode(tokens[:HEAD])} ... {left_out} tokens ... {decode(tokens[-TAIL:])}"
