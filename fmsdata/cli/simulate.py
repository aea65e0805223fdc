"""`fmsdata simulate`: what a run of any size will ask of its store, before it has a cluster."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmsdata.cli.common import (
    ENDLESS,
    AsJson,
    ConfigFile,
    Overrides,
    Section,
    console,
    duration,
    print_json,
    short,
    short_bytes,
)
from fmsdata.cli.plan import count_of_tokens

if TYPE_CHECKING:
    from rich.console import Console

TOKENS_PER_SECOND = 10_000.0  # of a GPU: about an 8B model on an H100
PER_MILLION = 0.40  # dollars for a million GET requests of S3, in 2024
PER_GB = 0.0  # within a region
SHOWN = 12  # sources of the table


def simulate(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="The number of nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node; each is a data-parallel rank.")] = 8,
    tokens: Annotated[
        str | None,
        typer.Option(help="The tokens of the whole run, such as 10T.", show_default="all tokens of the corpus"),
    ] = None,
    tokens_per_second: Annotated[float, typer.Option(min=1, help="Tokens per second that a GPU trains on.")] = (
        TOKENS_PER_SECOND
    ),
    price_per_million_requests: Annotated[
        float, typer.Option(min=0, help="Dollars for a million requests: an assumption, look it up.")
    ] = PER_MILLION,
    price_per_gb: Annotated[
        float, typer.Option(min=0, help="Dollars for a gigabyte: an assumption; within a region it is free.")
    ] = PER_GB,
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks to sample.")] = 4,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Moments of the run to look at.")] = 16,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write plots to this folder, as SVG.", show_default=False)
    ] = None,
    section: Section = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run of any size: requests, bytes, drift, mix, state size, start, and cost.

    The real planning code runs on sampled ranks: it cuts and orders all blocks that they read in the
    whole run, and asks for the byte ranges of some of them. No stream is read. A corpus on a local
    disk is simulated as if it were in an object store.

    Example: fmsdata simulate run.yaml --nodes 1024 --gpus 8 --tokens 10T lanes=8192
    """
    from fmsdata.cli.run import open_run
    from fmsdata.run.simulation.simulate import Assumptions
    from fmsdata.run.simulation.simulate import simulate as simulated

    began = time.perf_counter()
    run = open_run(config, overrides, section, finite=False)
    planned = time.perf_counter() - began
    given = Assumptions(
        nodes=nodes,
        gpus=gpus,
        tokens=count_of_tokens(tokens) if tokens is not None else sum(run.data.source_sizes.values()),
        tokens_per_second=tokens_per_second,
        price_per_million_requests=price_per_million_requests,
        price_per_gb=price_per_gb,
        ranks=ranks,
        points=points,
    )
    report = simulated(run.data, run.mixture, run.readers, max(1, run.num_workers), given)
    report["start"]["seconds_to_plan"] = planned
    report["assumptions"] = {
        "tokens_per_second_per_gpu": tokens_per_second,
        "dollars_per_million_requests": price_per_million_requests,
        "dollars_per_gb": price_per_gb,
        "local_as_if_remote": any(reader.path.local is not None for reader in run.readers.values()),
    }
    report["nodes"], report["gpus"] = nodes, gpus
    report["finite_read_as_endless"] = run.was_finite
    if plots is not None:
        report["plots"] = [str(path) for path in _plot(report, plots)]
    if as_json:
        print_json(report)
    else:
        _print(report, console())


def _plot(report: dict[str, Any], folder: Path) -> list[Path]:
    from fmsdata.display.svg import Line, write_plot

    ends = report["at_tokens"]
    begins, sources = ends[:-1], report["sources"]
    spread = {name: source["epochs"] for name, source in sources.items()}
    drift = [
        Line(name, ends, [most - least for most, least in zip(each["most"], each["least"], strict=True)])
        for name, each in spread.items()
    ]
    mix = report["mix"]["realised"]
    drawn = {
        "requests": ("Requests per second on the store", [Line("all ranks", begins, report["requests_per_second"])]),
        "bytes": (
            "Megabytes per second of a node",
            [Line("a node", begins, [each / 1e6 for each in report["bytes_per_second_per_node"]])],
        ),
        "epochs": ("Epoch of each source, mean of the lanes", [Line(n, ends, e["mean"]) for n, e in spread.items()]),
        "drift": ("Epochs between the first and the last lane", drift),
        "mix": ("Share of each source in what a lane reads", [Line(name, begins, mix[name]) for name in mix]),
    }
    return [
        write_plot(folder / f"{name}.svg", title, lines, x="tokens of the run")
        for name, (title, lines) in drawn.items()
    ]


def _print(report: dict[str, Any], out: "Console") -> None:
    from fmsdata.core.wording import counted
    from fmsdata.display.printing import write, write_table

    given, start, state = report["assumptions"], report["start"], report["state"]
    write(
        out,
        f"{counted(report['world_size'], 'rank')} ({counted(report['nodes'], 'node')} of {report['gpus']}), "
        f"{counted(report['lanes'], 'lane')}, {short(report['tokens'])} tokens in {duration(report['seconds'])}",
        "bold",
    )
    if report["finite_read_as_endless"]:
        write(out, f"{ENDLESS}.")
    if given["local_as_if_remote"]:
        write(out, "The corpus is on a local disk, and was simulated as if it were in an object store.")
    columns = ("source", "tokens", "epochs", "drift", "shards", "requests/block", "bytes/token")
    ordered = sorted(report["sources"].items(), key=lambda item: -float(item[1]["tokens"]))
    rows = [
        (
            name,
            short(source["tokens"]),
            f"{source['epochs_read']:.3f}",
            f"{source['drift']:.3f}",
            short(source["shards"]),
            f"{source['requests_per_block']:.2f}",
            f"{source['bytes_per_token']:.2f}",
        )
        for name, source in ordered[:SHOWN]
    ]
    write_table(out, columns, rows, left=["source"], title="drift: epochs between the first and the last sampled lane")
    if len(ordered) > SHOWN:
        write(out, f"and {len(ordered) - SHOWN} more; --json has all", "dim")
    rates, node = report["requests_per_second"], report["bytes_per_second_per_node"]
    facts = (
        (
            "requests",
            f"{sum(rates) / len(rates):,.0f}/s",
            f"on the store on average, {max(rates):,.0f}/s at most; {short(report['requests'])} in all, "
            f"{short_bytes(report['bytes_per_request'])} each",
        ),
        (
            "bytes",
            f"{sum(node) / len(node) / 1e6:,.2f} MB/s",
            f"per node, {max(node) / 1e6:,.2f} at most; {short_bytes(report['bytes_per_node'])} per node and "
            f"{short_bytes(report['bytes'])} in all; nothing fetched twice, see `fmsdata plan` for whether windows fit",
        ),
        (
            "mix",
            f"{report['mix']['largest_difference']:.2%}",
            f"the largest difference to the planned share, over {short(report['mix']['tokens_of_a_lane'])} tokens of "
            "a lane",
        ),
        (
            "state",
            short_bytes(state["bytes_of_all_ranks"]),
            f"of all ranks, {short_bytes(state['bytes_of_a_lane'])} of a lane",
        ),
        (
            "start",
            f"{start['seconds_to_plan'] + start['seconds_to_open']:.2f} s",
            f"to plan and open {counted(start['lanes_of_a_rank'], 'lane')} here; then a window of "
            f"{short_bytes(start['bytes_of_a_window'])} per lane is fetched",
        ),
        ("resume", f"{start['seconds_to_plan'] + start['seconds_to_resume']:.2f} s", "the same from a saved state"),
        (
            "cost",
            f"${report['cost_dollars']:,.2f}",
            f"assuming ${given['dollars_per_million_requests']:g} per million requests and "
            f"${given['dollars_per_gb']:g} per GB",
        ),
    )
    names, values = (max(len(row[column]) for row in facts) for column in (0, 1))
    for name, value, words in facts:
        guide = f"{name:{names}}  {value:>{values}}  "
        write(out, words, "dim", guide=guide, indent=" " * len(guide), apart=True)
    write(
        out,
        f"assumed {given['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU; sampled "
        f"{counted(len(report['sampled']['ranks']), 'rank')} and {counted(report['sampled']['blocks'], 'block')}",
        "dim",
    )
    for path in report.get("plots", ()):
        write(out, f"wrote {path}")
