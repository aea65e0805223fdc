"""The report of `fmsdata trace`: the spans of a step, or where a document was seen."""

from itertools import groupby
from typing import Any

from rich.console import Console

from fmsdata.cli.run import Run
from fmsdata.core.wording import counted, listed
from fmsdata.display.printing import write, write_table
from fmsdata.stages.tokenize import tokenizer_of

SPAN_TEXT, MOST_TEXT = 60, 400  # characters of the text of a span, and of a document


def print_step(out: Console, report: dict[str, Any]) -> None:
    start, spans = report["read_from_step"], report["spans"]
    write(
        out,
        f"step {report['step']}, read by {counted(report['world_size'], 'rank')} with batch size {report['batch_size']}"
        + ("" if report["rank"] is None else f", only rank {report['rank']}")
        + (f"; replayed from the checkpoint of step {start}" if start else "; replayed from the start of the run"),
    )
    texts = any("text" in span for span in spans)
    rows = [
        (
            span["rank"],
            span["row"],
            span["sample"],
            _name(span),
            f"{span['start']}:{span['stop']}",
            span["epoch"],
            *([_cut(span["text"])] if texts else []),
        )
        for span in spans
    ]
    write_table(
        out,
        ("rank", "row", "sample", "document", "tokens", "epoch", *["text"] * texts),
        rows,
        left=["document", "text"],
    )
    out.print()
    total = sum(source["tokens"] for source in report["sources"].values())
    shares = [
        (name, source["documents"], source["tokens"], f"{source['tokens'] / total:.1%}")
        for name, source in report["sources"].items()
    ]
    write_table(out, ("source", "documents", "tokens", "share"), shares, left=["source"])


def print_document(out: Console, found: dict[str, Any], since: int, until: int, run: Run) -> None:
    length = found["stop"] - found["start"]
    steps = f"steps {since} to {until - 1}" if since else f"the first {counted(until, 'step')}"
    if since:
        write(out, f"the configuration was edited at step {since}: steps before it are not searched")
    if not length:
        least = counted(max(1, _least_tokens(run, found["source"])), "token")
        cause = f"it has fewer than {least} (documents.min_length) after stripping"
        cause += f", or {listed(run.own_stages, ' or ')} drops it" if run.own_stages else ""
        write(out, f"{_name(found)} is never read: {cause}")
        return
    extent = f"tokens {found['start']}:{found['stop']}"
    if not found["seen"]:
        write(out, f"{_name(found)}, {extent}: not in {steps}")
        return
    first = min(span["step"] for span in found["seen"])
    write(out, f"{_name(found)}, {extent}: first seen in step {first}")
    if "text" in found:
        write(out, _cut(found["text"], MOST_TEXT), guide="  ", indent="  ")
    columns = ("epoch", "step", "rank", "row", "sample")
    rows = [(*(span[name] for name in columns), f"{span['start']}:{span['stop']}") for span in found["seen"]]
    write_table(out, (*columns, "tokens"), rows)
    for epoch, group in groupby(found["seen"], key=lambda span: span["epoch"]):
        pieces = list(group)
        tokens = sum(span["stop"] - span["start"] for span in pieces)
        seen_in = sorted({span["step"] for span in pieces})
        where = f"step{'s' * (len(seen_in) > 1)} {listed(seen_in, ' and ')}"
        if tokens == length:
            how = "whole" if len(pieces) == 1 else f"in {counted(len(pieces), 'piece')}"
            write(out, f"epoch {epoch}: {how}, in {where}")
        else:
            write(out, f"epoch {epoch}: {tokens:,} of {counted(length, 'token')}, in {where}; the rest not in {steps}")


def _cut(text: str, most: int = SPAN_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _least_tokens(run: Run, source: str) -> int:
    tokenize = tokenizer_of(run.mixture.sources[source])
    return run.readers[source].min_length if tokenize is None else tokenize.min_length


def _name(document: dict[str, Any]) -> str:
    """The document as --document takes it."""
    return f"{document['source']}/{document['shard']}#{document['document']}"
