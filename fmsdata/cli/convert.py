"""`fmsdata convert`: the same documents in another layout, token type or shard size."""

from typing import Annotated

import typer

from fmsdata.cli.common import AsJson, OutputOptions, StorageOptions, parse_storage_options, say


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The folder with the token shards, or its URL.", show_default=False)
    ],
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="A new or empty folder, or its URL.", show_default=False)
    ],
    layout: Annotated[
        str, typer.Option(help="list: many documents in a record batch; batch: one, as fms-fsdp writes it.")
    ] = "list",
    dtype: Annotated[
        str | None, typer.Option(help="The type of the tokens, such as uint16.", show_default="as it is")
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a shard: the shards of each folder are cut anew.", show_default="as it is"),
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens.")] = None,
    storage_options: StorageOptions = None,
    output_options: OutputOptions = None,
    as_json: AsJson = False,
) -> None:
    """Write token shards again, in another layout, token type or shard size.

    Reads Arrow shards of both layouts, and list columns of Parquet files. Documents, their order and
    the folders stay as they are. Counts are compared with those of the source, if it has any, and
    written to OUTPUT/meta/counts.csv.

    Example: fmsdata convert corpus corpus-lists --dtype uint16 --shard-tokens 100000000
    """
    from fmsdata.cli.common import print_json
    from fmsdata.core.wording import counted
    from fmsdata.corpus.convert import convert_corpus
    from fmsdata.errors import ConfigError
    from fmsdata.storage.location import Location

    if layout not in ("list", "batch"):
        raise ConfigError(f"--layout is {layout!r}; it must be list or batch")
    options = parse_storage_options(storage_options)
    there = parse_storage_options(output_options) if output_options else options
    done = convert_corpus(
        Location(source, options),
        Location(output, there),
        layout="list" if layout == "list" else "batch",
        dtype=dtype,
        shard_tokens=shard_tokens,
        column=column,
    )
    if as_json:
        print_json({**done._asdict(), "output": str(done.output)})
        return
    holds = f"{counted(done.shards, 'shard')}, {counted(done.documents, 'document')}, {counted(done.tokens, 'token')}"
    say(f"wrote {done.output}: {holds}")
