"""What people write with DeepSpeed: it must be exact, or an error that shows the line to write."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch

import fmsdata
from fmsdata.integrations.deepspeed import load_checkpoint, save_checkpoint
from tests.integrations.runner import report


def error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def main() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    model = torch.nn.Linear(1, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = fmsdata.build_loader("run.yaml")
    found: dict[str, Any] = {}

    def train() -> None:
        next(loader)
        engine.backward(engine(torch.ones(2, 1)).sum())
        engine.step()

    train()
    found["within an accumulation"] = error(lambda: save_checkpoint(engine, "within", loader))
    train()
    found["saved as it is"] = error(lambda: loader.state_dict())
    engine.save_checkpoint("naive", client_state={"loader": loader.state_dict(gather=False)})
    other = fmsdata.build_loader("run.yaml", {"loader.batch_size": 4})
    found["batch size"] = [
        error(lambda: save_checkpoint(engine, "sizes", other)),
        error(lambda: load_checkpoint(engine, "sizes", other)),
    ]
    found["foreign"] = error(lambda: load_checkpoint(engine, "naive", loader))
    _, mine = engine.load_checkpoint("naive")
    found["one rank"] = error(lambda: loader.load_state_dict(mine["loader"]))
    found["taken key"] = error(lambda: save_checkpoint(engine, "taken", loader, client_state={"fmsdata": 1}))
    save_checkpoint(engine, "right", loader, client_state={"mine": 7}, tag="some")
    after = next(loader)["input_ids"].tolist()
    path, mine = load_checkpoint(engine, "right", loader, tag="some")
    found["client state"] = [path is not None, mine["mine"], "fmsdata" in mine]
    found["resumed"] = next(loader)["input_ids"].tolist() == after
    found["nothing"] = load_checkpoint(engine, "nowhere", loader)
    found["dataset"] = error(lambda: engine.deepspeed_io(loader))
    report(found)


if __name__ == "__main__":
    main()
