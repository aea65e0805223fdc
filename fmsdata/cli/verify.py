"""`fmsdata verify`: everything that is wrong with a corpus."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fmsdata.cli.common import AsJson, StorageOptions, parse_storage_options, say
from fmsdata.errors import ConfigError

if TYPE_CHECKING:
    from fmsdata.corpus.verify import VerifyReport


def verify(
    path: Annotated[
        str, typer.Argument(help="The folder of the corpus or of a source, or its URL.", show_default=False)
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer whose ids the tokens are: a tokenizer.json, tiktoken:NAME, bytes.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="The number of token ids, instead of a tokenizer.")
    ] = None,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Look for documents that are equal.")] = False,
    column: Annotated[str | None, typer.Option(help="The column that holds the tokens or the text.")] = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Read a whole corpus and report what is wrong: damage, counts, token ids, bad text, duplicates.

    Reads every document of every shard, of any format. Exits with code 1 if something is wrong, and
    says where. Notes are what you may want to know, but is not wrong.

    Example: fmsdata verify corpus --tokenizer tokenizer.json --duplicates
    """
    from fmsdata.cli.common import print_json
    from fmsdata.corpus.verify import verify_corpus
    from fmsdata.storage.location import Location

    if tokenizer is not None:
        if vocabulary is not None:
            raise ConfigError("give --tokenizer or --vocabulary, not both")
        from fmsdata.corpus.tokenizer import open_tokenizer

        vocabulary = open_tokenizer(tokenizer).vocabulary
        if vocabulary is None:
            raise ConfigError(f"--tokenizer: {tokenizer} does not say how many ids it has; give --vocabulary")
    location = Location(path, parse_storage_options(storage_options))
    report = verify_corpus(location, vocabulary=vocabulary, column=column, duplicates=duplicates)
    if as_json:
        print_json(asdict(report))
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(1)


def _print(report: "VerifyReport") -> None:
    from fmsdata.core.wording import counted

    for source in report.sources:
        what = "byte" if source.kind == "text" else "token"
        ids = f", ids {source.smallest:,} to {source.largest:,}" if source.smallest is not None else ""
        kinds = f" ({', '.join(source.dtypes)})" if source.dtypes else ""
        say(
            f"{source.name}: {counted(source.shards, 'shard')}, {counted(source.documents, 'document')} "
            f"({source.empty:,} empty, the longest {source.longest:,}), {counted(source.tokens, what)}{kinds}{ids}"
        )
    for note in report.notes:
        say(f"note: {note}")
    for problem in report.problems:
        say(f"wrong: {problem}")
    if report.duplicates is not None:
        say(f"duplicates: {report.duplicates:,}")
    say(f"{counted(len(report.problems), 'problem')} found" if report.problems else "nothing is wrong")
