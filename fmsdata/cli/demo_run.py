"""What `fmsdata demo` does: stream a corpus, stop, rescale, and check every sample on the way."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fmsdata import testing
from fmsdata.cli.demo import write_corpus
from fmsdata.cli.run import mixture_of
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.core.wording import counted
from fmsdata.display.printing import write, write_table
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.run.rescalable import Rescalable

STEPS = 40  # at each world size
EOS = 256  # the tokens are bytes
MARK = ".fmsdata-demo"  # a file that marks a folder as the demo's own
CONFIG: dict[str, Any] = {
    "seed": 42,
    "sources": {"code": {"weight": 3}, "docstrings": {"weight": 1}},
    "documents": {"eos": EOS, "tokenizer": "bytes"},
    "pack": {"seq_len": 512},
    "shuffle": {"window": 64},
    "lanes": 24,
    "loader": {"batch_size": 4, "outputs": ["provenance", "epochs"]},
}


def run_demo(folder: Path, console: Console) -> None:
    """Show everything the README promises, on one machine, in less than a minute."""
    if folder.exists() and not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--folder {folder} holds other files than the demo's corpus; give a new folder")
    with console.status("building a corpus from the standard library"):
        write_corpus(folder)
        (folder / MARK).write_text("The corpus of `fmsdata demo`, which may overwrite it at any time.\n")
    config = read_config({**CONFIG, "path": str(folder)})
    data = build_data(config)

    def make(rank: int, world_size: int) -> StatefulDataLoader:
        return make_loader(config, data, rank=rank, world_size=world_size)

    _show_corpus(data, console)
    _show_sample(make, console)
    _show_rescaling(make, console)
    _show_epoch(make, folder, console)
    write(console, "✓ Same stream, nothing lost, nothing twice.", "green")


def _show_corpus(data: Rescalable, console: Console) -> None:
    mixture = mixture_of(data)
    rows = [
        (name, f"{stage.size().documents:,}", f"{stage.size().tokens:,}", f"{mixture.weights[name]:.0%}")
        for name, stage in mixture.sources.items()
    ]
    title = "The corpus: Python's own standard library, byte by byte"
    write_table(console, ("source", "documents", "tokens", "share of the mix"), rows, left=["source"], title=title)
    console.print()


def _show_sample(make: testing.MakeLoader, console: Console) -> None:
    batch = next(iter(make(0, 1)))
    span = batch["provenance"][0][0]
    ids = batch["input_ids"][0].tolist()
    text = Text(bytes(token for token in ids[:160] if token != EOS).decode(errors="replace") + " ...")
    title = f"sample 0 starts with {span.source}/{span.shard}, document {span.document}, token {span.start}"
    write(console, f"{title}:", "bold")
    write(console, text)
    console.print()


def _show_rescaling(make: testing.MakeLoader, console: Console) -> None:
    """Stop and resume at other world sizes, and compare each sample with that of a single rank."""
    columns = ("ranks", "samples", "sha256 of the stream", "the same")
    rows = []
    batch_size = CONFIG["loader"]["batch_size"]
    alone = _rows(make(0, 1))
    states: list[Any] | None = None
    done = 0
    with console.status("streaming"):
        for world_size in (2, 6, 3, 8):
            loaders = [make(rank, world_size) for rank in range(world_size)]
            for loader in loaders:
                if states is not None:
                    loader.load_state_dict(states)
            count = STEPS * batch_size * world_size
            ranks = [_rows(loader) for loader in loaders]
            stream = [next(ranks[g % world_size]) for g in range(done, done + count)]
            same = stream == list(islice(alone, count))
            digest = hashlib.sha256(b"".join(stream)).hexdigest()[:16]
            rows.append((world_size, f"{done:,} to {done + count - 1:,}", digest, "yes" if same else "NO"))
            states = [loader.state_dict() for loader in loaders]
            done += count
            if not same:
                raise testing.LawBroken(
                    f"the stream on {counted(world_size, 'rank')} differs from the stream on 1 rank"
                )
    title = "Stopped and rescaled: each sample compared with an uninterrupted run on 1 rank"
    write_table(console, columns, rows, left=columns, title=title)
    console.print()


def _show_epoch(make: testing.MakeLoader, folder: Path, console: Console) -> None:
    """Read a whole epoch of both sources, at world sizes that don't even divide the lanes."""
    stored = testing.stored_documents({name: folder / name for name in CONFIG["sources"]})
    chain = (5, 7, 4, 1, 9)
    ranks = f"{', '.join(map(str, chain))} ranks in turn"
    with console.status(f"reading an epoch of both sources on {ranks}"):
        samples = testing.check_exactly_once(make, stored=stored, world_sizes=chain, steps=STEPS)
    write(
        console,
        f"One epoch on {ranks}, {counted(samples, 'sample')}: "
        f"each of the {counted(len(stored), 'document')} came exactly once, whole and in order.",
    )


def _rows(loader: StatefulDataLoader) -> Iterator[bytes]:
    for batch in loader:
        for row in batch["input_ids"]:
            yield row.numpy().tobytes()
