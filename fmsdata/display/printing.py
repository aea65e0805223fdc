"""How commands print: words that no width breaks, and tables.

In a terminal, lines are wrapped between words, and a table that is too wide becomes a list. In a pipe
nothing is wrapped, and no line ends with blanks.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fmsdata.core.outline import Outline

BETWEEN = "  "  # columns of a table
LEAST_WORDS = 24  # characters of a line beside its guide; with less, the words start on the next line


def write(out: Console, words: str | Text, style: str = "", *, guide: str | Text = "", indent: str = "") -> None:
    """Print words after a guide. Further lines start with the indent.

    A word that is longer than a line stays whole.
    """
    text = words.copy() if isinstance(words, Text) else Text(words, style)
    first = guide if isinstance(guide, Text) else Text(guide)
    if not out.is_terminal:
        lines = [text]
    elif out.width - cell_len(indent) < LEAST_WORDS < out.width and first.plain.strip():
        out.print(_without_end(first), soft_wrap=True)
        first = Text("  ")
        indent = "  "
        lines = list(text.wrap(out, out.width - 2, overflow="ignore"))
    else:
        lines = list(text.wrap(out, max(1, out.width - cell_len(indent)), overflow="ignore"))
    for number, line in enumerate(lines):
        out.print(_without_end((first if number == 0 else Text(indent)) + line), soft_wrap=True)


def write_table(
    out: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Sequence[str] = (),
    title: str = "",
    styles: Sequence[str] = (),
) -> None:
    """Print a table whose columns are on the right, or on the `left` by name.

    If it is too wide for the terminal, each row becomes a list under its first `left` column.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    if title:
        write(out, title, "italic")
    if out.is_terminal and sum(widths) + len(BETWEEN) * (len(widths) - 1) > out.width:
        _write_list(out, columns, cells, next((columns.index(name) for name in left), 0))
        return

    def line(row: Sequence[str]) -> str:
        padded = (
            cell + " " * (width - cell_len(cell)) if name in left else " " * (width - cell_len(cell)) + cell
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        return BETWEEN.join(padded).rstrip()

    out.print(Text(line(columns), "bold"), soft_wrap=True)
    for number, row in enumerate(cells):
        out.print(Text(line(row), styles[number] if number < len(styles) else ""), soft_wrap=True)


def _write_list(out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], head: int) -> None:
    width = max(map(cell_len, columns)) + len(BETWEEN)
    for row in rows:
        write(out, f"{columns[head]} {row[head]}", "bold")
        for place, (name, cell) in enumerate(zip(columns, row, strict=True)):
            if place != head:
                write(out, cell, guide=f"  {name:{width}}", indent=" " * (2 + width))


def write_outline(out: Console, outline: Outline) -> None:
    """Print a pipeline as a tree."""
    for branch in outline.branches():
        words = Text.assemble(branch.label, (branch.title, "bold"), f" {branch.facts}" if branch.facts else "")
        write(out, words, guide=Text(branch.guide, "dim"), indent=branch.indent)


def _without_end(text: Text) -> Text:
    text.rstrip()
    return text
