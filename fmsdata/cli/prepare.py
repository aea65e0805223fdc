"""`fmsdata prepare`: token shards from text."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fmsdata.cli.common import AsJson, OutputOptions, StorageOptions, parse_storage_options, say
from fmsdata.errors import ConfigError

if TYPE_CHECKING:
    from fmsdata.corpus.prepare import Prepared

SHOWN = 10  # skipped documents in the summary


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The folder with the text, whose folders are sources; or its URL.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="A new or empty folder, or its URL.", show_default=False)
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="T",
            help="A tokenizer.json, its folder, tiktoken:NAME-or-file, or bytes.",
            show_default=False,
        ),
    ],
    processes: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; for Ray, tasks at a time.", show_default="one per core")
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in a shard, about.",
            show_default="100,000,000; without shuffling, one shard for each file",
        ),
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=1, help="The share of documents to hold out, in OUTPUT/validation.")
    ] = 0.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip lines that can't be read, and list them; else they are an error.")
    ] = False,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle documents, or keep their order, shard for shard.")
    ] = True,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Keep only the first of documents that are exactly equal.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="processes: this machine; ray: the Ray cluster of RAY_ADDRESS.")
    ] = "processes",
    column: Annotated[
        str | None, typer.Option(help="The field or column that holds the text.", show_default="text")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another one gives another order and another split.")] = 0,
    storage_options: StorageOptions = None,
    output_options: OutputOptions = None,
    as_json: AsJson = False,
) -> None:
    """Make token shards of text files, with counts: resumable, on all cores or on a Ray cluster.

    Reads Parquet, JSON lines and text with one document a line, plain or compressed. Folders of SOURCE
    are the sources; files directly in it are one source. The same options give the same bytes, on any
    number of processes. A run that was stopped or killed continues where it was: run the command again.

    Example: fmsdata prepare texts corpus --tokenizer tokenizer.json --validation 0.01
    """
    from fmsdata.cli.common import print_json
    from fmsdata.corpus.prepare import prepare_corpus
    from fmsdata.storage.location import Location

    if engine not in ("processes", "ray"):
        raise ConfigError(f"--engine is {engine!r}; it must be processes or ray")
    options = parse_storage_options(storage_options)
    there = parse_storage_options(output_options) if output_options else options
    done = prepare_corpus(
        Location(source, options),
        Location(output, there),
        tokenizer,
        processes=processes,
        shard_tokens=shard_tokens,
        validation=validation,
        skip_bad=skip_bad,
        shuffle=shuffle,
        engine="ray" if engine == "ray" else "processes",
        column=column,
        seed=seed,
        deduplicate=deduplicate,
    )
    if as_json:
        print_json(asdict(done))
    else:
        _print(done)


def _print(done: "Prepared") -> None:
    from fmsdata.core.wording import counted
    from fmsdata.corpus.prepare.run import NOTHING_WRITTEN

    for note in done.notes:
        say(f"note: {note}")
    for source in done.sources:
        held = f"; {counted(source.validation_documents, 'document')} held out" if source.validation_documents else ""
        holds = f"{counted(source.shards, 'shard')}, {counted(source.documents, 'document')}"
        say(f"{source.name}: {holds}, {counted(source.tokens, 'token')}{held}")
    if done.duplicates:
        say(f"dropped {counted(done.duplicates, 'duplicate')}")
    if done.bad:
        say(f"skipped {counted(done.bad, 'bad document')}, listed in {done.output}/meta/fmsdata-skipped.csv:")
        for file, line, reason in done.bad_listed[:SHOWN]:
            say(f"  {file}, line {line}: {reason}")
        if done.bad > SHOWN:
            say(f"  and {done.bad - SHOWN:,} more")
    total = done.tokens + done.validation_tokens
    held = f", {done.validation_tokens:,} of them in {done.output}/validation" if done.validation_tokens else ""
    did = "found" if NOTHING_WRITTEN in done.notes else "wrote"
    say(f"{did} {done.output}: {counted(total, 'token')}{held} ({done.dtype}), in {done.seconds:.1f} s")
