"""How a corpus has grown since it was indexed: the generation of each shard.

The first index makes generation 0. Each later one that finds new shards gives them the next number.
`fmsdata index --append` also says that running states may take them up. A shard that changed counts
as a new one: no state of its source from before resumes with that, and those of other sources do.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fmsdata.core.wording import counted, few
from fmsdata.corpus.counts_csv import Count, all_counts
from fmsdata.corpus.manifest import Growth, Manifest
from fmsdata.corpus.manifest_writing import manifest_of
from fmsdata.errors import CountsError, DataError, FmsdataError
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location

SHOWN = 5  # shards in a message
AGAIN = "move the new shards away, run `fmsdata index`, move them back, and run `fmsdata index --append`"


class Grown(NamedTuple):
    """The generations of all shards now; None if there is only one."""

    growth: Growth | None
    added: int  # shards that were not there before
    notes: list[str]
    unkept: list[Entry]  # the shards of before, if counts have them, and no manifest


class _Known(NamedTuple):
    """A shard when the corpus was last indexed."""

    size: int | None
    held: Count
    generation: int


def grow(root: Location, entries: Sequence[Entry], counts: Mapping[str, Count], *, append: bool) -> Grown:
    """Compare the shards with those that were indexed before. With `append`, they must all be there, unchanged."""
    manifest, notes = _manifest(root, append=append)
    known = _of_counts(root, entries) if manifest is None and append else _of_manifest(manifest)
    if append and not known:
        raise DataError(
            f"{root}: nothing to append to: there is no manifest and no counts in {root / 'meta'}, so the shards that "
            f"runs have read until now are unknown; {AGAIN}"
        )
    different = dict(_differences(known, entries, counts))
    differences = list(different.values())
    if differences and append:
        raise CountsError(
            f"{root}: shards that were indexed before must stay as they are: {few(differences, SHOWN, '; ')}; nothing "
            "was written. Restore them to append to the corpus. `fmsdata index` without --append makes a new "
            "beginning, with which no saved run resumes"
        )
    if differences:
        known = {name: shard for name, shard in known.items() if name not in different}
        notes.append(
            f"warning: {few(differences, SHOWN, '; ')}: a run that has read this source does not resume with that, "
            "unless the names and counts of its shards are the same"
        )
    added = [entry.name for entry in entries if entry.name not in known] if known else []
    newest = max((shard.generation for shard in known.values()), default=0)
    appended = min(manifest.appended, newest) if manifest is not None else 0  # the newest ones may be gone
    if added:
        newest += 1
    if append:
        if not added:
            notes.append(_nothing_new(newest > appended))
        appended = newest
    elif new := [name for name in added if name not in different]:
        notes.append(
            f"warning: {counted(len(new), 'shard')} new, such as {new[0]}: a run that has begun does not resume "
            "with more shards; run `fmsdata index --append` to let it read them from the next epoch on"
        )
    generations = [known[entry.name].generation if entry.name in known else newest for entry in entries]
    growth = Growth(generations, appended) if known and newest else None
    unkept = [entry for entry in entries if entry.name in known] if added and manifest is None else []
    return Grown(growth, len(added), notes, unkept)


def _nothing_new(unread: bool) -> str:
    if unread:
        return "no new shards since the last index; runs may read those that it found from the next epoch on"
    return (
        "no new shards: nothing was appended. If a run does not resume because of shards that were indexed as old "
        f"ones, {AGAIN}"
    )


def _manifest(root: Location, *, append: bool) -> tuple[Manifest | None, list[str]]:
    """The manifest, if there is a readable one, and what to say of it."""
    try:
        return manifest_of(root), []
    except FmsdataError as error:  # it is damaged
        if append:
            raise
        lost = str(error).partition("; ")[0]
        return None, [
            f"warning: {lost}, so the history of the corpus is lost: all shards count as old now. If a run does not "
            f"resume with that, {AGAIN}"
        ]


def _of_manifest(manifest: Manifest | None) -> dict[str, _Known]:
    rows = None if manifest is None else manifest.rows("")
    if rows is None:
        return {}
    columns = rows.sizes.tolist(), rows.documents.tolist(), rows.tokens.tolist()
    generations = [0] * len(rows) if rows.generations is None else rows.generations.tolist()
    return {
        name: _Known(size, (documents, tokens), generation)
        for name, size, documents, tokens, generation in zip(rows.names, *columns, generations, strict=True)
    }


def _of_counts(root: Location, entries: Sequence[Entry]) -> dict[str, _Known]:
    """The shards in the counts beside a corpus without a manifest."""
    return {name: _Known(None, count, 0) for name, count in all_counts(root, [entry.name for entry in entries]).items()}


def _differences(
    known: Mapping[str, _Known], entries: Sequence[Entry], counts: Mapping[str, Count]
) -> Iterator[tuple[str, str]]:
    """The shards that are not as they were, and what happened to them, in words."""
    sizes = {entry.name: entry.size for entry in entries}
    for name, (size, held, _) in known.items():
        if name not in sizes:
            yield name, f"{name} is gone"
        elif counts[name] != held:
            yield name, f"{name} had {_words(held)}, and has {_words(counts[name])} now"
        elif size is not None and size != sizes[name]:
            yield name, f"{name} had {counted(size, 'byte')}, and has {sizes[name]:,} now"


def _words(count: Count) -> str:
    return f"{counted(count[0], 'document')} and {counted(count[1], 'token')}"
