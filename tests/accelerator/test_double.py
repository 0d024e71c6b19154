"""The double itself: its tests run in a process that has it (`inside.py`), and each has an item here."""

from __future__ import annotations

import ast
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from . import build as building
from .build import NotBuiltError
from .fixtures import Double
from .software_accelerator.settings import Settings, _visible

INSIDE = Path(__file__).with_name("inside.py")
NAMES = [
    node.name
    for node in ast.parse(INSIDE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]

Outcomes = dict[str, list[str]]


@pytest.fixture(scope="module")
def outcomes(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return what failed inside, by test; a test that ran and did not fail has an empty list."""
    report = tmp_path_factory.mktemp("inside") / "inside.xml"
    done = double.python(
        "-m", "pytest", INSIDE, "--noconftest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-q",
        "--junitxml", report,
        devices=4, architectures=["A", "A", "B", "C"], memory_bytes=2**20,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found: Outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        messages = found.setdefault(str(case.get("name")).partition("[")[0], [])
        messages += [f"{case.get('name')}: {child.text}" for child in case if child.tag != "properties"]
    assert found, done.stdout
    return found


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_inside(outcomes: Outcomes, name: str) -> None:
    assert name in outcomes
    assert not outcomes[name], "\n".join(outcomes[name])


@pytest.mark.parametrize(
    ("shown", "devices"),
    [(None, (0, 1, 2, 3)), ("2", (2,)), ("3,1", (3, 1)), ("", ()), ("1,9,0", (1,)), ("1,1", (1,)), ("-1", ())],
)
def test_what_a_process_sees(shown: str | None, devices: tuple[int, ...]) -> None:
    assert _visible(range(4), shown) == devices


def test_numbers_skip_a_device_that_is_lost() -> None:
    assert _visible((0, 2, 3), None) == (0, 2, 3)
    assert _visible((0, 2, 3), "2,1") == (3, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": 3}, "unknown field"),
        ({"devices": 0}, ">= 1"),
        ({"devices": 2, "architectures": ["A"]}, "1 architectures for 2 devices"),
        ({"architectures": ["Z"]}, "architectures"),
        ({"copies": [{"from": "npu:0", "to": "npu:1", "does": "explode"}]}, "explode"),
        ({"copies": [{"from": "npu:0", "does": "drop"}]}, "to"),
        ({"fill": 256}, "<= 255"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"CONSISTENCY_DOUBLE: .*{said}"):
        Settings.checked(json.dumps(settings))


def test_no_compiler_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NotBuiltError, match="no C\\+\\+ compiler"):
        building.build(tmp_path)


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("#include <headers/of_torch.h>", NotBuiltError, "lacks what it needs: .*of_torch.h"),
        ("not C++", RuntimeError, "does not compile"),
    ],
)
def test_missing_headers_are_a_reason_to_skip_and_errors_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, kind: type[Exception], said: str, double: Double
) -> None:
    native = tmp_path / "native"
    native.mkdir()
    (native / "module.cpp").write_text(source)
    monkeypatch.setattr(building, "NATIVE", native)
    with pytest.raises(kind, match=said):
        building.build(tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["lock"]


def test_build_is_made_once(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_make", lambda *_: pytest.fail("built again"))
    assert building.build(double.folder.parent) == double.folder
