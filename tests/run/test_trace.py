"""Tracing: what it tells of a run is what the loaders of that run handed out."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.cli.app import main
from fmsdata.config.build import build_data
from fmsdata.config.read import read_config
from fmsdata.corpus.counts import read_counts
from fmsdata.planning.schedule import Schedule, Segment, Turns
from fmsdata.run.trace import Seen, Trace
from tests.helpers import CONFIG, documents, maker, write_source

FMSDATA = Path(sys.executable).parent / "fmsdata"
Part = tuple[int, int, int]  # world size, batch size, steps
CHAINS: list[list[Part]] = [
    [(1, 1, 30)],
    [(4, 3, 20)],
    [(5, 2, 20)],  # does not divide the lanes
    [(2, 3, 7), (5, 1, 9), (24, 1, 3), (7, 2, 8), (1, 5, 4)],
    [(3, 2, 6), (3, 5, 5), (3, 2, 6)],  # another batch size only
]


def run_chain(root: Path, folder: Path, chain: list[Part], done: int = 0, **overrides: Any) -> list[Seen]:
    """What real loaders hand out over a chain of rescales, with a checkpoint every 4 steps and at each stop."""
    seen: list[Seen] = []
    for world_size, batch_size, steps in chain:
        checkpoint = {"path": str(folder), "every": 4, "keep": None}
        make = maker(root, loader__batch_size=batch_size, checkpoint=checkpoint, **overrides)
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for step, batches in enumerate(islice(zip(*loaders, strict=True), steps), start=done):
            for rank, batch in enumerate(batches):
                assert loaders[rank].state_dict()["step"] == step + 1
                for row, (spans, epochs) in enumerate(zip(batch["provenance"], batch["epochs"], strict=True)):
                    seen += [Seen._make((step, rank, row, -1, *span, e)) for span, e in zip(spans, epochs, strict=True)]
        for loader in loaders:
            loader.save()
            loader.close()
        done += steps
    return seen


def data_of(root: Path, **overrides: Any) -> fmsdata.Rescalable:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return build_data(read_config({**CONFIG, "path": str(root)}, dotted))


def without_samples(seen: list[Seen]) -> list[Seen]:
    return [one._replace(sample=-1) for one in seen]


def in_order(seen: list[Seen]) -> list[Seen]:
    return sorted(seen, key=lambda one: (one.rank, one.row))


def by_step(seen: list[Seen]) -> dict[int, list[Seen]]:
    steps = defaultdict(list)
    for one in seen:
        steps[one.step].append(one)
    return steps


def names(root: Path) -> list[str]:
    """All documents of both sources, also those that are skipped."""
    counts = {source: read_counts(root / source) for source in ("web", "wiki")}
    return [
        f"{source}/{shard}#{document}"
        for source, one in counts.items()
        for shard, documents in zip(one.shards, one.documents.tolist(), strict=True)
        for document in range(documents)
    ]


def write_config(root: Path, folder: Path | None, **sections: Any) -> Path:
    config = {**CONFIG, "path": str(root), **sections}
    if folder is not None:
        config["checkpoint"] = {"path": str(folder)}
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def in_a_shell(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FMSDATA, "trace", *args], capture_output=True, text=True, timeout=120)


class Done(NamedTuple):
    code: int
    out: str
    errors: str


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """What the installed script does, without a new process."""

    def run(*args: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["fmsdata", "trace", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


@settings(deadline=None, max_examples=40)
@given(
    lanes=st.integers(1, 30),
    parts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=5),
)
def test_the_schedule_is_what_taking_turns_gives(lanes: int, parts: list[Part]) -> None:
    parts = [(min(world_size, lanes), batch_size, steps) for world_size, batch_size, steps in parts]
    starts = [sum(steps for _, _, steps in parts[:i]) for i in range(len(parts))]
    schedule = Schedule([Segment(start, *part[:2]) for start, part in zip(starts, parts, strict=True)], lanes)
    lines = dict.fromkeys(range(lanes), 0)
    step = 0
    for world_size, batch_size, steps in parts:
        mine = [{lane: lines[lane] for lane in range(rank, lanes, world_size)} for rank in range(world_size)]
        turns = [Turns(some, lanes) for some in mine]
        for _ in range(steps):
            assert schedule.lines(step).tolist() == list(lines.values())
            taken = [one.take(batch_size) for one in turns]
            assert schedule.samples(step) == taken
            assert schedule.segment(step)[1:] == (world_size, batch_size)
            for rank, samples in enumerate(taken):
                for row, sample in enumerate(samples):
                    assert schedule.when(sample) == (step, rank, row)
                    lines[sample % lanes] += 1
            step += 1


@pytest.mark.parametrize("chain", CHAINS)
def test_a_step_holds_what_the_loaders_handed_out(corpus: Path, tmp_path: Path, chain: list[Part]) -> None:
    truth = by_step(run_chain(corpus, tmp_path / "saved", chain))
    checkpoints = fmsdata.Checkpoints(str(tmp_path / "saved"))
    run, from_start = (Trace(data_of(corpus), checkpoints=checkpoints, from_start=one) for one in (False, True))
    assert run.newest == sum(steps for _, _, steps in chain)
    for step in range(run.newest):
        told = run.step(step)
        assert without_samples(told) == in_order(truth[step])
        rank = step % run.schedule.segment(step).world_size
        assert run.step(step, rank) == [one for one in told if one.rank == rank]
        assert step % 3 or from_start.step(step) == told


@pytest.mark.parametrize(
    "overrides",
    [
        {"pack__mode": "pad", "pack__pad": 1},
        {"pack__mode": "bestfit", "pack__pad": 1, "pack__bol": 3},
        {"pack__mode": "bestfit", "pack__pad": 1, "pack__bol": 3, "shuffle__window": 1, "pack__max_documents": 2},
        {"documents__strip": [10, 11, 12], "documents__min_length": 9, "documents__bos": 2},
        {"shuffle__window": 1, "pack__bol": 3, "pack__eol": 4},
    ],
)
@pytest.mark.usefixtures("small_windows")
def test_both_questions_are_answered_for_other_pipelines_too(
    corpus: Path, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    folder = tmp_path / "saved"
    truth = run_chain(corpus, folder, [(4, 2, 9), (5, 1, 9)], **overrides)
    run = Trace(data_of(corpus, **overrides), checkpoints=fmsdata.Checkpoints(str(folder)))
    for step, seen in by_step(truth).items():
        assert without_samples(run.step(step)) == in_order(seen)
    check_documents(run, corpus, truth)


def check_documents(run: Trace, corpus: Path, truth: list[Seen], until: int | None = None) -> list[Any]:
    asked = names(corpus)
    assert len(asked) == 83
    found = run.documents(asked, until)
    for one in found:
        expected = [seen for seen in truth if seen[4:7] == (one.source, one.shard, one.document)]
        expected = [seen for seen in expected if until is None or seen.step < until]
        assert without_samples(list(one.seen)) == sorted(expected, key=lambda seen: (seen.epoch, seen.start))
        if one.start == one.stop:
            assert not one.seen
        assert all(one.start <= seen.start < seen.stop <= one.stop for seen in one.seen)
    return found


@pytest.mark.parametrize("chain", [[(2, 4, 40)], [(5, 3, 12), (2, 5, 10), (24, 1, 5)]])
def test_a_document_is_found_wherever_the_loaders_handed_it_out(
    corpus: Path, tmp_path: Path, chain: list[Part]
) -> None:
    truth = run_chain(corpus, tmp_path / "saved", chain)
    assert max(one.epoch for one in truth) >= 2
    checkpoints = fmsdata.Checkpoints(str(tmp_path / "saved"))
    run, from_start = (Trace(data_of(corpus), checkpoints=checkpoints, from_start=one) for one in (False, True))
    found = check_documents(run, corpus, truth)
    assert from_start.documents(names(corpus)) == found
    assert any(len({seen.step for seen in one.seen if seen.epoch == 0}) > 1 for one in found), "some come in pieces"
    check_documents(run, corpus, truth, until=13)


def test_steps_after_the_newest_checkpoint_go_on_as_before_or_as_told(corpus: Path, tmp_path: Path) -> None:
    truth = {}
    for name, last in (("same", (4, 2, 10)), ("other", (3, 5, 10))):
        folder = tmp_path / name
        truth[name] = run_chain(corpus, folder, [(4, 2, 6), last])
        for step in (8, 12, 16):  # forget all after step 6
            for file in (folder / f"step-{step}").glob("*"):
                file.unlink()
    checkpoints = fmsdata.Checkpoints(str(tmp_path / "same"))
    same = Trace(data_of(corpus), checkpoints=checkpoints)
    other = Trace(data_of(corpus), checkpoints=checkpoints, world_size=3, batch_size=5)
    for run, name in ((same, "same"), (other, "other")):
        assert run.newest == 6
        for step in range(6, 16):
            expected = in_order(by_step(truth[name])[step])
            assert without_samples(run.step(step)) == expected
        check_documents(run, corpus, truth[name], until=16)
    with pytest.raises(fmsdata.ConfigError, match="checkpoint of step 6 holds the world size of step 5"):
        other.step(5)


def test_without_a_checkpoint_the_world_size_tells(corpus: Path, tmp_path: Path) -> None:
    truth = run_chain(corpus, tmp_path / "saved", [(5, 2, 20)])
    run = Trace(data_of(corpus), world_size=5, batch_size=2)
    assert without_samples(run.step(19)) == in_order(by_step(truth)[19])
    check_documents(run, corpus, truth, until=20)
    with pytest.raises(fmsdata.ConfigError, match="the length of the run is unknown: give a step"):
        run.documents(["web/part-0.arrow#0"])
    with pytest.raises(fmsdata.ConfigError, match="so the world size of the run is unknown"):
        Trace(data_of(corpus))


def test_lanes_that_are_epochs_apart_hide_no_document(tmp_path: Path) -> None:
    """One lane is busy with a long document while the others come to the same small documents again and again."""
    rng = np.random.default_rng(5)
    some = [rng.integers(10, 250, 3000), *documents(rng, 60, longest=3, shortest=1)]
    write_source(tmp_path / "web", some, shards=1)
    write_source(tmp_path / "wiki", documents(rng, 5, shortest=1), shards=1)
    truth = run_chain(tmp_path, tmp_path / "saved", [(4, 5, 20)])
    data = data_of(tmp_path)
    for run in (
        Trace(data, checkpoints=fmsdata.Checkpoints(str(tmp_path / "saved"))),
        Trace(data, world_size=4, batch_size=5),
    ):
        for one in run.documents(names(tmp_path), until=20):
            expected = [seen for seen in truth if seen[4:7] == (one.source, one.shard, one.document)]
            assert sorted(without_samples(list(one.seen))) == sorted(expected)
    assert max(one.epoch for one in truth) > 15


def test_a_document_of_a_block_that_a_checkpoint_falls_into_is_found(tmp_path: Path) -> None:
    """Asked alone, it is looked for from the last checkpoint before its block, not from one in the middle of it."""
    rng = np.random.default_rng(6)
    write_source(tmp_path / "web", documents(rng, 600, longest=9, shortest=1), shards=1)
    write_source(tmp_path / "wiki", documents(rng, 5, shortest=1), shards=1)
    truth = run_chain(tmp_path, tmp_path / "saved", [(2, 1, 90)], lanes=2, shuffle__window=2)
    run = Trace(data_of(tmp_path, lanes=2, shuffle__window=2), checkpoints=fmsdata.Checkpoints(str(tmp_path / "saved")))
    for name in names(tmp_path)[:600:11]:
        (one,) = run.documents([name])
        expected = [seen for seen in truth if seen[4:7] == (one.source, one.shard, one.document)]
        assert sorted(without_samples(list(one.seen))) == sorted(expected)


def test_tracing_writes_nothing(corpus: Path, tmp_path: Path, command: Command) -> None:
    run_chain(corpus, tmp_path / "saved", [(2, 2, 10)])
    config = write_config(corpus, tmp_path / "saved")

    def look() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = look()
    done = in_a_shell(config, "--step", "7")
    assert done.returncode == 0, done.stderr
    document = done.stdout.split()[done.stdout.split().index("epoch") + 4]
    assert f"{document}, tokens 0:" in command(config, "--document", document).out
    assert look() == before


def test_a_run_whose_mix_was_edited_is_traced_from_there_on(corpus: Path, tmp_path: Path) -> None:
    """Also from the checkpoint that was edited, of which the lines in progress went back to their sources."""
    saved = tmp_path / "saved"
    run_chain(corpus, saved, [(2, 3, 7)], sources={"web": {"weight": 1}, "wiki": {"weight": 1}})
    edited: dict[str, Any] = {"sources": {"web": {"weight": 1}, "wiki": {"weight": 5}}, "pack__seq_len": 21}
    truth = run_chain(corpus, saved, [(3, 2, 11), (2, 1, 5)], done=7, **edited)
    run = Trace(data_of(corpus, **edited), checkpoints=fmsdata.Checkpoints(str(saved)))
    for step in range(7, 23):
        assert without_samples(run.step(step)) == in_order(by_step(truth)[step])
    for step in (0, 4, 6):
        with pytest.raises(fmsdata.StateError, match=f"edited at step 7, after step {step}: "):
            run.step(step)
    assert run.since == 7
    check_documents(run, corpus, truth)
    from_start = Trace(data_of(corpus, **edited), checkpoints=fmsdata.Checkpoints(str(saved)), from_start=True)
    with pytest.raises(fmsdata.StateError, match="no checkpoint"):
        from_start.step(20)
    with pytest.raises(fmsdata.StateError, match="no checkpoint"):
        from_start.documents(["web/part-0.arrow#1"])


def test_another_configuration_than_the_runs_is_refused(corpus: Path, tmp_path: Path) -> None:
    run_chain(corpus, tmp_path / "saved", [(2, 2, 5)])
    checkpoints = fmsdata.Checkpoints(str(tmp_path / "saved"))
    with pytest.raises(
        fmsdata.StateError, match=r"step-5: .*shuffle window 8 -> 9; .*configuration that the run had at that step"
    ):
        Trace(data_of(corpus, shuffle__window=9), checkpoints=checkpoints)


def test_a_checkpoint_of_another_run_in_the_folder_is_not_read_from(corpus: Path, tmp_path: Path) -> None:
    run_chain(corpus, tmp_path / "saved", [(2, 2, 9)])
    run_chain(corpus, tmp_path / "other", [(3, 3, 6)])
    (tmp_path / "other" / "step-6").rename(tmp_path / "saved" / "step-6")
    run = Trace(data_of(corpus), checkpoints=fmsdata.Checkpoints(str(tmp_path / "saved")))
    assert run.step(5)
    with pytest.raises(fmsdata.StateError, match=r"step-6: .* is from another run"):
        run.step(7)


def test_the_command_tells_what_was_in_a_step(corpus: Path, tmp_path: Path, command: Command) -> None:
    truth = run_chain(corpus, tmp_path / "saved", [(4, 2, 9), (5, 1, 9)])
    config = write_config(corpus, tmp_path / "saved")
    done = command(config, "--step", "12", "--json")
    assert done.code == 0, done.errors
    report = json.loads(done.out)
    expected = in_order(by_step(truth)[12])
    assert without_samples([Seen(**one) for one in report["spans"]]) == expected
    assert (report["world_size"], report["batch_size"], report["read_from_step"]) == (5, 1, 12)
    assert sum(one["tokens"] for one in report["sources"].values()) == sum(one.stop - one.start for one in expected)

    done = command(config, "--step", "12", "--rank", "3", "--from-start")
    assert done.code == 0, done.errors
    lines = done.out.splitlines()
    assert lines[0] == "step 12, read by 5 ranks with batch size 1, only rank 3; replayed from the start of the run"
    mine = [one for one in expected if one.rank == 3]
    told = [line.split() for line in lines[2 : 2 + len(mine)]]
    assert [(row[0], row[1], *row[3:]) for row in told] == [
        ("3", "0", f"{one.source}/{one.shard}#{one.document}", f"{one.start}:{one.stop}", str(one.epoch))
        for one in mine
    ]
    assert "source" in done.out
    assert "share" in done.out
    elsewhere = command(write_config(corpus, None), "--step", "12", "--json", "--checkpoint", tmp_path / "saved")
    assert json.loads(elsewhere.out) == report
    assumed = command(write_config(corpus, None), "--step", "5", "--json", "--world-size", "4", "loader.batch_size=2")
    assert without_samples([Seen(**one) for one in json.loads(assumed.out)["spans"]]) == in_order(by_step(truth)[5])


def test_the_command_tells_when_a_document_was_seen(corpus: Path, tmp_path: Path, command: Command) -> None:
    truth = run_chain(corpus, tmp_path / "saved", [(4, 2, 12)], documents__min_length=5)
    config = write_config(corpus, tmp_path / "saved", documents={"eos": 0, "min_length": 5})
    seen: dict[tuple[Any, ...], list[Seen]] = defaultdict(list)
    for one in truth:
        seen[one[4:7]].append(one)
    stored = fmsdata.testing.stored_documents({name: corpus / name for name in ("web", "wiki")})
    in_pieces = next(
        some
        for document, some in seen.items()
        if len({one.step for one in some}) > 1
        and {one.epoch for one in some} == {0}
        and sum(one.stop - one.start for one in some) == len(stored[document])
    )
    name = "{}/{}#{}".format(*in_pieces[0][4:7])
    done = command(config, "--document", name, "--json")
    assert done.code == 0, done.errors
    report = json.loads(done.out)
    (found,) = report["documents"]
    assert report["until"] == 12
    assert without_samples([Seen(**one) for one in found["seen"]]) == sorted(in_pieces, key=lambda one: one.start)
    done = command(config, "--document", name)
    assert f"first seen in step {min(one.step for one in in_pieces)}" in done.out
    assert f"epoch 0: in {len(in_pieces)} pieces, in steps" in done.out

    done = command(config, "--document", name, "--until", str(min(one.step for one in in_pieces) + 1))
    assert "the rest not in the first" in done.out
    run = Trace(data_of(corpus, documents__min_length=5), checkpoints=fmsdata.Checkpoints(str(tmp_path / "saved")))
    found_by_name = dict(zip(names(corpus), run.documents(names(corpus)), strict=True))
    short = next(name for name, one in found_by_name.items() if one.start == one.stop)
    unseen = next(name for name, one in found_by_name.items() if one.start < one.stop and not one.seen)
    done = command(config, "--document", short, "--document", unseen)
    assert done.code == 0, done.errors
    assert f"{short} is never read: it has fewer than 5 tokens" in done.out
    assert f"{unseen}, tokens 0:{found_by_name[unseen].stop}: not in the first 12 steps" in done.out


def test_nothing_is_cut_off_in_a_pipe(tmp_path: Path, command: Command) -> None:
    """Sources with slashes, brackets and long names."""
    source = "lang=en/dataset=" + "x" * 150 + "[red]"
    rng = np.random.default_rng(1)
    write_source(tmp_path / source, documents(rng, 30, shortest=1))
    write_source(tmp_path / "lang=en", documents(rng, 9, shortest=1), shards=1)
    (tmp_path / "plain").mkdir()
    (tmp_path / "lang=en" / "part-0.arrow").rename(tmp_path / "plain" / "part-0.arrow")
    sources = {source: {"weight": 1}, "lang=en": {"weight": 1, "path": "plain"}}
    config = write_config(tmp_path, None, sources=sources)
    piped = in_a_shell(config, "--step", "0", "--world-size", "4")
    assert piped.returncode == 0, piped.stderr
    name = next(word for word in piped.stdout.split() if word.startswith(source))
    done = command(config, "--document", name, "--world-size", "4", "--until", "1")
    assert f"{name}, tokens 0:" in done.out
    assert "first seen in step 0" in done.out
    done = command(config, "--document", "lang=en/part-0.arrow#8", "--world-size", "4", "--until", "1")
    assert done.code == 0, done.errors


def test_wrong_questions_get_an_answer_in_one_line(corpus: Path, tmp_path: Path, command: Command) -> None:
    run_chain(corpus, tmp_path / "saved", [(4, 2, 5)])
    config, empty = write_config(corpus, tmp_path / "saved"), tmp_path / "empty"
    document = "--document"
    for args, words in (
        ([], "either --step N or --document"),
        (["--step", "1", document, "web/part-0.arrow#1"], "either --step N or --document"),
        (["--step", "-1"], "step is -1; it must be at least 0"),
        (["--step", "2", "--rank", "4"], "rank is 4; step 2 was read by 4 ranks, 0 to 3"),
        (["--step", "2", "--rank", "-1"], "rank is -1; step 2 was read by 4 ranks"),
        (["--step", "2", "--world-size", "3"], "holds the world size of step 2"),
        (["--step", "9", "--world-size", "25"], "more than the 24 lanes"),
        (["--step", "9", "--world-size", "0"], "world size 0"),
        (["--step", "2", "--until", "3"], "--until is for --document"),
        ([document, "web/part-0.arrow#1", "--rank", "1"], "--rank is for --step"),
        ([document, "web/part-0.arrow#1", "--until", "0"], "until is 0"),
        ([document, "web/part-0.arrow"], "expected source/shard#number"),
        ([document, "web/part-0.arrow#x"], "expected source/shard#number"),
        ([document, "wbe/part-0.arrow#1"], "no such source; did you mean 'web'"),
        ([document, "web/part0.arrow#1"], "has no such shard; did you mean 'part-0.arrow'"),
        ([document, "web/part-0.arrow#20"], "the shard has 20 documents, 0 to 19"),
        (["--step", "2", "--checkpoint", empty], "no complete checkpoint"),
        (["--step", "2", "seed=4"], "seed"),
        (["--step", "2", "lanes"], "KEY=VALUE"),
    ):
        done = command(config, *args)
        assert done.code == 1, (args, done)
        assert done.errors.startswith("error: ")
        assert words in done.errors
        assert "Traceback" not in done.errors
        assert done.out == ""
    shell = in_a_shell(config, document, "web/part-9.arrow#1")
    assert (shell.returncode, shell.stdout) == (1, "")
    assert shell.stderr.startswith("error: document 'web/part-9.arrow#1': source 'web' has no such shard")
    assert not empty.exists()
    done = command(write_config(corpus, empty), "--step", "2")
    assert f"no complete checkpoint in {empty}, so the world size of the run is unknown" in done.errors


def test_a_pipeline_of_ones_own_tells_steps_and_says_where_it_can_look_for_documents(corpus: Path) -> None:
    reader = fmsdata.ShardReader(corpus / "web")
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.Filter(reader, lambda item: len(item) > 9), seq_len=17), lanes=4)
    loader = fmsdata.StatefulDataLoader(data, batch_size=3, rank=1, world_size=2, outputs=["provenance"])
    batches = [batch["provenance"] for batch in islice(loader, 5)]
    run = Trace(data, world_size=2, batch_size=3)
    assert [tuple(one[4:9]) for one in run.step(4, rank=1)] == [tuple(span) for row in batches[4] for span in row]
    with pytest.raises(fmsdata.ConfigError, match="one Mixture, of ShardReaders"):
        run.documents(["web/part-0.arrow#1"], until=5)


def test_a_run_that_did_not_begin_at_the_start_of_its_stream_is_refused(corpus: Path, tmp_path: Path) -> None:
    """As one is that went on from another run's data and counts its own steps."""
    for name, first in (("own steps", 0), ("a model's steps", 100)):
        loader = maker(corpus, loader__batch_size=3)(0, 1)
        for _ in islice(loader, 8):
            pass
        state = loader.state_dict()
        lanes = {lane: json.dumps({**json.loads(text), "step": first}) for lane, text in state["lanes"].items()}
        renumbered = {**state, "step": first, "history": [[first, 1, 3]], "lanes": lanes}
        checkpoint = {"path": str(tmp_path / name), "every": 4}
        later = maker(corpus, loader__batch_size=3, checkpoint=checkpoint)(0, 1)
        later.load_state_dict(renumbered)
        for _ in islice(later, 5):
            pass
        with pytest.raises(fmsdata.StateError, match="the content of its steps is unknown"):
            Trace(data_of(corpus), checkpoints=fmsdata.Checkpoints(str(tmp_path / name)))


def test_a_document_beyond_max_epochs_is_not_seen(corpus: Path) -> None:
    data = data_of(corpus, sources__wiki__max_epochs=0.5)
    asked = [name for name in names(corpus) if name.startswith("wiki/")]
    with pytest.warns(fmsdata.FmsdataWarning, match="'wiki' has been read max_epochs times"):
        found = Trace(data, world_size=2, batch_size=4).documents(asked, until=60)
    seen = [one for one in found if one.seen]
    assert 0 < len(seen) < len([one for one in found if one.stop > one.start])
    assert {piece.epoch for one in seen for piece in one.seen} == {0}
