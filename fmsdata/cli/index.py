"""`fmsdata index`: count a corpus once, so that no run has to."""

from typing import Annotated

import typer

from fmsdata.cli.common import StorageOptions, parse_storage_options


def index(
    folder: Annotated[str, typer.Argument(help="The folder that holds the sources, or its URL.", show_default=False)],
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens.")] = None,
    storage_options: StorageOptions = None,
) -> None:
    """Count documents and tokens of every shard below a folder, and write FOLDER/meta/counts.csv.

    Example: fmsdata index s3://bucket/corpus -o anon=true
    """
    from fmsdata.corpus.index import write_index
    from fmsdata.storage.location import Location

    print(f"wrote {write_index(Location(folder, parse_storage_options(storage_options)), column)}", flush=True)
