"""The shape of these tests: what several of them use stands in a module of its own."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def imported(source: str) -> set[str]:
    """Return the modules that a source imports from, and the names that it may import as modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_module_imports_a_test_module() -> None:
    modules = {".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in TESTS.rglob("test_*.py")}
    assert __name__ in modules
    for path in TESTS.rglob("*.py"):
        assert not imported(path.read_text()) & modules, f"{path} takes from a test module what needs its own module"


def test_every_way_to_import_is_seen() -> None:
    assert "tests.a.test_b" in imported("import tests.a.test_b")
    assert "tests.a.test_b" in imported("def f():\n    from tests.a.test_b import c")
    assert "tests.a.test_b" in imported("from tests.a import test_b")


def test_tests_stand_in_the_room_that_they_test() -> None:
    rooms = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {
        Path("accelerator"),
        Path("gpu"),
        Path("golden"),
    }
    assert Path("worker/stages/adapter") in rooms
    assert [str(room) for room in rooms if not (TESTS.parent / "consistency" / room).is_dir()] == []
