"""Every kind of a finding has its home: no finding is made with a text of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.comparison import kinds as module
from consistency.comparison.kinds import FindingKind

DECLARED = [kind for kind in module.declared() if kind in vars(module).values()]
"""Those of the frame."""

PACKAGE = Path(__file__).parents[2] / "consistency"


def bare_kinds(source: str) -> Iterator[object]:
    """Yield the texts that a source gives as the kind of a `Finding`."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding":
            kinds = [keyword.value for keyword in call.keywords if keyword.arg == "kind"]
            choices = [
                part for kind in kinds for part in ([kind.body, kind.orelse] if isinstance(kind, ast.IfExp) else [kind])
            ]
            yield from (part.value for part in choices if isinstance(part, ast.Constant))


def test_no_finding_has_a_kind_of_its_own() -> None:
    sources = {str(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {path: [*bare_kinds(source)] for path, source in sources.items() if "kind=" in source}
    assert {path: kinds for path, kinds in found.items() if kinds} == {}


def test_a_kind_of_its_own_is_seen() -> None:
    assert [*bare_kinds('Finding(kind="a" if x == "b" else c, severity="error", message="")')] == ["a"]
    assert [*bare_kinds('Finding(kind="d", severity="error", message="")')] == ["d"]


@pytest.mark.parametrize("kind", DECLARED)
def test_every_kind_is_used(kind: FindingKind) -> None:
    name = next(name for name, value in vars(module).items() if value == kind)
    uses = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "kinds.py")
    assert any(f"kinds.{name}" in source for source in uses)
