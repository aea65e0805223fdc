"""`fmsdata demo`, and its corpus: the standard library of the Python that runs it."""

import ast
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fmsdata.cli.common import console
from fmsdata.corpus.index import write_index
from fmsdata.corpus.shard_writer import Layout, write_shard

FILES, SHARDS = 220, 4  # about this many files, and shards per source


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Keep the corpus of the demo in this folder.", show_default="a temporary folder")
    ] = None,
) -> None:
    """Build a small corpus, stream it, stop, rescale, and show that the stream stays the same."""
    from fmsdata.cli.demo_run import run_demo

    if folder is not None:
        run_demo(folder, console())
        return
    with tempfile.TemporaryDirectory(prefix="fmsdata-demo-") as temporary:
        run_demo(Path(temporary), console())


def write_corpus(root: Path) -> None:
    """Write the source code of the standard library as one source and its docstrings as another.

    Tokens are the bytes of UTF-8.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(path.parts)]
    texts = [path.read_text(errors="ignore") for path in paths[:: max(1, len(paths) // FILES)]]
    sources = {"code": texts, "docstrings": [docstring for text in texts for docstring in _docstrings(text)]}
    layouts: dict[str, Layout] = {"code": "list", "docstrings": "batch"}
    for name, layout in layouts.items():
        documents = [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in sources[name]]
        for shard in range(SHARDS):
            write_shard(root / name / f"part-{shard}.arrow", documents[shard::SHARDS], dtype=np.uint16, layout=layout)
    write_index(root)


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
