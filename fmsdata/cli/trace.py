"""`fmsdata trace`: which documents were in a step, and which steps read a document."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
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
from fmsdata.core.wording import counted, listed
from fmsdata.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fmsdata.cli.run import Run
    from fmsdata.run.checkpoints import Checkpoints
    from fmsdata.run.trace import Trace

ANY_WIDTH = 100_000  # of a pipe: no row is ever wrapped


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
        report = _of_step(run, step, rank) if step is not None else _of_documents(run, document or [], until)
    if as_json:
        print_json(report)
        return
    out = console()
    if not out.is_terminal:
        out.width = ANY_WIDTH
    if step is not None:
        _print_step(out, report)
    for found in report.get("documents", []):
        _print_document(out, found, report["since"], report["until"], opened)


def _checkpoints(run: "Run", path: str | None) -> "Checkpoints | None":
    if path is None:
        return run.checkpoints
    named = run.checkpoints_at(path)
    if not any(map(named.is_complete, named.steps())):
        raise CheckpointError(f"{path}: no complete checkpoint there; check --checkpoint")
    return named


def _of_step(run: "Trace", step: int, rank: int | None) -> dict[str, Any]:
    seen = run.step(step, rank)
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
        "spans": [span._asdict() for span in seen],
    }


def _of_documents(run: "Trace", names: Sequence[str], until: int | None) -> dict[str, Any]:
    found = run.documents(names, until)
    return {
        "since": run.since,
        "until": run.newest if until is None else until,
        "documents": [{**vars(document), "seen": [span._asdict() for span in document.seen]} for document in found],
    }


def _print_step(out: "Console", report: dict[str, Any]) -> None:
    start, spans = report["read_from_step"], report["spans"]
    out.print(
        f"step {report['step']}, read by {counted(report['world_size'], 'rank')} with batch size {report['batch_size']}"
        + ("" if report["rank"] is None else f", only rank {report['rank']}")
        + (f"; replayed from the checkpoint of step {start}" if start else "; replayed from the start of the run"),
        markup=False,
    )
    rows = [
        (span["rank"], span["row"], span["sample"], _name(span), f"{span['start']}:{span['stop']}", span["epoch"])
        for span in spans
    ]
    _print_table(out, ("rank", "row", "sample", "document", "tokens", "epoch"), rows)
    out.print()
    total = sum(source["tokens"] for source in report["sources"].values())
    shares = [
        (name, source["documents"], source["tokens"], f"{source['tokens'] / total:.1%}")
        for name, source in report["sources"].items()
    ]
    _print_table(out, ("source", "documents", "tokens", "share"), shares)


def _print_document(out: "Console", found: dict[str, Any], since: int, until: int, run: "Run") -> None:
    length = found["stop"] - found["start"]
    steps = f"steps {since} to {until - 1}" if since else f"the first {counted(until, 'step')}"
    if since:
        out.print(f"the configuration was edited at step {since}: steps before it are not searched")
    if not length:
        least = counted(max(1, _least_tokens(run, found["source"])), "token")
        cause = f"it has fewer than {least} (documents.min_length) after stripping"
        cause += f", or {listed(run.own_stages, ' or ')} drops it" if run.own_stages else ""
        out.print(f"{_name(found)} is never read: {cause}", markup=False)
        return
    extent = f"tokens {found['start']}:{found['stop']}"
    if not found["seen"]:
        out.print(f"{_name(found)}, {extent}: not in {steps}", markup=False)
        return
    first = min(span["step"] for span in found["seen"])
    out.print(f"{_name(found)}, {extent}: first seen in step {first}", markup=False)
    columns = ("epoch", "step", "rank", "row", "sample")
    rows = [(*(span[name] for name in columns), f"{span['start']}:{span['stop']}") for span in found["seen"]]
    _print_table(out, (*columns, "tokens"), rows)
    for epoch, group in groupby(found["seen"], key=lambda span: span["epoch"]):
        pieces = list(group)
        tokens = sum(span["stop"] - span["start"] for span in pieces)
        seen_in = sorted({span["step"] for span in pieces})
        where = f"step{'s' * (len(seen_in) > 1)} {listed(seen_in, ' and ')}"
        if tokens == length:
            out.print(f"epoch {epoch}: {'whole' if len(pieces) == 1 else f'in {len(pieces)} pieces'}, in {where}")
        else:
            out.print(f"epoch {epoch}: {tokens:,} of {counted(length, 'token')}, in {where}; the rest not in {steps}")


def _least_tokens(run: "Run", source: str) -> int:
    from fmsdata.stages.tokenize import tokenizer_of

    tokenize = tokenizer_of(run.mixture.sources[source])
    return run.readers[source].min_length if tokenize is None else tokenize.min_length


def _name(document: dict[str, Any]) -> str:
    """The document as --document takes it."""
    return f"{document['source']}/{document['shard']}#{document['document']}"


def _print_table(out: "Console", columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("document", "source") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    out.print(table, soft_wrap=False)
