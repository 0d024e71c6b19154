"""What a person reads of two weight files, and that the names in them cannot drive the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from consistency.comparison.result import Comparison
from consistency.extras.merging.diff.weights import diff_weights
from consistency.report.console import make_console
from consistency.report.json import as_bytes
from consistency.report.terminal import print_weights
from tests.made_weights import Given, f32, put
from tests.report.contract import OUTCOME, WORKER, no_constant
from tests.reported import rows


def compared(folder: Path, actual: dict[str, Given], expected: dict[str, Given]) -> Comparison:
    return diff_weights(put(folder / "b.safetensors", actual), put(folder / "a.safetensors", expected))


def printed(found: Comparison, *, encoding: str = "utf-8", verbose: bool = False) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = make_console(file)
    console.width = 400
    print_weights(found, console, title="consistency diff", elapsed_s=0.5, verbose=verbose, folder="out")
    file.flush()
    return raw.getvalue().decode(encoding)


def test_equal_files_are_a_line(tmp_path: Path) -> None:
    side = {f"x.{i}": f32(i) for i in range(3)}
    text = printed(compared(tmp_path, side, side))
    assert text.splitlines() == [
        f"consistency diff · {tmp_path}/b.safetensors against {tmp_path}/a.safetensors · float32 · 3 tensors · 0.50 s",
        "",
        "  CONSISTENT   all 3 tensors are bitwise equal",
        "",
        "  report: out",
    ]
    assert "1 tensor ·" in printed(compared(tmp_path, {"x.a": f32(1)}, {"x.a": f32(1)}))


def test_what_differs_has_a_row_and_a_cause(tmp_path: Path) -> None:
    right = {"x.a": f32(1, 2, 3, 4, shape=(2, 2)), "x.b": f32(1), "x.s": f32(3, shape=()), "x.gone": f32(1)}
    wrong = {**right, "x.a": f32(1, 2, 3, 6, shape=(2, 2)), "x.s": f32(5, shape=())}
    del wrong["x.gone"]
    found = compared(tmp_path, wrong, right)
    lines = [line.split() for line in printed(found).splitlines()]
    assert "  INCONSISTENT   3 of 4 tensors differ" in printed(found).splitlines()
    assert ["x.a", "2×2", "float32", "bit-flip", "1", "of", "4", "2", str(2**22)] in lines
    assert ["x.gone", "1", "float32", "missing"] in lines
    assert not [line for line in lines if line[:1] == ["x.b"]]
    shown = [line.split() for line in printed(found, verbose=True).splitlines()]
    assert ["x.b", "1", "float32", "equal"] in shown


def test_many_are_cut_and_all_shown_on_demand(tmp_path: Path) -> None:
    found = compared(tmp_path, {f"x.t{i}": f32(1) for i in range(50)}, {f"x.t{i}": f32(2) for i in range(50)})
    rows = [line for line in printed(found).splitlines() if line.lstrip().startswith("x.t") and " of 1 " in line]
    assert "  and 30 more: -v shows all" in printed(found).splitlines()
    assert len([row for row in rows if "·" not in row]) == 20
    everything = printed(found, verbose=True).splitlines()
    assert len([r for r in everything if r.lstrip().startswith("x.t") and " of 1 " in r and "·" not in r]) == 50


HOSTILE = [
    "x.\x1b[31mred",
    "x.[red]bold[/red]",
    "x.a\n  CONSISTENT   all is well",
    "x.\u202eabc",
    "x.\r\tover",
    "x.:smile:",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("is_there", [False, True])
def test_names_are_shown_and_not_obeyed(tmp_path: Path, name: str, is_there: bool) -> None:
    right = {name: f32(1), "x.z": f32(1)}
    found = compared(tmp_path, {**right, name: f32(2)} if is_there else {"x.z": f32(1)}, right)
    text = printed(found)
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert not [line for line in text.splitlines() if line.strip().startswith("CONSISTENT")]
    if name.isprintable():
        assert text.count(name) >= 2, "in the table and in the finding"
    assert name in {f"{one['layer']}.{one['tensor']}" for one in json.loads(as_bytes(found))["outcomes"]}


def test_a_note_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    text = printed(compared(tmp_path, {"m\x1b\n.x.a": f32(1)}, {"x.a": f32(1)}))
    assert "note: no name is common" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode(tmp_path: Path, encoding: str) -> None:
    text = printed(
        compared(tmp_path, {"x.ä→": f32(1, 2, shape=(2, 1))}, {"x.ä→": f32(2, 2, shape=(2, 1))}), encoding=encoding
    )
    assert "2x1" in text
    assert "INCONSISTENT" in text


def test_every_field_of_the_contract_is_there(tmp_path: Path) -> None:
    right = {"x.a": f32(1, 2), "x.b": f32(1), "x.gone": f32(1), "x.shape": f32(1), "x.dtype": f32(1)}
    wrong = {
        "x.a": f32(1, float("nan")), "x.b": f32(1), "x.new": f32(1), "x.shape": f32(1, 2),
        "x.dtype": ("BF16", (1,), b"\x80\x3f"),
    }  # fmt: skip
    found = compared(tmp_path, wrong, right)
    report = json.loads(as_bytes(found), parse_constant=no_constant)
    assert report["schema"] == "consistency.report/1"
    assert report["verdict"] == "inconsistent"
    assert [w["name"] for w in report["workers"]] == [f"{tmp_path}/a.safetensors", f"{tmp_path}/b.safetensors"]
    assert report["reference"] == report["workers"][0]["name"]
    assert all(set(worker) >= WORKER for worker in report["workers"])
    assert all(set(outcome) >= OUTCOME for outcome in report["outcomes"])
    assert all(set(f) >= {"kind", "severity", "message", "workers", "tensors"} for f in report["findings"])
    by_name = {one["tensor"]: one for one in rows(report) if one["worker"] == report["workers"][1]["name"]}
    assert {name: outcome["status"] for name, outcome in by_name.items()} == {
        "a": "outside", "b": "equal", "gone": "missing", "shape": "outside", "dtype": "outside", "new": "unexpected",
    }  # fmt: skip
    assert by_name["a"]["max_abs"] == "nan"
    bits = {name: [one["bits"] for one in rows(report) if one["tensor"] == name] for name in by_name}
    assert bits == {"a": [0, 1], "b": [0, 0], "gone": [0, None], "shape": [0, 1], "dtype": [0, 1], "new": [0]}
    assert {one["stage"] for one in report["outcomes"]} == {"file"}
    assert {one["rule"] for one in report["outcomes"]} == {"bitwise"}


def test_examples_are_counted_and_steps_across_zero_are_none(tmp_path: Path) -> None:
    right: dict[str, Given] = {f"x.{i}": ("BF16", (1,), b"\x80\x3f") for i in range(7)}
    lines = printed(compared(tmp_path, {f"x.{i}": f32(1) for i in range(7)}, right)).splitlines()
    assert sum("got float32" in line for line in lines) == 5
    assert "     and 2 more" in lines
    lines = printed(compared(tmp_path, {"x.a": f32(-1)}, {"x.a": f32(1)})).splitlines()
    assert ["x.a", "1", "float32", "bit-flip", "1", "of", "1", "2", "across", "0"] in [line.split() for line in lines]
