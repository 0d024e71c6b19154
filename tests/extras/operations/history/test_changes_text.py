"""Since when, as the command prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consistency.cli.main import main
from consistency.extras.operations.history.changes import ChangeKind
from consistency.extras.operations.history.table import ChangeRow
from tests.extras.operations.history.made_fleets import at, fleet_history, incidents


@pytest.mark.parametrize(
    ("kind", "detail", "said"),
    [
        (ChangeKind.DRIFT, "merged", "drift in merged"),
        (ChangeKind.DRIFT, "", "drift"),
        (ChangeKind.SOFTWARE, "torch 2 -> 3", "other software or settings: torch 2 -> 3"),
        (ChangeKind.SOFTWARE, "", "other software or settings"),
        (ChangeKind.INPUTS, "", "other inputs"),
    ],
)
def test_a_change_is_said_with_its_detail_or_without(kind: ChangeKind, detail: str, said: str) -> None:
    row = ChangeRow(
        kind=kind, detail=detail, since="2026-01-09T02:00:00+00:00", before=None, until=None, devices=1,
        workers=("cpu",),
    )  # fmt: skip
    assert row.cells[2] == said


def test_the_command_prints_what_changed_and_since_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet_history(tmp_path, 9, 12, incidents)
    assert main(["history", str(tmp_path), "--changes"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "since until change devices",
        "2026-01-10 02:00:00 UTC now missing 8 devices: gpu-0008:cuda:[0-7]",
        "2026-01-09 02:00:00 UTC other software or settings: "
        "driver 570.1 -> 580.2 16 devices: gpu-[0002-0003]:cuda:[0-7]",
        "2026-01-07 02:00:00 UTC now drift in merged gpu-0004:cuda:3",
        "",
        "3 changes",
    ]
    assert main(["history", str(tmp_path), "--changes", "--last", "2"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()][1:2] == [
        "2026-01-11 02:00:00 UTC or earlier now drift in merged gpu-0004:cuda:3"
    ]
    assert main(["history", str(tmp_path), "--changes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"][0] == {
        "kind": "gone", "since": at(9), "before": at(8), "until": None, "detail": "", "devices": 8,
        "workers": ["gpu-0008:cuda:[0-7]"],
    }  # fmt: skip
    assert found["damaged"] == []
    assert main(["history", str(tmp_path), "--changes", "--device", "cpu"]) == 2
