"""The matrix of trainers in the README and the docs, made from the tests: a cell is filled if its test exists.

`python -m tests.integrations.matrix` writes it into the pages.
"""

import ast
import re
from pathlib import Path

from tests.integrations.environment import ROOT, versions

PAGES = ("README.md", "docs/trainers/index.md")
BEGIN, END = "<!-- the matrix of trainers -->", "<!-- end of the matrix -->"

# trainer: (page, file of its tests, package)
TRAINERS = {
    "Hugging Face Trainer": ("huggingface", "test_hf", "transformers"),
    "Accelerate": ("accelerate", "test_accelerate", "accelerate"),
    "Lightning": ("lightning", "test_lightning", "lightning"),
    "torchtitan": ("torchtitan", "test_torchtitan", "torchtitan"),
    "DeepSpeed": ("deepspeed", "test_deepspeed", "deepspeed"),
    "Ray Train": ("ray", "test_ray", "ray"),
    "Megatron-core": ("megatron", "test_megatron", "megatron-core"),
    "PyTorch DCP, with DDP and FSDP2": ("torch", "test_torch", "torch"),
}
# column: what a cell says, and the names of tests that fill it
COLUMNS = {
    "killed, resumed on 2 → 1 and 1 → 2 processes, gradients of 2 batches": (
        "exact",
        {
            "test_the_page_resumes_exactly_on_another_number_of_processes",
            "test_a_run_that_is_killed_resumes_on_another_number_of_processes",
            "test_a_run_that_is_killed_resumes_at_another_degree",
            "test_a_run_that_is_killed_resumes_at_another_size",
            "test_workers_that_are_killed_are_resumed_by_another_number_of_them",
        },
    ),
    "evaluation in between": (
        "the same set each time",
        {
            "test_evaluation_in_between_reads_the_same_set_each_time",
            "test_each_evaluation_reads_its_set_from_the_top",
        },
    ),
    "ways that would be silently wrong": (
        "refused",
        {
            "test_the_naive_ways_show_the_right_line",
            "test_what_would_be_silently_wrong_is_refused",
            "test_a_loader_that_ray_prepares_is_refused",
        },
    ),
}


def table(page: str) -> str:
    """The matrix, with links that work on a page."""
    up = "../" * page.count("/")
    found = versions([package for *_, package in TRAINERS.values()])
    rows = [["trainer", "version", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for name, (guide, module, package) in TRAINERS.items():
        tests = f"tests/integrations/{module}.py"
        names = _functions(ROOT / tests)
        cells = [f"[{says}]({up}{tests})" if names & wanted else "" for says, wanted in COLUMNS.values()]
        link = f"{up}docs/trainers/{guide}.md" if page == "README.md" else f"{guide}.md"
        rows.append([f"[{name}]({link})", str(found[package]).partition("+")[0], *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def written(page: str) -> str:
    """A page, with the matrix of now."""
    text = (ROOT / page).read_text()
    return re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n\n{table(page)}\n\n{END}", text, flags=re.DOTALL)


def _functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body if path.exists() else []
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(written(page))
