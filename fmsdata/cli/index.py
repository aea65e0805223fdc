"""`fmsdata index`: count a corpus once, so that no run has to."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmsdata.cli.common import AsJson, StorageOptions, parse_storage_options, print_json, say
from fmsdata.core.wording import counted

if TYPE_CHECKING:
    from fmsdata.corpus.index import Indexed


def index(
    folder: Annotated[str, typer.Argument(help="The folder that holds the sources, or its URL.", show_default=False)],
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens or the text.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Count the tokens of text files with it: a tokenizer.json, tiktoken:NAME, bytes.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace counts of other programs that are wrong or incomplete.")
    ] = False,
    append: Annotated[
        bool,
        typer.Option("--append", help="Let runs read new Arrow shards from the next epoch of their source on."),
    ] = False,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Count documents and tokens of every shard below a folder, and write FOLDER/meta/counts.csv.

    Text files (Parquet, JSON lines, text) get an index of their own,
    FOLDER/meta/fmsdata-text-index.ipc, which says how many documents they hold, and where a file can
    be entered. Only new and changed files are read. With --tokenizer, the tokens of their documents
    are counted too, for natural weights, finite passes and evaluation.

    Of Arrow shards, the manifest FOLDER/meta/fmsdata-manifest.ipc is written too, from which runs plan
    without listing the folder. Shards that have not changed since are not counted again.

    With --append, a run that has begun resumes with the new Arrow shards: it reads them from the next
    epoch of their source on. A shard that changed or is gone is an error, and nothing is written.
    Without --append, a run does not resume if one of its sources has new shards.

    Counts of other programs in that folder are compared and left as they are, unless you give
    --replace.

    Example: fmsdata index s3://bucket/corpus -o anon=true
    """
    from fmsdata.corpus.index import index_corpus
    from fmsdata.corpus.tokenizer import open_tokenizer
    from fmsdata.storage.location import Location

    location = Location(folder, parse_storage_options(storage_options))
    opened = None if tokenizer is None else open_tokenizer(tokenizer)
    done = index_corpus(location, column, replace=replace, tokenizer=opened, append=append)
    if as_json:
        print_json(_report(done))
        return
    for note in done.notes:
        say(note)
    if done.rows or done.text is None:
        holds = f"{counted(done.rows, 'shard')}, {counted(done.documents, 'document')}, {counted(done.tokens, 'token')}"
        say(f"wrote {done.file}: {holds}" if done.written else f"{done.file} is up to date: {holds}")
    if append and done.added:
        say(f"appended {counted(done.added, 'shard')}, for runs to read from the next epoch of the source on")
    if done.manifest is not None:
        say(f"wrote {done.manifest}, from which runs plan without listing the folder")
    if text := done.text:
        entries = text.entries.values()
        files, documents = len(entries), sum(entry.documents for entry in entries)
        holds = f"{counted(files, 'text file')}, {counted(documents, 'document')}"
        holds += f", {counted(sum(entry.nbytes for entry in entries), 'byte')}"
        holds += "" if text.tokens is None else f", {counted(text.tokens, 'token')}"
        say(f"wrote {text.file}: {holds}" if text.written else f"{text.file} is up to date: {holds}")


def _report(done: "Indexed") -> dict[str, Any]:
    """The result as plain data. `text` is about the index of text files."""
    text = done.text
    return {
        "file": None if not done.rows and text is not None else str(done.file),
        "written": done.written,
        "manifest": None if done.manifest is None else str(done.manifest),
        "shards": done.rows,
        "new_shards": done.added,
        "documents": done.documents,
        "tokens": done.tokens,
        "text": None
        if text is None
        else {
            "file": str(text.file),
            "written": text.written,
            "files": len(text.entries),
            "documents": sum(entry.documents for entry in text.entries.values()),
            "bytes": sum(entry.nbytes for entry in text.entries.values()),
            "tokens": text.tokens,
        },
        "notes": list(done.notes),
    }
