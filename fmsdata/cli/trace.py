"""The command `trace`: what was in a step, and in which steps a document was seen."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fmsdata.cli.common import AsJson, ConfigFile, Overrides, console, parse_overrides, print_json
from fmsdata.config.build import build_data, make_checkpoints, options_for
from fmsdata.config.read import read_config
from fmsdata.config.sections import Config
from fmsdata.errors import CheckpointError, ConfigError
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.trace import Trace

ANY_WIDTH = 100_000  # of a pipe


def trace(
    config: ConfigFile,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Tell what was in this step. The first is step 0.")] = None,
    rank: Annotated[int | None, typer.Option(help="With --step: only the batch of this rank.")] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE/SHARD#N",
            help="Tell in which steps this document was seen: N is its number in the shard, from 0. Can be repeated.",
        ),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option(help="With --document: look at the steps before this one, by default the newest checkpoint's."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="The folder of checkpoints, instead of the configuration's.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="How many ranks read the steps after the newest checkpoint, or all steps if there is none; "
            "their batch size is loader.batch_size."
        ),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Read from the start of the run, not from the nearest checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what was in a step of a run (--step), or in which steps documents were seen (--document).

    Step N is the batch that the loader hands out when its state says step N: the first batch is step 0, and the first
    one after checkpoint step-N is step N. If your log counts from 1, subtract 1.

    A checkpoint tells on how many ranks and with which batch size each step was read. Nothing is written.
    """
    if (step is None) == (not document):
        raise ConfigError("give either --step N or --document SOURCE/SHARD#N")
    if until is not None and step is not None:
        raise ConfigError("--until is for --document")
    if rank is not None and step is None:
        raise ConfigError("--rank is for --step")
    told = read_config(config, parse_overrides(overrides))
    checkpoints = _checkpoints(told, checkpoint)
    data = build_data(told)
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("reading lanes", total=None)
        run = Trace(
            data,
            checkpoints=checkpoints,
            world_size=world_size,
            batch_size=told.loader.batch_size,
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
    for one in report.get("documents", []):
        _print_document(out, one, report["since"], report["until"], told.documents.min_length)


def _checkpoints(config: Config, path: str | None) -> Checkpoints | None:
    if path is None:
        return make_checkpoints(config)
    named = Checkpoints(path, storage_options=options_for(config, path), storage=config.storage.settings())
    if not any(map(named.is_complete, named.steps())):
        raise CheckpointError(f"{path}: there is no complete checkpoint in it")
    return named


def _of_step(run: Trace, step: int, rank: int | None) -> dict[str, Any]:
    seen = run.step(step, rank)
    _, world_size, batch_size = run.schedule.segment(step)
    documents: dict[str, set[tuple[str, int]]] = defaultdict(set)
    tokens: dict[str, int] = defaultdict(int)
    for one in seen:
        documents[one.source].add((one.shard, one.document))
        tokens[one.source] += one.stop - one.start
    return {
        "step": step,
        "world_size": world_size,
        "batch_size": batch_size,
        "rank": rank,
        "read_from_step": run.start(step),
        "sources": {name: {"documents": len(documents[name]), "tokens": tokens[name]} for name in sorted(documents)},
        "spans": [one._asdict() for one in seen],
    }


def _of_documents(run: Trace, names: Sequence[str], until: int | None) -> dict[str, Any]:
    found = run.documents(names, until)
    return {
        "since": run.since,
        "until": run.newest if until is None else until,
        "documents": [{**vars(one), "seen": [piece._asdict() for piece in one.seen]} for one in found],
    }


def _print_step(out: Console, report: dict[str, Any]) -> None:
    start, spans = report["read_from_step"], report["spans"]
    out.print(
        f"step {report['step']}, read by {_many(report['world_size'], 'rank')} with batch size {report['batch_size']}"
        + ("" if report["rank"] is None else f", of which rank {report['rank']}")
        + (f"; found from the checkpoint of step {start}" if start else "; found from the start of the run"),
        markup=False,
    )
    rows = [
        (one["rank"], one["row"], one["sample"], _name(one), f"{one['start']}:{one['stop']}", one["epoch"])
        for one in spans
    ]
    _print_table(out, ("rank", "row", "sample", "document", "tokens", "epoch"), rows)
    out.print()
    total = sum(one["tokens"] for one in report["sources"].values())
    shares = [
        (name, one["documents"], one["tokens"], f"{one['tokens'] / total:.1%}")
        for name, one in report["sources"].items()
    ]
    _print_table(out, ("source", "documents", "tokens", "share"), shares)


def _print_document(out: Console, found: dict[str, Any], since: int, until: int, min_length: int) -> None:
    length = found["stop"] - found["start"]
    steps = f"steps {since} to {until - 1}" if since else f"the first {_many(until, 'step')}"
    if since:
        out.print(f"the mix was edited on the way: steps before {since} are not looked at")
    if not length:
        why = f"it has fewer than {max(1, min_length)} tokens (documents.min_length) after stripping"
        out.print(f"{_name(found)} is never read: {why}", markup=False)
        return
    extent = f"tokens {found['start']}:{found['stop']}"
    if not found["seen"]:
        out.print(f"{_name(found)}, {extent}: not in {steps}", markup=False)
        return
    first = min(one["step"] for one in found["seen"])
    out.print(f"{_name(found)}, {extent}: first seen in step {first}", markup=False)
    columns = ("epoch", "step", "rank", "row", "sample")
    rows = [(*(one[name] for name in columns), f"{one['start']}:{one['stop']}") for one in found["seen"]]
    _print_table(out, (*columns, "tokens"), rows)
    for epoch, some in groupby(found["seen"], key=lambda one: one["epoch"]):
        pieces = list(some)
        tokens = sum(one["stop"] - one["start"] for one in pieces)
        where = _list(sorted({one["step"] for one in pieces}))
        what = "whole" if len(pieces) == 1 else f"in {len(pieces)} pieces"
        if tokens == length:
            out.print(f"epoch {epoch}: {what}, in {where}")
        else:
            out.print(f"epoch {epoch}: {tokens} of {_many(length, 'token')}, in {where}; the others not in {steps}")


def _name(one: dict[str, Any]) -> str:
    """A document as --document takes it."""
    return f"{one['source']}/{one['shard']}#{one['document']}"


def _print_table(out: Console, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("document", "source") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    out.print(table, soft_wrap=False)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _list(steps: Sequence[int]) -> str:
    *some, last = map(str, steps)
    return f"steps {', '.join(some)} and {last}" if some else f"step {last}"
