"""What an external loader is in Megatron-core: its groups, its names, its wrapper of iterators, its errors."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

import fmsdata
from fmsdata.integrations.megatron import ExternalLoader
from tests.integrations.runner import report


def error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


def ours(**options: Any) -> Any:
    with_outputs = {"loader.outputs": ["document_ids", "position_ids"], **options}
    return next(fmsdata.build_loader("run.yaml", with_outputs, rank=0, world_size=1))


torch.distributed.init_process_group("gloo")
found: dict[str, Any] = {"too early": error(lambda: ExternalLoader("run.yaml"))}
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
padded = {"pack.mode": "pad", "pack.pad": 0, "pack.seq_len": 20, "loader.batch_size": 1}
loader = ExternalLoader("run.yaml", padded, reset_position_ids=True, reset_attention_mask=True)
found["rank"] = [loader.loader.rank, loader.loader.world_size]
iterator = RerunDataIterator(loader)
found["batch"] = plain(next(iterator))
found["ours"] = plain({name: value for name, value in ours(**padded).items() if torch.is_tensor(value)})
found["saved"] = iterator.iterable.save_state()["step"]
state = loader.save_state()
later = [plain(next(loader)) for _ in range(3)]
loader.restore_state(state)
found["restored"] = [plain(next(loader)) for _ in range(3)] == later
found["defaults"] = plain(next(ExternalLoader("run.yaml", padded)))
found["no mask"] = sorted(next(ExternalLoader("run.yaml", attention_mask=False)))
evaluation = ExternalLoader("evaluation.yaml")
found["evaluation"] = [next(evaluation)["tokens"][:, 0].tolist() for _ in range(8)]
found["shift"] = error(lambda: ExternalLoader("run.yaml", {"task": {"name": "causal_lm", "shift": False}}))
without: Any = lambda **ranks: fmsdata.build_loader("run.yaml", **ranks)  # noqa: E731
found["outputs"] = error(lambda: ExternalLoader(without, reset_position_ids=True))
report(found)
