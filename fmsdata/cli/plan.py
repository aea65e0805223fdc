"""`fmsdata plan`: what a configuration will do, computed from counts alone."""

from typing import Annotated

import typer

from fmsdata.cli.common import AsJson, ConfigFile, Overrides, Section, WorldSize, console, print_json
from fmsdata.errors import ConfigError

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Report what the run will have read after this many tokens, such as 300e9, 300B or 1.5T.",
            show_default="all tokens of the corpus",
        ),
    ] = None,
    world_size: WorldSize = 1,
    section: Section = None,
    as_json: AsJson = False,
) -> None:
    """Show the pipeline, the mix, how often each source will be read, and what to look out for.

    Only counts are read, not the data: with a counts file (see `fmsdata index`) this takes moments,
    however large the corpus is. The exact length of a finite pass (`epochs`, `evaluation`) is planned
    from the lengths of its documents, which takes seconds for each billion tokens.

    Example: fmsdata plan run.yaml --tokens 300B --world-size 64 sources.wiki.weight=3
    """
    from fmsdata.cli.outlook import outlook
    from fmsdata.cli.run import open_run

    run = open_run(config, overrides, section, with_checkpoints=True)
    report = outlook(run, None if tokens is None else count_of_tokens(tokens), world_size)
    if as_json:
        print_json(report)
        return
    from fmsdata.cli.plan_report import print_plan

    print_plan(report, run.data, console())


def count_of_tokens(text: str) -> int:
    """A number of tokens as people write it.

    >>> count_of_tokens("1.5T"), count_of_tokens("300e9")
    (1500000000000, 300000000000)
    """
    plain = text.strip().lower().replace("_", "").replace(",", "")
    unit = UNITS.get(plain[-1:], 1)
    try:
        count = float(plain[:-1] if unit > 1 else plain) * unit
        if not 1 <= count < 1e18:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--tokens is {text!r}; write a number such as 300e9, 300B or 1.5T") from None
    return round(count)
