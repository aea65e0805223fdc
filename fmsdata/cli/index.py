"""TODO."""

from typing import Annotated

import typer
from rich.console import Console

from fmsdata.cli.common import StorageOptions, parse_storage_options
from fmsdata.corpus.index import write_index
from fmsdata.storage.location import Location


def index(
    folder: Annotated[str, typer.Argument(help="The folder that holds the sources, or its URL.", show_default=False)],
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens.")] = None,
    storage_options: StorageOptions = None,
) -> None:
    """Count the documents and tokens of every shard below a folder, and keep the counts in FOLDER/meta/counts.csv.

    Example: fmsdata index s3://bucket/corpus -o anon=true
    """
    written = write_index(Location(folder, parse_storage_options(storage_options)), column)
    Console().print(f"wrote {written}", soft_wrap=True, markup=False)
