"""`fmsdata index`: count a corpus once, so that no run has to."""

from typing import Annotated

import typer

from fmsdata.cli.common import StorageOptions, parse_storage_options
from fmsdata.core.wording import counted


def index(
    folder: Annotated[str, typer.Argument(help="The folder that holds the sources, or its URL.", show_default=False)],
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace counts of other programs that are wrong or incomplete.")
    ] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Count documents and tokens of every shard below a folder, and write FOLDER/meta/counts.csv.

    Counts of other programs in that folder are compared and left as they are, unless you give
    --replace.

    Example: fmsdata index s3://bucket/corpus -o anon=true
    """
    from fmsdata.corpus.index import index_corpus
    from fmsdata.storage.location import Location

    location = Location(folder, parse_storage_options(storage_options))
    done = index_corpus(location, column, replace=replace)
    for note in done.notes:
        print(note)
    holds = f"{counted(done.rows, 'shard')}, {counted(done.documents, 'document')}, {counted(done.tokens, 'token')}"
    print(f"wrote {done.file}: {holds}" if done.written else f"{done.file} is up to date: {holds}", flush=True)
