"""Runs made by hand: what is drift, what is not, and what a baseline accepts."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.capture.wording import when
from consistency.cli.main import main
from consistency.comparison.result import Comparison, Finding
from consistency.errors import CaptureError, UsageError
from consistency.extras.operations.history.baseline import Accepted, Baseline, accept, apply, read_baseline, with_stale
from consistency.extras.operations.history.drift import add_run
from consistency.extras.operations.history.store import History
from consistency.extras.operations.history.table import device_rows, print_device, print_runs, run_rows
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.workflows.judging import compare_captures
from tests.conftest import MakeCapture

Run = Callable[..., Comparison]


def record(stage: str, layer: str, digest: str, *, file: str | None = None) -> TensorRecord:
    rule = "bitwise" if file else "peer"
    return TensorRecord(
        stage=stage, layer=layer, tensor="weight", rule=rule, status="equal" if file else "measured", digest=digest,
        reference="file" if file else None, reference_digest=file, shape=(2, 2), dtype="float32",
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, make_capture: MakeCapture) -> Run:
    """Make a run in which each device has the base's bytes and the given merged bits."""
    count = 0

    def once(
        bits: dict[str, str],
        *,
        baseline: Baseline | None = None,
        base: str = "b",
        software: str = "torch 2",
        stages: tuple[str, ...] = ("base", "merged"),
        info: dict[str, Any] | None = None,
        url: str | None = None,
        case: dict[str, Any] | None = None,
        said: dict[str, Any] | None = None,
    ) -> Comparison:
        nonlocal count
        count += 1
        workers = {
            device: [
                *([record("base", "l", base, file=base)] if "base" in stages else []),
                *([record("merged", "l", merged)] if "merged" in stages else []),
            ]
            for device, merged in bits.items()
        }
        facts = {d: {"kernel_key": f"{software} {d}", "uuid": f"GPU-{d}", **(info or {}).get(d, {})} for d in bits}
        captures = [read_capture(make_capture(f"night-{count}", workers, info=facts, case=case))]
        history = History(url or str(tmp_path / "history"))
        comparison = msgspec.structs.replace(compare_captures(captures), **(said or {}))
        return add_run(history, captures, comparison, baseline)

    return once


def drift(found: Comparison) -> list[Finding]:
    return [f for f in found.findings if f.kind == "drift" and f.severity == "error"]


@pytest.mark.parametrize("profile", ["deployed", "as the libraries leave it"])
def test_as_deployed_computed_bits_may_change(run: Run, profile: str) -> None:
    case = {"profile": "deployed"}
    run({"cuda:0": "m"}, case=case)
    found = run({"cuda:0": "n"}, case=case, said={"profile": profile})
    (finding,) = [f for f in found.findings if f.kind == "drift"]
    assert (finding.severity, found.exit_status) == ("note", 0)
    assert finding.message.endswith("same inputs, same software; with --profile deployed equal bits are not promised")


def test_other_bits_of_one_device_are_its_drift(run: Run) -> None:
    run({"cuda:0": "m", "cuda:1": "m"})
    found = run({"cuda:0": "m", "cuda:1": "x"})
    (finding,) = drift(found)
    assert finding.workers == ("cuda:1",)
    assert finding.tensors == ("merged::l.weight",)
    assert "GPU-cuda:1" in finding.message
    assert "1 of 1 merged tensors" in finding.message
    assert found.exit_status == 1


def of(bits: dict[str, str] | str, **more: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what a run is made of: the bits of each device, or those of cuda:0."""
    return {"cuda:0": bits} if isinstance(bits, str) else bits, more


A, B = ({"uuid": f"GPU-{name}", "kernel_key": "k"} for name in "ab")
KILLED = {"status": "lost", "reason": "killed"}


@pytest.mark.parametrize(
    ("runs", "drifts"),
    [
        ([of({"cuda:0": "m", "cuda:1": "n"})] * 3, 0),
        ([of("m"), of("x")], 1),
        ([of("m"), of("x"), of("x")], 1),  # as in the run before, and still not as it was
        ([of("m"), of("x"), of("x"), of("m")], 0),
        ([of("m", info={"cuda:0": A}), of({"cuda:3": "x"}, info={"cuda:3": A})], 1),
        ([of("m", info={"cuda:0": A}), of("x", info={"cuda:0": B})], 0),
        ([of("m", base="b"), of("x", base="c")], 0),
        ([of("m"), of("x", software="torch 3"), of("y")], 1),
        ([of("m"), of("m", stages=("base",))], 0),
        ([of("m"), of("m", stages=("base",)), of("x")], 1),
        ([of("x", info={"cuda:0": KILLED}), of("m")], 0),
    ],
    ids=[
        "same bits", "other bits", "other bits for the second time", "the earlier bits again", "under another number",
        "another device in its place", "other inputs", "an older run of the same software", "a stage left out",
        "and taken again", "a lost worker before",
    ],
)  # fmt: skip
def test_what_is_drift(run: Run, runs: list[tuple[dict[str, str], dict[str, Any]]], drifts: int) -> None:
    *_, found = [run(bits, **more) for bits, more in runs]
    assert [finding.workers for finding in drift(found)] == [tuple(runs[-1][0])] * drifts
    assert found.exit_status == drifts


def test_other_software_is_a_note(run: Run) -> None:
    run({"cuda:0": "m"})
    found = run({"cuda:0": "x"}, software="torch 3")
    assert found.exit_status == 0
    assert [f.kind for f in found.findings if f.severity == "note"] == ["software"]


def test_table_that_is_gone_still_tells_that_bits_differ(run: Run, tmp_path: Path) -> None:
    run({"cuda:0": "m"})
    for table in (tmp_path / "history" / "tables").iterdir():
        table.write_text("{}")  # not what its name says
    assert drift(run({"cuda:0": "x"}))


def test_damaged_run_is_named_and_the_others_count(run: Run, tmp_path: Path) -> None:
    run({"cuda:0": "m"})
    (tmp_path / "history" / "runs" / "20990101T000000-ffffffff.json").write_bytes(b"{ cut sho")
    found = run({"cuda:0": "x"})
    assert drift(found)
    assert [f.kind for f in found.findings if f.severity == "warning"] == ["damaged-run"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("", "not compared with earlier runs: cannot read the history"),
        ("tables", "this run is not in the history: cannot write the history"),
    ],
)
def test_history_that_fails_meanwhile_does_not_take_the_verdict(run: Run, tmp_path: Path, file: str, text: str) -> None:
    place = tmp_path / "history" / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("")
    found = run({"cuda:0": "m"})
    assert found.verdict == "consistent"
    (warning,) = (finding for finding in found.findings if finding.severity == "warning")
    assert warning.message.startswith(text)


def test_unknown_protocol() -> None:
    with pytest.raises(CaptureError, match="cannot open the history"):
        History("nosuchprotocol://x")


def test_rows_for_people(run: Run, tmp_path: Path) -> None:
    run({"cuda:0": "m"})
    run({"cuda:0": "x"})
    history = History(str(tmp_path / "history"))
    verdicts = sorted(row.verdict for row in run_rows(history, 0))
    assert verdicts == ["consistent", "inconsistent"]
    rows = device_rows(history, "GPU-cuda:0", 0)
    assert {row.bits["base"] for row in rows} == {"A"}
    assert {row.bits["merged"] for row in rows} == {"A", "B"}
    assert [row.change for row in rows if row.change] == ["drift in merged"]
    with pytest.raises(UsageError, match="no run has this device"):
        device_rows(history, "cuda:7", 0)


@pytest.mark.parametrize("place", ["gone", "."])
def test_a_folder_without_runs_is_no_history(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"], ["--device", "cpu"]):
        assert main(["history", str(tmp_path / place), *more]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"consistency: there is no history at {tmp_path / place}: ")
        assert printed.err.count("\n") == 1
        assert not printed.out


def test_the_records_of_a_drift_and_of_its_run(run: Run, tmp_path: Path) -> None:
    run({"cuda:0": "m", "cuda:1": "m"})
    run({"cuda:0": "m", "cuda:1": "x"})
    latest, first = History(str(tmp_path / "history")).runs()
    assert [(worker.device, worker.drift) for worker in latest.workers if worker.drift] == [("GPU-cuda:1", ("merged",))]
    assert not first.workers.drifted
    assert [first.verdict, latest.verdict] == ["consistent", "inconsistent"]


def test_drift_says_how_far_where_the_earlier_capture_is_at_hand(make_capture: MakeCapture, tmp_path: Path) -> None:
    history = History(str(tmp_path / "history"))
    facts = {"cuda:0": {"kernel_key": "torch 2 cuda:0", "uuid": "GPU-0"}}

    def night(name: str, digest: str, error: float) -> Comparison:
        measure = Measure(
            elements=4, mismatched=1, max_abs=Real(error), max_rel=Real(error), max_ulp=2, mean_abs=Real(error),
            rms=Real(error), ratio=Real(error / 1e-6), allowed=Real(1e-6), magnitude=Real(1.0), worst_index=None,
        )  # fmt: skip
        merged = TensorRecord(
            stage="merged", layer="l", tensor="weight", rule="bound", status="within", digest=digest,
            reference="float64", shape=(2, 2), dtype="float32", measure=measure,
        )  # fmt: skip
        folder = make_capture(f"{name}/captures", {"cuda:0": [merged]}, info=facts)
        captures = [read_capture(folder)]
        return add_run(history, captures, compare_captures(captures), None, report=str(folder.parent))

    night("first", "a", 2e-7)
    (finding,) = drift(night("second", "b", 3e-7))
    (size,) = (line for line in finding.detail if "off from" in line)
    assert size == (
        "merged::l.weight: off from the exact values by at most 3e-07 in this run, allowed 1e-06, and 2e-07 in the "
        "earlier one, so by at most 5e-07 between the two"
    )
    shutil.rmtree(tmp_path / "first")
    (finding,) = drift(night("third", "b", 3e-7))
    assert not any("off from" in line for line in finding.detail)


def test_return_to_earlier_bits_is_said(run: Run, tmp_path: Path) -> None:
    run({"cuda:0": "m"})
    (first,) = History(str(tmp_path / "history")).runs()
    (away,) = drift(run({"cuda:0": "x"}))
    assert "they are those" not in away.message
    path = tmp_path / "baseline.json"
    accept(path, [away], run({"cuda:0": "x"}).workers, reason="a new card")
    run({"cuda:0": "x"}, baseline=read_baseline(path))
    (back,) = drift(run({"cuda:0": "m"}))
    assert back.message.endswith(f"; they are those of the run of {when(first.at)}")
    assert when(first.at).endswith(" UTC")


def test_entry_of_a_baseline_that_accepts_nothing_is_a_note(run: Run) -> None:
    found = run({"cuda:0": "m"})
    entry = Accepted(kind="zeros", devices=("GPU-cuda:0",), tensors=("merged::l.weight",), message="zeros in l",
                     reason="known", date="2026-01-01")  # fmt: skip
    elsewhere = [
        msgspec.structs.replace(entry, devices=("GPU-of-another-host",)),
        msgspec.structs.replace(entry, tensors=("forward::l.weight",)),
        msgspec.structs.replace(entry, state="these bits"),
    ]
    baseline = Baseline(schema="consistency.baseline/1", accepted=(entry, *elsewhere))
    (note,) = (finding for finding in with_stale(baseline, found).findings if finding.kind == "stale-baseline")
    assert note.message == "accepted on 2026-01-01 (known), and not found in this run: zeros in l"
    used = Finding(kind="zeros", severity="error", message="m", workers=("cuda:0",), tensors=entry.tensors)
    with_finding = apply(baseline, msgspec.structs.replace(found, findings=(used,)))
    assert [finding.kind for finding in with_stale(baseline, with_finding).findings] == ["zeros"]


@pytest.fixture
def accepted(run: Run, tmp_path: Path) -> Path:
    run({"cuda:0": "m", "cuda:1": "m"})
    found = run({"cuda:0": "m", "cuda:1": "x"})
    path = tmp_path / "baseline.json"
    accept(path, found.findings, found.workers, reason="a new card")
    return path


def test_accepted_drift_is_green(run: Run, accepted: Path) -> None:
    found = run({"cuda:0": "m", "cuda:1": "x"}, baseline=read_baseline(accepted))
    assert found.exit_status == 0
    (note,) = [f for f in found.findings if f.kind == "drift"]
    assert note.severity == "note"
    assert "a new card" in note.message
    # and what was accepted is from then on how the device is
    assert run({"cuda:0": "m", "cuda:1": "x"}).exit_status == 0


@pytest.mark.parametrize("bits", [{"cuda:0": "m", "cuda:1": "y"}, {"cuda:0": "x", "cuda:1": "x"}])
def test_what_goes_beyond_the_baseline_is_red(run: Run, accepted: Path, bits: dict[str, str]) -> None:
    assert drift(run(bits, baseline=read_baseline(accepted)))


def test_baseline_accepts_no_more_tensors_than_it_names(accepted: Path) -> None:
    entry = read_baseline(accepted).accepted[0]
    known = Finding(kind="zeros", severity="error", message="", workers=("cpu",), tensors=("adapter::l.a",))
    wider = Finding(
        kind="zeros", severity="error", message="", workers=("cpu",), tensors=("adapter::l.a", "adapter::l.b")
    )

    baseline = Baseline(
        schema="consistency.baseline/1",
        accepted=(msgspec.structs.replace(entry, kind="zeros", devices=("cpu",), tensors=known.tensors, state=None),),
    )
    assert apply(baseline, comparison(known)).exit_status == 0
    assert apply(baseline, comparison(wider)).exit_status == 1


def comparison(*findings: Finding, verdict: Any = "inconsistent") -> Comparison:
    return Comparison(
        case="c", dtype="float32", level="standard", load_paths=("isolated",), verdict=verdict,
        reference="cpu", workers=(),
        architectures=(), tensors=(), findings=findings,
    )  # fmt: skip


def test_lost_worker_cannot_be_accepted(tmp_path: Path) -> None:
    lost = Finding(kind="lost-worker", severity="error", message="cpu was lost", workers=("cpu",))
    with pytest.raises(UsageError, match="cannot be accepted"):
        accept(tmp_path / "b.json", [lost], [], reason="whatever")
    assert not (tmp_path / "b.json").exists()
    baseline = Baseline(schema="consistency.baseline/1", accepted=())
    assert apply(baseline, comparison(lost, verdict="incomplete")).exit_status == 3


@pytest.mark.parametrize("reason", ["", "   "])
def test_baseline_names_a_reason(tmp_path: Path, reason: str) -> None:
    error = Finding(kind="zeros", severity="error", message="m", workers=("cpu",), tensors=("t",))
    with pytest.raises(UsageError, match="reason"):
        accept(tmp_path / "b.json", [error], [], reason=reason)


def test_nothing_to_accept(tmp_path: Path) -> None:
    note = Finding(kind="skipped", severity="note", message="m")
    with pytest.raises(UsageError, match="no error to accept"):
        accept(tmp_path / "b.json", [note], [], reason="r")
    with pytest.raises(UsageError, match="no finding 2"):
        accept(tmp_path / "b.json", [note], [], reason="r", numbers=[2])


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": "other"}', '{"schema": "consistency.baseline/1", "accepted": [{"kind": "zeros"}]}'],
)
def test_rubbish_for_a_baseline(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(UsageError):
        read_baseline(tmp_path / "b.json")


def test_a_baseline_that_is_missing_accepts_nothing(run: Run, tmp_path: Path) -> None:
    empty = read_baseline(tmp_path / "b.json")
    assert empty.accepted == ()
    run({"cuda:0": "m"}, baseline=empty)
    assert drift(run({"cuda:0": "x"}, baseline=empty))
    assert not (tmp_path / "b.json").exists()


def test_init_writes_an_empty_baseline_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.json"
    assert main(["baseline", "init", str(path)]) == 0
    assert read_baseline(path).accepted == ()
    error = Finding(kind="zeros", severity="error", message="m", workers=("cpu",), tensors=("t",))
    accept(path, [error], [], reason="r")
    assert main(["baseline", "init", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert len(read_baseline(path).accepted) == 1


def test_baseline_keeps_what_was_accepted_before(accepted: Path) -> None:
    error = Finding(kind="zeros", severity="error", message="m", workers=("cpu",), tensors=("t",))
    accept(accepted, [error], [], reason="another")
    entries = json.loads(accepted.read_text())["accepted"]
    assert [entry["kind"] for entry in entries] == ["drift", "zeros"]
    assert all(entry["date"] and entry["reason"] for entry in entries)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_word_of_a_list_is_broken(run: Run, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run({"cuda:0": "m"}, case={"name": "a-case-with-a-rather-long-name"})
    run({"cuda:0": "x"}, case={"name": "a-case-with-a-rather-long-name"})
    history = History(str(tmp_path / "history"))
    devices, runs = device_rows(history, "GPU-cuda:0", 0), run_rows(history, 0)
    assert [row.at for row in devices] == [row.at for row in runs] == sorted((row.at for row in runs), reverse=True)
    for show in (partial(print_runs, runs), partial(print_device, devices, "GPU-cuda:0")):
        out = io.StringIO()
        show(Console(file=out, width=width))
        assert out.getvalue().count("a-case-with-a-rather-long-name") == 2
        assert all(when(row.at) in out.getvalue() for row in runs)
        assert max(map(len, out.getvalue().splitlines())) <= width


def test_the_order_in_which_runs_recorded_their_stages_is_no_other_drift(
    tmp_path: Path, make_capture: MakeCapture
) -> None:
    """An accepted drift failed again the next night: its state followed the order of a set."""
    stages = ("merged", "forward", "gradient")
    findings = []
    for order in (stages, stages[::-1]):
        url = str(tmp_path / "-".join(order))
        for digest in ("a", "b"):
            records = [record(stage, "l", digest) for stage in order]
            folder = make_capture(f"{order[0]}-{digest}", {"cpu": records}, info={"cpu": {"uuid": "u"}}, host="h")
            captures = [read_capture(folder)]
            found = add_run(History(url), captures, compare_captures(captures), None)
        (finding,) = drift(found)
        findings.append((finding.state, finding.message.partition(" tensors")[0], finding.tensors))
    assert findings[0] == findings[1]


def test_what_drifted_on_every_device_at_once_accuses_none(run: Run) -> None:
    run({"a": "m", "b": "m", "c": "m"})
    (alone,) = drift(run({"a": "m2", "b": "m", "c": "m"}))
    assert "ECC" in str(alone.next)
    for found in drift(run({"a": "m3", "b": "m3", "c": "m3"})):
        assert found.message.endswith("every device that is compared drifted, so the cause is common to them")
        assert "ECC" not in str(found.next)


def test_other_inputs_than_the_night_before_are_told_once(run: Run) -> None:
    """A flipped bit in the adapter's file, an edited config or factory: consistent, and no line of it."""
    assert not run({"a": "m"}, base="b").findings
    (note,) = run({"a": "m2"}, base="another").findings
    assert (note.kind, note.severity, note.workers) == ("inputs", "note", ("a",))
    assert "other inputs than in the run of" in note.message
    assert not run({"a": "m2"}, base="another").findings
    (note,) = run({"a": "m2"}, base="another", info={"a": {"sources": "of an edited factory"}}).findings
    assert note.kind == "inputs"
