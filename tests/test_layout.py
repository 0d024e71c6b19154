"""The shape of these tests: what several of them use stands in a module of its own."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.case.options import OPTIONS
from consistency.case.stage import Level
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
    assert Path("stages/adapter") in rooms
    assert [str(room) for room in rooms if not (TESTS.parent / "consistency" / room).is_dir()] == []


# --- what is to become less: an entry that was mended is taken off, and none is added ---------------------------------

PACKAGE = TESTS.parent / "consistency"

MANY_FILES = {
    "causes.py": 3, "check.py": 3, "folder.py": 4, "judging.py": 3, "merging.py": 4, "options.py": 3,
    "reading.py": 3, "records.py": 3, "suite.py": 4,
}  # fmt: skip
"""Names of more than two files."""

SHARED_BY_FOLDERS = {
    "again.py", "command.py", "cost.py", "faults.py", "findings.py", "items.py", "kinds.py", "page.py", "passes.py",
    "planted.py", "plugin.py", "result.py", "spec.py", "worker.py",
}  # fmt: skip
"""What every stage, or every extra, has in the same place."""

MANY_CLASSES = {
    "Advice": 2, "Answer": 3, "Cell": 3, "Change": 2, "Computed": 2, "Judged": 2,
    "Part": 2, "Place": 2, "Session": 2, "Source": 3, "Subject": 2, "Tables": 2, "Trial": 2,
    "Verdict": 2, "View": 2,
}  # fmt: skip
"""Public names of more than one class."""

MANY_PARAMETERS = {
    "extras/watching/training_watch.py:Watch.__init__": 9,
    "numerics/kernels/triton_digest_kernel.py:_sum_parts": 9,
    "testing/within.py:assert_within_rounding": 12, "testing/within.py:within_rounding": 12,
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
    every = [(place, place.rpartition("/")[2]) for place, _ in sources()]
    names = Counter(
        name for place, name in every if not (place.startswith(("extras/", "stages/")) and name in SHARED_BY_FOLDERS)
    )
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
    yield from (fault.plant for fault in FAULTS.values())


def test_every_reference_is_there() -> None:
    found = set(references())
    assert len(found) > 100
    for reference in found:
        module, _, name = reference.removeprefix("python:").partition(":")
        assert operator.attrgetter(name)(importlib.import_module(module)) is not None, reference


def test_every_stage_is_a_folder_of_one_shape() -> None:
    for spec in SPECS.values():
        module, _, function = spec.worker.partition(":")
        folder = PACKAGE / Path(*module.split(".")[1:-1])
        assert (module.rpartition(".")[2], function) == ("worker", "run"), spec.stage
        assert (folder / "spec.py").is_file()
        assert (folder / "faults.py").is_file(), f"{spec.stage}: nothing shows that it finds anything"


# --- a frame, and rooms that plug in: what the frame still names ------------------------------------------------------

EXTRAS = {"pytest_plugin": ("pytest_plugin",)}
"""Where extras lie that are not below `extras/` as a whole. A run of level `standard` does without each.

What a case and a capture hold is the frame's, whoever reads it: their formats are contracts (`case/engine_file.py`,
`case/named_adapters.py`, `capture/soak.py`). So is what every stage has beside it, such as the declaration of a planted
fault (`worker/faults`).
"""

OPTIONAL_STAGES = frozenset(spec.stage for spec in SPECS.values() if Level.STANDARD not in spec.levels)
"""Stages that no run of level `standard` takes, and which lie in extras. The frame and the others name none of them."""


OPTION_NAMES = frozenset(option.name for option in OPTIONS)


def extra_of(place: str) -> str:
    """Return the extra that a module is part of; empty for one of the frame."""
    if place.startswith("extras/") and place.count("/") > 1:
        return place.split("/")[1]
    matches = {
        part: extra
        for extra, parts in EXTRAS.items()
        for part in parts
        if place == part or place.startswith(f"{part}/")
    }
    return matches[max(matches, key=len)] if matches else ""


@functools.cache
def places() -> dict[str, str]:
    """Return the place of each module by its name in the package: `worker.session`."""
    return {place.removesuffix(".py").removesuffix("/__init__").replace("/", "."): place for place, _ in sources()}


def named_in(tree: ast.AST) -> Iterator[str]:
    """Yield what a module names of extras and optional stages: by import, or as a text.

    The name of an option that a case has without the stage of that name (`adapters`) names no stage.
    """
    for node in ast.walk(tree):
        names: set[str] = set()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {name.removeprefix("consistency.") for name in imported(ast.unparse(node))}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = {node.value.partition(":")[0].removeprefix("python:").removeprefix("consistency.")}
        for name in sorted(names):
            if extra := extra_of(places().get(name, "")):
                yield f"{extra}: {name}"
            elif name in OPTIONAL_STAGES and name not in OPTION_NAMES:
                yield f"stage: {name}"


def test_the_frame_names_no_extra() -> None:
    found = {place: {*named_in(tree)} for place, tree in sources() if not extra_of(place)}
    assert {place: names for place, names in found.items() if names} == {}


def test_every_way_to_name_an_extra_is_seen() -> None:
    ways = (
        "import consistency.extras.serving.check_text", "from consistency.extras.serving import check_text",
        "from consistency.extras.serving.check_text import check", "'consistency.extras.serving.check_text:Text'",
    )  # fmt: skip
    for way in ways:
        assert "serving: extras.serving.check_text" in {*named_in(ast.parse(way))}, way
    assert [*named_in(ast.parse("stage = 'sharding'"))] == ["stage: sharding"]
    assert [*named_in(ast.parse("stage = 'forward'"))] == []
