"""Differences between two descriptions of a pipeline, in words: for errors and for the log."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fmsdata.core.state import State
from fmsdata.core.wording import counted
from fmsdata.corpus.listing import by_kind
from fmsdata.stages.shard_reader import ShardReader


def differences(saved: Any, now: Any, where: str, readers: Mapping[str, ShardReader]) -> Iterator[str]:
    """Every difference between the saved description of a stage and its current one.

    `readers` are those of the current one, by full name.
    """
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        if saved.get("stage") == now.get("stage") == "ShardReader":
            if saved.get("digest") != now["digest"]:
                yield (
                    f"the shards of source {where or 'below'!r} changed: "
                    f"{_shards(saved)} when it was saved, {_shards(now)} now{_way_out(saved, now, readers)}"
                )
                return
            if saved.get("generations") != now.get("generations"):
                yield (
                    f"source {where or 'below'!r} has grown in this run, and which shards were there before is not "
                    "known any more; restore meta/fmsdata-manifest.ipc of the corpus, as `fmsdata index --append` "
                    "wrote it, or make it again: move the shards that were appended away, run `fmsdata index`, move "
                    "them back, and run `fmsdata index --append`"
                )
                return
        if saved.get("stage") == now.get("stage") == "Tokenize" and saved.get("tokenizer") != now["tokenizer"]:
            yield (
                f"the tokenizer of source {where or 'below'!r} changed: "
                f"{saved.get('tokenizer')} when it was saved, {now['tokenizer']} now"
            )
            return
        if saved.get("stage") != now.get("stage"):
            yield f"{saved.get('stage')} when it was saved, {now.get('stage')} now"
            return
        for name in sorted(set(saved) | set(now)):
            inner = where if name in ("children", "below") else f"{where}/{name}".lstrip("/")
            if name not in now:
                yield f"{inner} is gone"
            elif name not in saved:
                yield f"{inner} is new"
            else:
                yield from differences(saved[name], now[name], inner, readers)
    elif saved != now:
        yield f"{where} was {saved} when it was saved and is {now} now"


def changes_of_lines(saved: Sequence[State], now: Sequence[State]) -> Iterator[str]:
    """Every changed parameter of the stages above the mixture."""
    for old, new in zip(saved, now, strict=True):
        for name in dict.fromkeys([*parameters(new), *parameters(old)]):
            before, value = old.get(name), new.get(name)
            if before == value:
                continue
            if name == "seq_len":
                yield f"line length {before} -> {value} tokens"
            else:
                yield f"{new['stage'].lower()} {name} {before} -> {value}"


def changes_of_mixture(saved: State, now: State, removed: State) -> Iterator[str]:
    """Every changed source, share and phase. `removed` are the sources that were already gone."""
    for name in sorted(saved["children"].keys() | now["children"].keys()):
        old, new = saved["weights"].get(name), now["weights"].get(name)
        if new is None:
            yield f"source {name!r} is removed, and keeps its position"
        elif old is None:
            how = "back at its old position" if name in removed else "new"
            yield f"source {name!r} is {how}, with {new:.4%} of the tokens"
        elif old != new:
            yield f"share of {name!r} {old:.4%} -> {new:.4%}"
        epochs = [lowest(mixture["children"].get(name, {})).get("max_epochs") for mixture in (saved, now)]
        if old is not None and new is not None and epochs[0] != epochs[1]:
            yield f"max_epochs of {name!r} {epochs[0]} -> {epochs[1]}"
    if saved["phases"] != now["phases"]:
        yield f"phases {_in_words(saved['phases'])} -> {_in_words(now['phases'])}"


def lowest(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of the lowest stage of a source: the reader below `Tokenize` and others."""
    while isinstance(children := description.get("children"), Mapping) and list(children) == ["below"]:
        description = children["below"]
    return description


def parameters(description: State) -> State:
    """The parameters in the description of a stage."""
    return {name: value for name, value in description.items() if name not in ("stage", "children")}


def _shards(reader: Mapping[str, Any]) -> str:
    def number(name: str) -> str:
        value = reader.get(name)
        return counted(value, name[:-1]) if isinstance(value, int) else f"? {name}"

    return f"{', '.join(map(number, ('shards', 'documents', 'tokens')))} ({reader.get('digest', '?')!s:.6})"


def _way_out(saved: Mapping[str, Any], now: Mapping[str, Any], readers: Mapping[str, ShardReader]) -> str:
    """How to go on, if the shards may be those of before and more."""
    before, after, reader = saved.get("shards"), now["shards"], readers.get(str(now.get("source")))
    if not isinstance(before, int) or before >= after or now.get("column") != saved.get("column") or reader is None:
        return ""
    if reader.files is None and by_kind(reader.counts.shards[:1])[0]:
        how = "run `fmsdata index --append`: it lets the run read them from the next epoch on"
    else:  # text, or selected files
        how = "name the old files in `files`, and give the new ones a source of their own"
    return f" (if shards were only added, {how})"


def _in_words(phases: Sequence[State]) -> str:
    def describe(phase: State) -> str:
        until = "to the end" if phase["until_tokens"] is None else f"until {phase['until_tokens']:,} tokens"
        return f"{until} " + ", ".join(f"{name} {share:.4%}" for name, share in phase["weights"].items() if share)

    return f"({'; '.join(map(describe, phases))})" if phases else "none"
