"""`fmsdata preview`: what the model will see first, and where it comes from."""

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Annotated, TypeAlias

import typer

from fmsdata.cli.common import (
    AsJson,
    ConfigFile,
    Overrides,
    Rank,
    Section,
    WorldSize,
    console,
    print_json,
)

Decode: TypeAlias = Callable[[Sequence[int]], str]


def preview(
    config: ConfigFile,
    overrides: Overrides = None,
    batches: Annotated[int, typer.Option(min=1, help="The number of batches to show.")] = 1,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Show only this many rows of each batch.", show_default="all")
    ] = None,
    rank: Rank = 0,
    world_size: WorldSize = 1,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Decode with this tokenizer.json, the one in this folder, 'tiktoken:NAME', or 'bytes'.",
            show_default="documents.tokenizer, else show ids",
        ),
    ] = None,
    section: Section = None,
    full: Annotated[bool, typer.Option("--full", help="Show all tokens of long documents.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the first batches: the documents in each row, and where they come from.

    Each piece of a document is one line: SOURCE/SHARD#DOCUMENT[START:STOP], the epoch, and the
    tokens. ⟨ ⟩ encloses tokens that are in no shard, such as EOS and padding. The run's checkpoints
    are neither read nor written.

    Example: fmsdata preview run.yaml --rows 2 --tokenizer tokenizer.json pack.seq_len=128
    """
    from fmsdata.cli.preview_rows import WithLines, as_json_data, inspect_batch
    from fmsdata.cli.run import open_run
    from fmsdata.loader.loader import StatefulDataLoader

    run = open_run(config, overrides, section)
    spec = tokenizer or run.tokenizer
    decode = None if spec is None else _decoder(spec)
    loader = StatefulDataLoader(
        run.data,
        batch_size=run.batch_size,
        task=WithLines(run.task),
        prefetch=0,
        rank=rank,
        world_size=world_size,
        evaluation=run.evaluation,
    )
    shown = [inspect_batch(step, fields, loader, rows) for step, fields in enumerate(islice(loader, batches))]
    if as_json:
        plain = [as_json_data(batch, decode) for batch in shown]
        print_json({"rank": rank, "world_size": world_size, "batches": plain}, indent=None)
        return
    from fmsdata.cli.preview_report import print_batches

    print_batches(shown, decode or show_ids, full, console())


def show_ids(tokens: Sequence[int]) -> str:
    """The tokens as numbers."""
    return " ".join(map(str, tokens))


def _decoder(spec: str) -> Decode:
    """Decode with a tokenizer. Control characters are escaped, to protect the terminal."""
    from fmsdata.corpus.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(spec)

    def decode(tokens: Sequence[int]) -> str:
        text = ""
        for known, group in groupby(tokens, key=lambda token: token < (tokenizer.vocabulary or token + 1)):
            ids = list(group)
            text += tokenizer.decode(ids) if known else f"⟨{show_ids(ids)}⟩"
        return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)

    return decode
