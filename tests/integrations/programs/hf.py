"""What people write with the Trainer of transformers: it must be exact, or an error that shows the line to write."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

import fmsdata
from fmsdata.integrations.hf import Trainer, TrainerMixin
from fmsdata.loader.trainers import check_labels
from tests.integrations.runner import report

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def model() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **SHAPE))


def arguments(folder: str, **options: Any) -> Any:
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "save_steps": 2, **options}
    return transformers.TrainingArguments(folder, report_to="none", disable_tqdm=True, **options)


def error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "no error"


class Naive(transformers.Trainer):  # type: ignore[misc]
    """A loader of ours by the method that the docs of transformers name."""

    def __init__(self, loader: Any, folder: str, **options: Any) -> None:
        super().__init__(model(), arguments(folder, **options))
        self._own = loader

    def get_train_dataloader(self) -> Any:
        return self._own


def loader(**overrides: Any) -> fmsdata.StatefulDataLoader:
    return fmsdata.build_loader("run.yaml", {name.replace("__", "."): value for name, value in overrides.items()})


class ReadsAhead(Trainer):
    """Holds a batch back, as a version that prefetches would."""

    held: Any = None

    def get_batch_samples(self, batches: Any, count: int, device: Any) -> Any:
        read = [*([self.held] if self.held else []), *(next(batches) for _ in range(count + (self.held is None)))]
        self.held = read.pop()
        return read, self._get_num_items_in_batch(read, device)


def naive() -> dict[str, str]:
    shifted = {"task": "causal_lm", "pack__seq_len": 7}
    found = {"shifted": error(lambda: Naive(loader(**shifted), "shifted").train())}
    found["no position"] = error(lambda: Naive(loader(), "naive", max_steps=2).train())
    again = loader()
    again.keeper = "nothing"  # as if the warning had been overlooked
    Naive(again, "naive", max_steps=2).train()
    checkpoint = "naive/checkpoint-2"
    found["skips"] = error(lambda: Naive(loader(), "naive").train(checkpoint))
    found["restarts"] = error(lambda: Naive(loader(), "naive", ignore_data_skip=True).train(checkpoint))
    trainer = Trainer(model(), arguments("naive"), train_dataset=loader())
    found["nowhere"] = error(lambda: trainer.train("nowhere/checkpoint-2"))
    found["foreign"] = error(lambda: trainer.train(checkpoint))
    for name in ("dataset", "sampler", "batch_sampler"):
        found[name] = error(lambda name=name: getattr(loader(), name))  # type: ignore[misc]
        assert not hasattr(loader(), name)
    plain = transformers.Trainer(model(), arguments("plain", max_steps=1), train_dataset=loader())
    found["plain trainer"] = error(plain.train)
    plain = transformers.Trainer(model(), arguments("plain", max_steps=1), train_dataset=loader().data)
    found["default collator"] = error(plain.train)
    found["ahead"] = error(ReadsAhead(model(), arguments("ahead"), train_dataset=loader()).train)
    found["search"] = error(lambda: trainer.train(trial={"learning_rate": 1}))
    return found


class Wrapped(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose model is sharded, and below that has adapters, as peft adds them."""

    def __init__(self) -> None:
        adapted = torch.nn.Module()
        adapted.get_base_model = model  # type: ignore[assignment]
        self.model = torch.nn.Module()
        self.model.module = adapted
        self.compute_loss_func = None


def refused() -> dict[str, str]:
    def train(loader: Any, evaluation: Any = None, **options: Any) -> str:
        return error(
            lambda: Trainer(model(), arguments("refused", **options), train_dataset=loader, eval_dataset=evaluation)
        )

    return {
        "shifted": train(loader(task="causal_lm", pack__seq_len=7)),
        "shifted, wrapped": error(lambda: check_labels(Wrapped(), fmsdata.CausalLM())),
        "batch size": train(loader(), per_device_train_batch_size=3),
        "search": train(loader(), auto_find_batch_size=True),
        "own folder": train(loader(checkpoint={"path": "checkpoints", "every": 2})),
        "length": train(loader(loader__steps=5), gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2),
        "length, max_steps": train(loader(loader__steps=5), gradient_accumulation_steps=2, max_steps=2),
        "evaluation": train(fmsdata.build_loader("evaluation.yaml")),
        "evaluation of a stream": train(loader(), loader(loader__steps=2)),
        "evaluation that is filled up": train(
            loader(), fmsdata.build_loader("evaluation.yaml", {"evaluation": {"samples": 7}})
        ),
        "evaluation that is too small": train(
            loader(), fmsdata.build_loader("evaluation.yaml", {"evaluation": {"samples": 1}})
        ),
        "path": train("run.yaml"),
        "ranks": train(fmsdata.build_loader("run.yaml", rank=0, world_size=3)),
    }


class Own(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """A subclass of somebody's own, with the mixin."""


def epochs(resumes: bool) -> list[float]:
    """Epochs of 6 batches, 3 of them; the run is killed in the second."""
    options = {"gradient_accumulation_steps": 2, "save_steps": 2, "logging_steps": 1, "max_steps": -1}
    trainer = Own(model(), arguments("epochs", num_train_epochs=3, **options), train_dataset=loader(loader__steps=6))
    trainer.train(resume_from_checkpoint=resumes)
    return [line["epoch"] for line in trainer.state.log_history if "loss" in line]


class NumberedRows:
    """A map-style dataset: row n has the tokens n, n + 1, ..."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.arange(index, index + 4)
        return {"input_ids": tokens, "labels": tokens}


def rows(resumes: bool) -> list[int]:
    """Two epochs of 12 rows. Returns those of the second, in its order."""
    data = NumberedRows()
    sampler = fmsdata.EpochSampler(data, global_batch=2)
    short = [data[row] for row in range(8)]
    some = fmsdata.StatefulDataLoader(short, sampler=fmsdata.EpochSampler(short, global_batch=2), batch_size=2)
    batches = fmsdata.StatefulDataLoader(data, sampler=sampler, batch_size=2)
    trainer = Own(model(), arguments("rows", num_train_epochs=2, max_steps=-1, save_steps=4), train_dataset=batches)
    trainer.evaluate(some)
    trainer.train(resume_from_checkpoint=resumes)
    again = fmsdata.EpochSampler(data, global_batch=2)
    again.set_epoch(1)
    return list(again)


def evaluated() -> list[float]:
    """The loss of an evaluation set, three times."""
    transformers.set_seed(0)
    evaluation = fmsdata.build_loader("evaluation.yaml")
    trainer = Trainer(model(), arguments("evaluated"), train_dataset=loader(), eval_dataset={"set": evaluation})
    return [*(trainer.evaluate()["eval_set_loss"] for _ in range(2)), trainer.predict(evaluation).metrics["test_loss"]]


def counting() -> list[int]:
    """How a model that was trained on 0, 1, 2, ... continues 50, ..., 59."""
    transformers.set_seed(0)
    options: dict[str, Any] = {"learning_rate": 0.02, "save_strategy": "no", "per_device_train_batch_size": 16}
    trainer = Trainer(
        model(), arguments("counting", max_steps=150, **options), train_dataset=loader(loader__batch_size=16)
    )
    trainer.train()
    prompt = torch.arange(50, 60)[None]
    answer = trainer.model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=511)
    return [int(token) for token in answer[0, 10:]]


def main() -> None:
    programs: dict[str, Callable[[], Any]] = {
        "naive": naive,
        "refused": refused,
        "epochs": lambda: epochs(os.path.isdir("epochs")),
        "rows": lambda: rows(os.path.isdir("rows")),
        "evaluated": evaluated,
        "counting": counting,
    }
    warnings.simplefilter("error", fmsdata.errors.FmsdataWarning)
    report(programs[sys.argv[1]]())


if __name__ == "__main__":
    main()
