"""The shape of these tests: what several of them use stands in a module of its own."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.case.stages import SPECS
from consistency.report.formats import FORMATS
from consistency.worker.faults.catalogue import FAULTS

TESTS = Path(__file__).parent

_REFERENCE = re.compile(r"(?:python:)?consistency(?:\.\w+)+:\w+(?:\.\w+)?")


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


# --- what is to become less: an entry that was mended is taken off, and none is added ---------------------------------

PACKAGE = TESTS.parent / "consistency"

MANY_FILES = {
    "check.py": 3, "engine.py": 3, "folder.py": 4, "judging.py": 3, "load_paths.py": 3, "memory.py": 3, "merging.py": 4,
    "reading.py": 3, "records.py": 3, "stage.py": 13, "suite.py": 4,
}  # fmt: skip
"""Names of more than two files."""

MANY_CLASSES = {
    "Advice": 2, "Answer": 3, "Cell": 3, "Change": 2, "Computed": 2, "Engine": 2, "Judged": 2,
    "Part": 2, "Place": 2, "Session": 2, "Source": 3, "Subject": 2, "Tables": 2, "Trial": 2,
    "Verdict": 2, "View": 2,
}  # fmt: skip
"""Public names of more than one class."""

MANY_PARAMETERS = {
    "numerics/kernels/triton_digest_kernel.py:_sum_parts": 9,
    "workflows/api.py:run": 11, "workflows/api.py:run_suite": 9,
}  # fmt: skip
"""Functions with more than eight parameters."""


@functools.cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Return the modules of the package, by their place in it."""
    return tuple(
        (path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "fixtures" not in path.relative_to(PACKAGE).parts
    )


@pytest.mark.slow
def test_a_file_is_found_by_its_name() -> None:
    names = Counter(place.rpartition("/")[2] for place, _ in sources())
    assert {name: count for name, count in names.items() if count > 2 and name != "__init__.py"} == MANY_FILES


def test_a_class_is_found_by_its_name() -> None:
    names = Counter(node.name for _, tree in sources() for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name: count for name, count in names.items() if count > 1 and not name.startswith("_")} == MANY_CLASSES


def parameters(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """Yield the functions of a module, nested ones too, each by its qualified name and with how much it takes."""
    for node in ast.iter_child_nodes(tree):
        name = f"{within}.{node.name}".removeprefix(".") if isinstance(node, _NAMED) else within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            taken = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            yield name, len([one for one in taken if one is not None and one.arg not in ("self", "cls")])
        yield from parameters(node, name)


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def test_every_parameter_is_counted() -> None:
    source = "class A:\n def f(self, a, /, b, *c, d, **e): pass\nasync def f(a): pass\ndef g():\n def f(): pass"
    assert [*parameters(ast.parse(source))] == [("A.f", 5), ("f", 1), ("g", 0), ("g.f", 0)]


def test_no_function_has_many_parameters() -> None:
    found = [(f"{place}:{name}", count) for place, tree in sources() for name, count in parameters(tree)]
    assert sorted((name, count) for name, count in found if count > 8) == sorted(MANY_PARAMETERS.items())


def references() -> Iterator[str]:
    """Yield what the package names as `module:function`, for import when it is used."""
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _REFERENCE.fullmatch(node.value):
                yield node.value
    for spec in SPECS.values():
        yield from filter(None, (spec.worker, spec.again, spec.items, spec.cost))
    yield from (row.writer for row in FORMATS)
    yield from (f"consistency.worker.faults.{fault.plant}" for fault in FAULTS.values())


def test_every_reference_is_there() -> None:
    found = set(references())
    assert len(found) > 100
    for reference in found:
        module, _, name = reference.removeprefix("python:").partition(":")
        assert callable(operator.attrgetter(name)(importlib.import_module(module))), reference


def test_stages_are_independent_of_each_other_in_the_contract() -> None:
    contracts = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (independent,) = [one["modules"] for one in contracts["contracts"] if one["type"] == "independence"]
    assert sorted(independent) == sorted(
        {spec.worker.partition(":")[0].removesuffix(".stage") for spec in SPECS.values()}
    )
