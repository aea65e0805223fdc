"""The obvious way to use a loader in each trainer: train, save, and resume when started again. Nothing of fmsdata's
own for trainers is used, so that this also runs with versions that have none.

The arguments are the name of a way and what is done: `train` or `resume`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import fmsdata
from tests.integrations.runner import report

BATCHES = 4  # that are trained on before the checkpoint, and again after it
RESUMES = len(sys.argv) > 2 and sys.argv[2] == "resume"


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(1000, 4), torch.nn.Linear(4, 1000))


def loss_of(model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch["input_ids"]).mT, batch["labels"])


def accelerate(registers: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, fmsdata.build_loader("run.yaml"))
    if registers:
        accelerator.register_for_checkpointing(loader)
    if RESUMES:
        accelerator.load_state("checkpoint")
    for _, batch in zip(range(BATCHES), loader, strict=False):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("checkpoint")


def lightning(devices: int, **options: Any) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch: Any) -> Any:
            if not options.get("records"):
                return loss_of(self.layers, batch)
            with open(f"launched-{self.global_rank}.txt", "a") as file:
                file.write("".join(f"{row}\n" for row in batch["input_ids"][:, 0].tolist()))
            return loss_of(self.layers, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=options.get("strategy", "auto"),
        max_steps=2 * BATCHES if RESUMES else BATCHES,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=BATCHES, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), fmsdata.build_loader("run.yaml"), ckpt_path="checkpoints/last.ckpt" if RESUMES else None)


def lightning_launches() -> None:
    """Lightning starts the second process itself."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    lightning(2, strategy="ddp_fork", records=True)
    report([[int(row) for row in Path(f"launched-{rank}.txt").read_text().split()] for rank in range(2)])


def deepspeed() -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    model = network()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = fmsdata.build_loader("run.yaml")
    if RESUMES:
        _, client_state = engine.load_checkpoint("checkpoints")
        loader.load_state_dict(client_state["loader"])
    for _, batch in zip(range(BATCHES), loader, strict=False):
        engine.backward(loss_of(engine, batch))
        engine.step()
    engine.save_checkpoint("checkpoints", client_state={"loader": loader.state_dict()})


def ray() -> None:
    """The function that a worker runs. What Ray knows of a worker is given, so that no cluster has to start."""
    from ray.train.torch import prepare_data_loader

    context = SimpleNamespace(get_world_size=lambda: 1, get_world_rank=lambda: 0)
    loader, model = fmsdata.build_loader("run.yaml"), network()
    if RESUMES:
        loader.load_state_dict(torch.load("state.pt", weights_only=False))
    with (
        patch("ray.train.get_context", lambda: context),
        patch("ray.train.torch.get_device", lambda: torch.device("cpu")),
    ):
        prepared: Any = prepare_data_loader(loader)  # type: ignore[arg-type]
        for _, batch in zip(range(BATCHES), prepared, strict=False):
            loss_of(model, batch).backward()
    torch.save(loader.state_dict(), "state.pt")


def megatron() -> None:
    """Both processes are one tensor-parallel group: they must read the same."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    loader, model = fmsdata.build_loader("run.yaml"), network()
    for _, batch in zip(range(BATCHES), loader, strict=False):
        loss_of(model, batch).backward()


def hf_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))


def hf_arguments(**options: Any) -> Any:
    from transformers import TrainingArguments

    options = {"per_device_train_batch_size": 2, "save_steps": BATCHES, **options}
    return TrainingArguments("hf", report_to="none", disable_tqdm=True, **options)


def hf(**options: Any) -> None:
    """With a loss of its own, for labels that are shifted."""
    from transformers import Trainer

    class Naive(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return fmsdata.build_loader("run.yaml")

    trainer = Naive(
        hf_model(),
        hf_arguments(max_steps=2 * BATCHES if RESUMES else BATCHES, **options),
        compute_loss_func=lambda outputs, labels, **_: torch.nn.functional.cross_entropy(outputs.logits.mT, labels),
    )
    trainer.train(resume_from_checkpoint="hf/checkpoint-4" if RESUMES else None)


def hf_shifts() -> None:
    """How a model that was trained on 0, 1, 2, ... continues 50, ..., 59: with 60, unless labels are shifted twice."""
    import transformers

    transformers.set_seed(0)
    from transformers import Trainer

    class Naive(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return fmsdata.build_loader("run.yaml", {"loader.batch_size": 16})

    sizes = {"max_steps": 150, "per_device_train_batch_size": 16, "save_strategy": "no", "learning_rate": 0.02}
    trainer = Naive(hf_model(), hf_arguments(**sizes))
    trainer.train()
    answer = trainer.model.generate(
        torch.arange(50, 60)[None], max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=511
    )
    report(int(answer[0, 10]))


def hf_collates() -> None:
    from transformers import Trainer

    data = fmsdata.build_loader("run.yaml").data
    Trainer(hf_model(), hf_arguments(max_steps=BATCHES), train_dataset=data).train()


WAYS: dict[str, Callable[[], None]] = {
    "accelerate, prepared": lambda: accelerate(registers=False),
    "accelerate, registered": lambda: accelerate(registers=True),
    "lightning": lambda: lightning(1),
    "lightning, 2 ranks": lambda: lightning(2, strategy="ddp"),
    "lightning, launched": lightning_launches,
    "deepspeed": deepspeed,
    "ray": ray,
    "megatron": megatron,
    "hf, resumed": hf,
    "hf, ignore_data_skip": lambda: hf(ignore_data_skip=True),
    "hf, labels": hf_shifts,
    "hf, collator": hf_collates,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
