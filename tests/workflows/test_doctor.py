"""`consistency doctor` as a user starts it, and that nothing of a model is needed for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consistency.capture.folder import CaptureManifest
from consistency.capture.json_codec import decode_json
from consistency.capture.reader import read_capture
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.stage import Level
from consistency.case.stages import MODEL_LESS
from consistency.errors import UsageError
from consistency.workflows.pipeline import doctor_plan
from tests.conftest import Cli


def test_doctor_without_any_model(cli_here: Cli, tmp_path: Path) -> None:
    done = cli_here("doctor", "--devices", "cpu", "--level", "quick", "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["verdict"] == "consistent"
    assert [(row["source"], row["destination"], row["verdict"]) for row in said["copies"]] == [("cpu", "cpu", "fine")]
    assert said["fix"] == []
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["hosts"] == said["hosts"]
    assert report["hosts"][0]["host"] == report["workers"][0]["host"]
    assert {outcome["stage"] for outcome in report["outcomes"]} <= set(MODEL_LESS)
    capture = read_capture(tmp_path / "out")
    assert capture.manifest.host_facts is not None
    assert capture.manifest.host_facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    events = (capture.folder / "workers" / "cpu.isolated" / "events.jsonl").read_text()
    assert "import libraries" not in events
    assert "load base" not in events
    again = cli_here("doctor", "--devices", "cpu", "--out", tmp_path / "out")
    assert (again.returncode, "in the way" in again.stderr) == (2, True)


def test_doctor_takes_every_stage_that_needs_no_model() -> None:
    plan = doctor_plan(Options(devices=("cpu",), level=Level.QUICK))
    assert plan.case.stages == (standard.TRANSFER, standard.OPERATORS, standard.MEMORY), "no group of ranks"
    assert not plan.case.needs_model
    assert Case(name="x", base="b", stages=(*MODEL_LESS, standard.BASE)).needs_model
    with pytest.raises(UsageError):
        doctor_plan(Options(devices=("cuda:99",)))


def test_a_capture_of_an_earlier_version_has_no_box() -> None:
    old = (
        b'{"schema": "s", "tool": "0", "created": "x", "host": "h", "case": {"name": "x", "base": "b"}, "workers": []}'
    )
    assert decode_json(old, CaptureManifest).host_facts is None
