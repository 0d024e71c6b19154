"""`--groups`: given to `compare`, and refused before anything is read or started where it is bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consistency.cli.main import main
from tests.comparison.made_records import computed
from tests.conftest import MakeCapture

H100 = {"cuda:0": {"model": "H100", "kernel_key": "torch 2"}}


def test_compare(make_capture: MakeCapture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(make_capture(f"n{n}", {"cuda:0": [computed(b)]}, info=H100)) for n, b in enumerate("abaaab")]
    (tmp_path / "racks.csv").write_text("host,rack\n" + "".join(f"n{n},r{n % 2}\n" for n in (0, 2, 4, 5, 1)))
    assert main(["compare", *folders, "--groups", str(tmp_path / "racks.csv"), "--json"]) == 1
    (finding,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["kind"] == "same-device-type"]
    assert finding["workers"] == ["n1:cuda:0", "n5:cuda:0"]
    assert finding["message"].endswith("all of them have rack r1, and no other is known to have")


@pytest.mark.parametrize("command", [["compare", "nowhere"], ["fleet", "--engine", "slurm", "--out", "out"]])
def test_bad_file(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "racks.csv"
    bad.write_text("host,rack\nn1,r1\nn1,r2\n")
    assert main([*command, "--groups", str(bad)]) == 2
    assert f"--groups {bad}, line 3" in capsys.readouterr().err
