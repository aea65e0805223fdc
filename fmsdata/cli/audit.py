"""`fmsdata audit`: laws 1 and 2, proved on the user's own data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from fmsdata import testing
from fmsdata.cli.common import (
    AsJson,
    ConfigFile,
    Overrides,
    console,
    live,
    parse_overrides,
    print_json,
    without_checkpoint,
)
from fmsdata.cli.plan import mixture_of
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.config.sections import Config
from fmsdata.core.stage import Stage
from fmsdata.errors import ConfigError
from fmsdata.loader.loader import StatefulDataLoader
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.shares import leaves
from fmsdata.stages.mixture import expected_tokens
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.tasks.causal_lm import CausalLM

LEAST_SAMPLES, MOST_SAMPLES = 2_000, 10_000  # without being asked for others; in between, two windows of each lane
PATIENCE = 20  # times the samples that an epoch takes on average, before it gives up
NEVER = 1e6  # times the corpus is read, and a source still had no epoch
LARGEST = 64  # world size that is simulated without being asked for


def audit(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many samples from the start of the stream to check; with --epoch, how many it may take at most.",
            show_default=f"two windows of each lane, but {LEAST_SAMPLES} to {MOST_SAMPLES}",
        ),
    ] = None,
    epoch: Annotated[
        bool, typer.Option("--epoch", help="Check law 2 on a whole epoch of every source. Reads all of the corpus.")
    ] = False,
    world_sizes: Annotated[
        str | None,
        typer.Option(help="The world sizes to simulate, such as 1,2,3,8.", show_default="some up to the lanes"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove on your own data that the stream is the same at any scale and that no token is lost or comes twice.

    Law 1, same stream: at world sizes that divide the lanes, each sample is the same, bit for bit, on the rank that
    must hand it out. Law 2, exactly once: a run that is stopped and rescaled again and again, also to world sizes that
    don't divide the lanes, hands out what an unbroken run does, with the tokens that are stored. All ranks are
    simulated in this process; the run's checkpoints are neither read nor written. Exit code 1 if a law does not hold.

    Example: fmsdata audit run.yaml --samples 20000 --world-sizes 8,64,48
    """
    told = read_config(config, without_checkpoint(parse_overrides(overrides)))
    data = build_data(told)
    audited = Audit(
        config=told,
        data=data,
        samples=samples,
        epoch=epoch,
        world_sizes=_chosen(world_sizes, data.lanes),
    )
    with live() as bar:
        report = audited.run(bar)
    if as_json:
        print_json(asdict(report))
    else:
        _show(report, console())
    if report.broken:
        raise typer.Exit(1)


@dataclass(kw_only=True)
class Report:
    """What was checked, in numbers and in words, and what came of it."""

    holds: bool = True
    broken: str | None = None
    lanes: int
    sources: list[str]
    world_sizes: list[int] = field(default_factory=list)  # that law 1 was checked at
    compared: int = 0  # samples, at each of them
    fields: list[str] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # the world sizes of law 2, in turn
    resumes: int = 0
    samples: int = 0
    tokens: int = 0
    documents: int = 0
    documents_whole: int = 0
    epochs_begun: dict[str, int] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Laws 1 and 2 on what one configuration reads."""

    config: Config
    data: Rescalable
    samples: int | None
    epoch: bool
    world_sizes: Sequence[int]

    def run(self, bar: Bar) -> Report:
        """Check both laws, up to the first that does not hold."""
        report = Report(lanes=self.data.lanes, sources=sorted(_readers(self.data.lines)), chain=list(self.world_sizes))
        try:
            self._same_stream(report, bar)
            self._exactly_once(report, bar)
        except testing.Incomplete as error:
            report.holds = False
            report.broken = (
                f"Law 2 is not shown: {error}. They are lost, or in a lane with far longer documents than the others: "
                "allow more with --samples to find out"
            )
        except testing.LawBroken as error:
            report.holds, report.broken = False, f"A law is broken: {error}"
            report.not_checked.append("All that would have come after that.")
        report.not_checked.append("Laws 3 to 6, and a configuration that is changed between stops.")
        return report

    @property
    def _compared(self) -> int:
        usual = min(max(2 * _window(self.data.lines) * self.data.lanes, LEAST_SAMPLES), MOST_SAMPLES)
        if self.samples is None:
            return usual
        return min(usual, self.samples) if self.epoch else self.samples

    def _same_stream(self, report: Report, bar: Bar) -> None:
        samples, workers = self._compared, self._configured(self.config.loader.num_workers)
        make = self._configured(0)
        dividing = sorted({one for one in self.world_sizes if self.data.lanes % one == 0 and one > 1})
        used = workers(0, 1).num_workers
        task = bar.add_task("law 1, same stream", total=samples * (2 + len(dividing) + 3 * bool(used)), note="")

        def progress(count: int) -> None:
            bar.advance(task, count)

        first = next(iter(make(0, 1)))
        testing.check_same_stream(make, world_sizes=dividing, samples=samples, progress=progress)
        report.world_sizes, report.compared = [1, *dividing], samples
        report.fields = sorted(testing.row_fields(first))
        if left_out := sorted(first.keys() - set(report.fields)):
            report.not_checked.append(f"Fields that have no entry for each row of a batch: {', '.join(left_out)}.")
        report.checked.append(
            f"Law 1, same stream: samples 0 to {samples - 1:,} are the same, bit for bit, at world sizes "
            f"{_listed(report.world_sizes)}, each from the rank that must hand it out. "
            f"Compared were {', '.join(report.fields)}."
        )
        if used:
            testing.check_same_stream(make, world_sizes=[], samples=samples, variants=[workers], progress=progress)
            report.checked.append(f"They are the same with {used} worker processes, at world size 1.")
        else:
            report.not_checked.append("Worker processes: the configuration has none.")
        if not dividing:
            report.not_checked.append("Law 1 on several ranks: no world size above 1 that divides the lanes was given.")
        if others := sorted(set(self.world_sizes) - {1, *dividing}):
            report.not_checked.append(
                f"The order at world sizes {_listed(others)}: they don't divide the {self.data.lanes} lanes, "
                "so only law 2 holds there."
            )

    def _exactly_once(self, report: Report, bar: Bar) -> None:
        documents, folders = self.config.documents, {name: one.path for name, one in _readers(self.data.lines).items()}
        stored = testing.StoredDocuments(
            folders, strip=documents.strip, min_length=documents.min_length, column=documents.column
        )
        account = testing.Account(stored, epochs=int(self.epoch))
        try:
            (self._whole_epoch if self.epoch else self._beginning)(account, bar)
        finally:
            report.resumes, report.samples, report.tokens = max(0, account.stops - 1), account.samples, account.tokens
            whole = account.whole.total()
            report.documents, report.documents_whole = whole + account.begun, whole
            report.epochs_begun = {source: epoch + 1 for source, epoch in sorted(account.latest.items())}
        report.checked.append(
            f"Law 2, exactly once: a run on {_listed(self.world_sizes, ' and ')} ranks in turn, stopped and "
            f"resumed from its state {report.resumes} times, handed out {account.samples:,} samples with "
            f"{account.tokens:,} stored tokens."
        )
        if self.epoch:
            report.checked.append(
                f"Each of the {account.whole[0]:,} documents of {_listed(report.sources)} came exactly once in the "
                "first epoch, whole, with the tokens that are stored. Of later epochs, as far as they came, no token "
                "came twice or was another."
            )
        else:
            report.checked.append(
                "Each was the sample that an unbroken run has there, and all lines of each lane came in turn, none "
                f"twice. The tokens are the stored ones, of {report.documents:,} documents ({whole:,} came "
                "whole; one that came in two epochs counts twice), and none came twice in an epoch."
            )
            report.not_checked.append("What comes later in the stream; --epoch checks that every document comes.")
        report.checked.append(
            f"Epochs begun: {', '.join(f'{source} {count}' for source, count in report.epochs_begun.items())}."
        )
        window, lines = _window(self.data.lines), account.samples // self.data.lanes
        if lines < window:
            report.not_checked.append(
                f"Stops in later windows: each lane gave about {lines} of the {window} lines of its first window; "
                f"--samples {2 * window * self.data.lanes} goes through two."
            )

    def _beginning(self, account: testing.Account, bar: Bar) -> None:
        task = bar.add_task("law 2, exactly once", total=2 * self._compared, note="")
        testing.check_rescaling(
            self._lines,
            stored=account.stored,
            world_sizes=self.world_sizes,
            samples=self._compared,
            account=account,
            progress=lambda count: bar.advance(task, count),
        )

    def _whole_epoch(self, account: testing.Account, bar: Bar) -> None:
        task = bar.add_task("law 2, counting", total=None, note="")
        expected = self._epoch_samples()
        bar.update(task, total=len(account.stored), description="law 2, exactly once")
        testing.check_exactly_once(
            self._lines,
            stored=account.stored,
            world_sizes=self.world_sizes,
            steps=max(1, expected // (2 * sum(self.world_sizes))),  # so that the whole chain comes twice
            most_samples=PATIENCE * expected if self.samples is None else self.samples,
            account=account,
            progress=lambda _: bar.update(task, completed=account.whole[0]),
        )

    def _epoch_samples(self) -> int:
        """About as many samples as it takes until the source that takes longest had an epoch."""
        mixture = mixture_of(self.data)
        sizes = {name: stage.size().tokens for name, stage in mixture.sources.items()}
        tokens = sum(sizes.values())
        while late := [name for name, taken in expected_tokens(mixture, tokens).items() if taken < 0.999 * sizes[name]]:
            tokens += 1 + tokens // 4
            if tokens > NEVER * sum(sizes.values()):
                raise ConfigError(
                    f"--epoch: source {late[0]!r} is never read whole, because of its weights or its max_epochs; "
                    "leave it out of the sources, or check --samples instead"
                )
        return tokens // self.config.pack.seq_len + _window(self.data.lines) * self.data.lanes

    def _configured(self, workers: int) -> testing.MakeLoader:
        """Loaders as the configuration says, that also tell where their samples come from."""
        settings = self.config.loader
        outputs = tuple(dict.fromkeys([*settings.outputs, "provenance", "epochs"]))
        simple = {"num_workers": workers, "outputs": outputs, "prefetch": 1 if workers else 0, "pin_memory": False}
        config = self.config.model_copy(update={"loader": settings.model_copy(update=simple)})
        return lambda rank, world_size: make_loader(config, self.data, rank=rank, world_size=world_size)

    def _lines(self, rank: int, world_size: int) -> StatefulDataLoader:
        """A loader whose batches are lines as they are, whatever the task makes of them."""
        return StatefulDataLoader(
            self.data,
            batch_size=1,
            task=CausalLM(),
            outputs=["provenance", "epochs"],
            prefetch=0,
            rank=rank,
            world_size=world_size,
        )


def _chosen(given: str | None, lanes: int) -> list[int]:
    """The world sizes asked for; or some that divide the lanes, and between them some that don't.

    At least two, as there is no resume otherwise.
    """
    if given is None:
        sizes = range(2, min(lanes, LARGEST) + 1)
        dividing = [one for one in sizes if lanes % one == 0]
        others = [one for one in sizes if lanes % one]
        some = zip_longest([1, *dividing[:3], *dividing[3:][-1:]], [*others[:1], *others[1:][-1:]])
        chosen = [one for pair in some for one in pair if one]
        return chosen if len(chosen) > 1 else chosen * 2
    try:
        chosen = [int(one) for one in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--world-sizes is {given!r}; write numbers and commas, as in 1,2,8") from None
    for one in chosen:
        if not 1 <= one <= lanes:
            raise ConfigError(f"--world-sizes: {one} is not possible; this run has {lanes} lanes, so 1 to {lanes} are")
    return chosen if len(chosen) > 1 else chosen * 2


def _readers(lines: Stage) -> dict[str, ShardReader]:
    """The readers below a stage, by the full names of their sources."""
    return {name: leaf for name, leaf, _ in leaves(lines) if isinstance(leaf, ShardReader)}


def _window(stage: Stage) -> int:
    """The lines that a lane shuffles together."""
    below = max((_window(one) for one in stage.children().values()), default=1)
    return max(stage.window, below) if isinstance(stage, Shuffle) else below


def _listed(some: Sequence[object], last: str = ", ") -> str:
    return last.join([", ".join(map(str, some[:-1])), str(some[-1])]) if len(some) > 1 else str(some[0])


def _show(report: Report, out: Console) -> None:
    for title, words in (("Checked", report.checked), ("Not checked", report.not_checked)):
        if words:
            out.print(title, style="bold")
            for one in words:
                out.print(f"  - {one}", markup=False)
    if report.holds:
        out.print("Laws 1 and 2 hold in all that was checked.", style="bold green")
    else:
        out.print(report.broken, style="bold red", markup=False)
