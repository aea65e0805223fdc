"""`fmsdata trace`: which documents were in a step, and which steps read a document."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmsdata.cli.common import (
    AsJson,
    ConfigFile,
    Overrides,
    Section,
    console,
    live,
    print_json,
)
from fmsdata.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fmsdata.cli.run import Run
    from fmsdata.display.decoding import Decode
    from fmsdata.run.checkpoints import Checkpoints
    from fmsdata.run.replay import Seen
    from fmsdata.run.trace import Trace


def trace(
    config: ConfigFile,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Show what was in this step. The first is step 0.")] = None,
    rank: Annotated[int | None, typer.Option(help="With --step: show only the batch of this rank.")] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE/SHARD#N",
            help="Show which steps read this document. N is its number in the shard, from 0. Can be repeated.",
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(
            help="With --document: search the steps before this one.", show_default="the step of the newest checkpoint"
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="The folder of checkpoints, if not that of the configuration.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="The number of ranks in the steps after the newest checkpoint, or in all steps if there is none. "
            "Their batch size is loader.batch_size."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Decode with this tokenizer.json, the one in this folder, 'tiktoken:NAME', or 'bytes'.",
            show_default="no text",
        ),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Read from the start of the run, not from the nearest checkpoint.")
    ] = False,
    section: Section = None,
    as_json: AsJson = False,
) -> None:
    """Show the documents of a step (--step), or the steps that read a document (--document).

    Step N is the batch that the loader returns when its state says step N: the first batch is step
    0, and the first one after checkpoint step-N is step N. If your log counts from 1, subtract 1.

    The world size and batch size of each step are in the checkpoints. Nothing is written.

    Example: fmsdata trace run.yaml --step 12345
    """
    if (step is None) == (not document):
        raise ConfigError("give either --step N or --document SOURCE/SHARD#N")
    if until is not None and step is not None:
        raise ConfigError("--until is for --document")
    if rank is not None and step is None:
        raise ConfigError("--rank is for --step")
    from fmsdata.cli.run import open_run
    from fmsdata.display.decoding import decoder
    from fmsdata.run.trace import Trace

    opened = open_run(config, overrides, section, with_checkpoints=True)
    checkpoints = _checkpoints(opened, checkpoint)
    with live() as progress:
        task = progress.add_task("reading lanes", total=None, note="")
        run = Trace(
            opened.data,
            checkpoints=checkpoints,
            world_size=world_size,
            batch_size=opened.batch_size,
            from_start=from_start,
            watch=lambda done, lanes: progress.update(task, completed=done, total=lanes),
        )
        decode = None if tokenizer is None else decoder(tokenizer)
        if step is not None:
            report = _of_step(run, step, rank, decode)
        else:
            report = _of_documents(run, document or [], until, decode)
    if as_json:
        print_json(report)
        return
    from fmsdata.cli.trace_report import print_document, print_step

    out = console()
    if step is not None:
        print_step(out, report)
    for found in report.get("documents", []):
        print_document(out, found, report["since"], report["until"], opened)


def _checkpoints(run: "Run", path: str | None) -> "Checkpoints | None":
    if path is None:
        return run.checkpoints
    named = run.checkpoints_at(path)
    if not any(map(named.is_complete, named.steps())):
        raise CheckpointError(f"{path}: no complete checkpoint there; check --checkpoint")
    return named


def _of_step(run: "Trace", step: int, rank: int | None, decode: "Decode | None") -> dict[str, Any]:
    read: list[tuple[Seen, list[int]]] = (
        [(span, []) for span in run.step(step, rank)] if decode is None else run.step_with_tokens(step, rank)
    )
    seen = [span for span, _ in read]
    _, world_size, batch_size = run.schedule.segment(step)
    documents: dict[str, set[tuple[str, int]]] = defaultdict(set)
    tokens: dict[str, int] = defaultdict(int)
    for span in seen:
        documents[span.source].add((span.shard, span.document))
        tokens[span.source] += span.stop - span.start
    return {
        "step": step,
        "world_size": world_size,
        "batch_size": batch_size,
        "rank": rank,
        "read_from_step": run.start(step),
        "sources": {name: {"documents": len(documents[name]), "tokens": tokens[name]} for name in sorted(documents)},
        "spans": [{**span._asdict(), **({} if decode is None else {"text": decode(tokens)})} for span, tokens in read],
    }


def _of_documents(run: "Trace", names: Sequence[str], until: int | None, decode: "Decode | None") -> dict[str, Any]:
    found = run.documents(names, until)
    return {
        "since": run.since,
        "until": run.newest if until is None else until,
        "documents": [
            {
                **vars(document),
                "seen": [span._asdict() for span in document.seen],
                **({} if decode is None else {"text": decode(run.document_tokens(name))}),
            }
            for name, document in zip(names, found, strict=True)
        ],
    }
