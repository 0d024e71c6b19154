"""A report says where a library is newer than what was tested, by the table of the page of supported versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from consistency.capture.folder import SCHEMA, Capture, CaptureManifest, WorkerCapture
from consistency.capture.records import WorkerInfo
from consistency.case.case import Case
from consistency.comparison import tested_versions
from consistency.comparison.compare import compare
from consistency.comparison.tested_versions import newest_tested, release_of
from tests.comparison.made_records import moved

ROOT = Path(__file__).parents[2]
TABLE = """
| `tox -e` | Python | torch | transformers | peft |
| --- | --- | --- | --- | --- |
| `a` | 3.11.7 | 2.13.0+cpu | 5.23.0 | 0.18.0 |
| `b` | 3.11.7 | 2.8.0 | 5.9.1 | 0.21.2 |

| version | what |
|---|---|
| torch 9.9 | of another table |
"""


def capture_of(host: str, environment: dict[str, str]) -> Capture:
    info = WorkerInfo(
        name="cuda:0", load_path="isolated", architecture="Hopper sm_90", model="H100", status="ok",
        environment=environment,
    )  # fmt: skip
    case = Case(name="made-up", base="base", adapter="adapter")
    manifest = CaptureManifest(schema=SCHEMA, tool="0", created="2026-01-01", host=host, workers=(), case=case)
    workers = (WorkerCapture(info=info, parts=((moved(),),)),)
    return Capture(folder=Path(f"/nowhere/{host}"), manifest=manifest, workers=workers)


def messages(*environments: dict[str, str]) -> list[str]:
    captures = [capture_of(f"host-{number}", environment) for number, environment in enumerate(environments)]
    return [finding.message for finding in compare(captures).findings if finding.kind == "untested-version"]


def test_the_newest_of_the_table_count() -> None:
    assert tested_versions._newest_in(TABLE) == {"torch": (2, 13), "transformers": (5, 23), "peft": (0, 21)}


def test_the_versions_of_the_constraints_are_within_those_of_the_page() -> None:
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(newest_tested()) == set(tested_versions.PACKAGES)
    for name, tested in newest_tested().items():
        release = release_of(pinned[name])
        assert release is not None
        assert release <= tested, f"the page shows no run with {name} {pinned[name]}: `tox -e corner-newest`"


def test_a_newer_version_is_said_once_and_one_within_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.comparison.findings.conditions.newest_tested", lambda: {"torch": (2, 13)})
    newer = {"torch": "2.16.0+cu130", "transformers": "6.0.0"}
    assert messages(newer, newer) == ["torch 2.16.0+cu130 is newer than what was tested (2.13)"]
    assert messages(newer, {"torch": "2.14.1"}) == [
        "torch 2.16.0+cu130 and 2.14.1 are newer than what was tested (2.13)"
    ]
    assert messages({"torch": "2.13.7+cu130"}, {"torch": "2.8.0"}, {"torch": "unknown"}, {}) == []
