"""The demo: a corpus from what every Python installation has, streamed, stopped, rescaled and checked."""

import ast
import hashlib
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fmsdata import testing
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.corpus.index import write_index
from fmsdata.corpus.shard_writer import Layout, write_shard
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader

FILES, SHARDS, STEPS = 220, 4, 40
EOS = 0  # byte b is token b + 1
MARK = ".fmsdata-demo"  # a file that tells that a folder is the demo's own
CONFIG: dict[str, Any] = {
    "seed": 42,
    "sources": {"code": {"weight": 3}, "docstrings": {"weight": 1}},
    "documents": {"eos": EOS},
    "pack": {"seq_len": 512},
    "shuffle": {"window": 64},
    "lanes": 24,
    "loader": {"batch_size": 4, "outputs": ["provenance", "epochs"]},
}


def write_corpus(root: Path) -> None:
    """The standard library's sources as one source, its docstrings as another, as byte-level tokens."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(path.parts)]
    texts = [path.read_text(errors="ignore") for path in paths[:: max(1, len(paths) // FILES)]]
    sources = {"code": texts, "docstrings": [docstring for text in texts for docstring in _docstrings(text)]}
    layouts: dict[str, Layout] = {"code": "list", "docstrings": "batch"}
    for name, layout in layouts.items():
        documents = [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + 1 for text in sources[name]]
        for shard in range(SHARDS):
            write_shard(root / name / f"part-{shard}.arrow", documents[shard::SHARDS], dtype=np.uint16, layout=layout)
    write_index(root)


def run_demo(folder: Path | None, console: Console) -> None:
    """Everything the README promises, on one machine, in less than a minute."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="fmsdata-demo-") as made:
            run_demo(Path(made), console)
        return
    if folder.exists() and not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--folder {folder} holds something else than the demo's corpus; give a new folder")
    with console.status("building a corpus from the standard library"):
        write_corpus(folder)
        (folder / MARK).write_text("The corpus of `fmsdata demo`, which may be made anew at any time.\n")
    config = read_config({**CONFIG, "path": str(folder)})
    data = build_data(config)

    def make(rank: int, world_size: int) -> StatefulDataLoader:
        return make_loader(config, data, rank=rank, world_size=world_size)

    _show_corpus(data, console)
    _show_sample(make, console)
    _show_rescaling(make, console)
    _show_epoch(make, folder, console)
    console.print("[green]Same stream, nothing lost, nothing twice.[/]")


def _docstrings(text: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _look(console: Console) -> dict[str, Any]:
    """How tables look: with lines in a terminal, plain in a pipe."""
    return {"title_justify": "left", **({} if console.is_terminal else {"box": None})}


def _show_corpus(data: Any, console: Console) -> None:
    table = Table(title="The corpus: Python's own standard library, byte by byte", **_look(console))
    for name in ("source", "documents", "tokens", "share of the mix"):
        table.add_column(name, justify="left" if name == "source" else "right")
    mixture = data.lines.below.below.below
    for name, stage in mixture.sources.items():
        size = stage.size()
        table.add_row(name, f"{size.documents:,}", f"{size.tokens:,}", f"{mixture.weights[name]:.0%}")
    console.print(table)


def _show_sample(make: testing.MakeLoader, console: Console) -> None:
    batch = next(iter(make(0, 1)))
    span = batch["provenance"][0][0]
    ids = batch["input_ids"][0].tolist()
    shown = bytes(token - 1 for token in ids[:160] if token != EOS).decode(errors="replace")
    title = f"sample 0 starts with {span.source}/{span.shard}, document {span.document}, token {span.start}"
    text = Text(shown + " ...")
    if console.is_terminal:
        console.print(Panel(text, title=title, title_align="left"))
    else:
        console.print(f"{title}:\n", text, "\n", sep="")


def _show_rescaling(make: testing.MakeLoader, console: Console) -> None:
    """Stop and go on at other world sizes; every sample is the one that a single rank would have had in its place."""
    chain = (2, 6, 3, 8)
    table = Table(title="Stopped and rescaled: each sample against an uninterrupted run on 1 rank", **_look(console))
    for name in ("ranks", "samples", "sha256 of the stream", "the same"):
        table.add_column(name)
    batch_size = CONFIG["loader"]["batch_size"]
    alone = _rows(make(0, 1))
    states: list[Any] | None = None
    done = 0
    with console.status("streaming"):
        for world_size in chain:
            loaders = [make(rank, world_size) for rank in range(world_size)]
            for loader in loaders:
                if states is not None:
                    loader.load_state_dict(states)
            count = STEPS * batch_size * world_size
            ranks = [_rows(loader) for loader in loaders]
            stream = [next(ranks[g % world_size]) for g in range(done, done + count)]
            same = stream == list(islice(alone, count))
            digest = hashlib.sha256(b"".join(stream)).hexdigest()[:16]
            table.add_row(str(world_size), f"{done:,} to {done + count - 1:,}", digest, "yes" if same else "NO")
            states = [loader.state_dict() for loader in loaders]
            done += count
            if not same:
                raise testing.LawBroken(f"the stream on {world_size} ranks is not the one on 1")
    console.print(table)


def _show_epoch(make: testing.MakeLoader, folder: Path, console: Console) -> None:
    """A whole epoch of both sources, over world sizes that don't even divide the lanes."""
    stored = testing.stored_documents({name: folder / name for name in CONFIG["sources"]})
    chain = (5, 7, 4, 1, 9)
    with console.status(f"an epoch of everything on {', '.join(map(str, chain))} ranks in turn"):
        samples = testing.check_exactly_once(make, stored=stored, world_sizes=chain, steps=STEPS)
    console.print(
        f"One epoch on {', '.join(map(str, chain))} ranks in turn, {samples:,} samples: "
        f"each of the {len(stored):,} documents came exactly once, whole and in order."
    )


def _rows(loader: StatefulDataLoader) -> Iterator[bytes]:
    for batch in loader:
        for row in batch["input_ids"]:
            yield row.numpy().tobytes()
