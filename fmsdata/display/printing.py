"""How commands print: words that no width breaks, and tables.

In a terminal, lines are wrapped between words, and a table that is too wide becomes a list. In a pipe
nothing is wrapped, and no line ends with blanks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fmsdata.core.outline import Outline

BETWEEN = "  "  # columns of a table
LEAST_WORDS = 24  # characters of a line beside its guide
WORD = re.compile(r"\S+")


def write(
    out: Console, words: str | Text, style: str = "", *, guide: str | Text = "", indent: str = "", apart: bool = False
) -> None:
    """Print words after a guide. Further lines start with the indent.

    A word that does not fit beside the guide moves to the left, and one that is longer than a line stays
    whole. With `apart`, the words start on a line of their own if there is little room beside the guide.
    """
    text = words.copy() if isinstance(words, Text) else Text(words, style)
    lead = guide if isinstance(guide, Text) else Text(guide)
    if not out.is_terminal:
        out.print(_without_end(lead + text), soft_wrap=True)
        return
    if apart and out.width - cell_len(indent) < LEAST_WORDS:
        out.print(_without_end(lead), soft_wrap=True)
        lead, indent = Text("  "), "  "
    for line in _wrapped(text, min(out.width, max(LEAST_WORDS, out.width - cell_len(indent)))):
        left = out.width - cell_len(line.plain)
        if cell_len(lead.plain) > left:
            if lead.plain.strip():
                out.print(_without_end(lead), soft_wrap=True)
            lead = Text(" " * max(0, left))
        out.print(_without_end(lead + line), soft_wrap=True)
        lead = Text(indent)


def _wrapped(text: Text, width: int) -> Iterator[Text]:
    """The text in lines of whole words."""
    for paragraph in text.split(allow_blank=True):
        starts, begin = [], 0
        for word in WORD.finditer(paragraph.plain):
            if cell_len(paragraph.plain[begin : word.end()]) > width and word.start() > begin:
                begin = word.start()
                starts.append(begin)
        for line in paragraph.divide(starts):
            yield _without_end(line)


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
