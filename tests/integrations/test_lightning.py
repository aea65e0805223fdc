from pathlib import Path
from tests.integrations.helpers import Job, check_chain, in_order, run_jobs, script_of, write_numbered, read_stream


def test_a(tmp_path: Path) -> None:
    stream = write_numbered(tmp_path)
    script = script_of("lightning.md")
    found = run_jobs(
        tmp_path,
        [Job("two", script, 2, 9, ["2"]), Job("one", script, 1, 5, ["1"]), Job("again", script, 2, None, ["2"])],
        ["lightning"],
    )
    for r in found.values():
        print(r.codes, r.trained, r.evaluated)
        print(r.logs[0][-3000:])
    check_chain(stream, (found["two"], 8), (found["one"], 4), (found["again"], None))
