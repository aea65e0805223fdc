"""`fmsdata preview`: what the model will see first, and where it comes from."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
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

IN_THIS_PROCESS: dict[str, Any] = {
    "num_workers": 0,
    "prefetch": 0,
    "pin_memory": False,
    "device": None,
    "steps": None,
    "stall_timeout": None,
}
if TYPE_CHECKING:
    from fmsdata.core.pieces import Piece
    from fmsdata.display.decoding import Decode
    from fmsdata.display.show import ShownBatch, ShownRow
    from fmsdata.loader.loader import StatefulDataLoader


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
    from fmsdata.cli.run import open_run
    from fmsdata.display.decoding import decoder
    from fmsdata.display.show import inspect_batch

    run = open_run(config, overrides, section)
    spec = tokenizer or run.tokenizer
    decode = None if spec is None else decoder(spec)
    simple = {
        "num_workers": 0,
        "prefetch": 0,
        "pin_memory": False,
        "device": None,
        "steps": None,
        "stall_timeout": None,
    }
    loader = run.make_loader(rank, world_size, **simple, outputs=["pieces"])
    shown = [
        inspect_batch(batch, rows, step=step, samples=_samples(loader, step))
        for step, batch in enumerate(islice(loader, batches))
    ]
    if as_json:
        plain = [_as_json(step, batch, decode) for step, batch in enumerate(shown)]
        print_json({"rank": rank, "world_size": world_size, "batches": plain}, indent=None)
        return
    from fmsdata.display.decoding import show_ids
    from fmsdata.display.show import print_batches

    print_batches(shown, decode or show_ids, full, console())


def _samples(loader: "StatefulDataLoader", step: int) -> list[int]:
    """The samples in a step of a loader that began at the start of the stream."""
    from fmsdata.planning.schedule import Turns

    limits = None if loader.data.epochs is None else np.array(loader.pass_lines)
    lanes = loader.data.lanes_of(loader.rank, loader.world_size)
    turns = Turns(dict.fromkeys(lanes, 0), loader.data.lanes, limits)
    return turns.take((step + 1) * loader.batch_size)[step * loader.batch_size :]


def _as_json(step: int, batch: "ShownBatch", decode: "Decode | None") -> dict[str, Any]:
    """The batch as plain data, with text if there is a decoder."""

    def piece_data(piece: "Piece") -> dict[str, Any]:
        text = {} if decode is None else {"text": decode(piece.tokens)}
        origin = {} if piece.origin is None else {**piece.origin._asdict(), "epoch": piece.epoch}
        return {"inserted": piece.origin is None, **origin, "tokens": piece.tokens, **text}

    def row_data(row: "ShownRow") -> dict[str, Any]:
        changed = {} if row.changed is None else {"input_ids": row.changed}
        pieces = [piece_data(piece) for piece in row.pieces]
        return {"sample": row.sample, "ignored_labels": row.ignored, "pieces": pieces, **changed}

    return {"step": step, "fields": batch.fields, "rows": [row_data(row) for row in batch.rows]}
