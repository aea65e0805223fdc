"""What people write with Accelerate: it must be exact, or an error that shows the line to write."""

import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import torch

import fmsdata
from fmsdata.integrations.accelerate import register
from tests.integrations.runner import report


def error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def read(loader: Any, batches: int) -> list[int]:
    return [row for _ in range(batches) for row in next(loader)["input_ids"][:, 0].tolist()]


def main() -> None:
    warnings.simplefilter("error", fmsdata.errors.FmsdataWarning)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    found: dict[str, Any] = {}

    naive = accelerator.prepare(fmsdata.build_loader("run.yaml"))
    found["not registered"] = error(lambda: read(naive, 1))
    warnings.simplefilter("ignore", fmsdata.errors.FmsdataWarning)
    read(naive, 1)
    found["left out"] = error(lambda: accelerator.save_state("left out"))
    accelerator.register_for_checkpointing(naive)
    found["registered as it is"] = error(lambda: accelerator.save_state("naive"))
    accelerator._custom_objects.clear()
    naive.keeper = "own"
    found["saved by the user"] = error(lambda: accelerator.save_state("own"))
    found["skips"] = error(lambda: accelerate.skip_first_batches(naive, 2))

    web, wiki = fmsdata.build_loader("run.yaml"), fmsdata.build_loader("run.yaml", {"seed": 5})
    accelerator.save_state("foreign")
    register(accelerator, web)
    found["one name for two"] = error(lambda: register(accelerator, wiki))
    found["a path"] = error(lambda: register(accelerator, "run.yaml"))  # type: ignore[arg-type]
    register(accelerator, wiki, "second.json")
    register(accelerator, wiki, "second.json")
    accelerator.wait_for_everyone()
    found["foreign"] = error(lambda: accelerator.load_state("foreign"))
    for _ in range(3):
        with accelerator.accumulate(model):
            read(web, 1)
    found["within an accumulation"] = error(lambda: accelerator.save_state("within"))
    with accelerator.accumulate(model):
        read(web, 1)
    read(wiki, 2)
    accelerator.save_state("two")
    accelerator.wait_for_everyone()
    found["two, on"] = [read(web, 2), read(wiki, 2)]
    accelerator.load_state("two")
    found["two, resumed"] = [read(web, 2), read(wiki, 2)]
    warnings.simplefilter("error", fmsdata.errors.FmsdataWarning)
    found["registered too late"] = error(lambda: register(accelerator, fmsdata.build_loader("run.yaml"), "late.json"))
    report(found)


if __name__ == "__main__":
    main()
