"""Logs the progress of a tiny training to TensorBoard at every step: tokens, mix, epochs, speed, waiting.

    python examples/stats_tensorboard.py --logs runs/stats
    tensorboard --logdir runs/stats

Without --data it reads the corpus of the demo, which it builds from Python's standard library.
"""

import argparse
import tempfile
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fmsdata
from fmsdata.cli.demo import write_corpus

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"


def summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit(f"this example needs TensorBoard ({error}): pip install tensorboard") from None
    return SummaryWriter


def train(loader: fmsdata.StatefulDataLoader, writer: Any, *, steps: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in islice(loader, steps):
        if (largest := int(batch["input_ids"].max())) >= vocabulary:
            raise SystemExit(
                f"the data has token {largest}, but --vocabulary is {vocabulary}; it must be larger than every token"
            )
        loss = functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stats = loader.stats()
        writer.add_scalar("loss", loss.item(), stats.step)
        for name, value in stats.as_scalars().items():
            writer.add_scalar(name, value, stats.step)
        if stats.step % 10 == 0:
            print(stats, flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description="Train a tiny model, and log the loader's stats to TensorBoard.")
    options.add_argument("--config", default=CONFIG, help="a configuration of fmsdata (default: the demo's)")
    options.add_argument("--data", help="folder of the corpus; overrides the configuration (default: the demo's)")
    options.add_argument("--logs", type=Path, default=Path("runs/stats"), help="folder for TensorBoard's files")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument(
        "--vocabulary", type=int, default=257, help="the number of token values; the demo's tokens are bytes"
    )
    arguments = options.parse_args()
    if arguments.steps < 1:
        options.error(f"--steps is {arguments.steps}; it must be at least 1")
    open_writer = summary_writer()
    with ExitStack() as stack:
        overrides = {"path": arguments.data} if arguments.data else {}
        if arguments.data is None and arguments.config == CONFIG:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fmsdata-stats-"))
            write_corpus(Path(folder))
            overrides = {"path": folder}
        try:
            loader = fmsdata.build_loader(arguments.config, overrides)
        except fmsdata.FmsdataError as error:
            raise SystemExit(str(error)) from None
        stack.callback(loader.close)
        writer = stack.enter_context(open_writer(str(arguments.logs)))
        train(loader, writer, steps=arguments.steps, vocabulary=arguments.vocabulary)


if __name__ == "__main__":
    main()
