"""Finders are found, each is called in its place, and those that others plug in cost nobody but themselves."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

import consistency
from consistency import plugins
from consistency.capture.records import TensorRecord
from consistency.cli.main import main
from consistency.comparison import kinds as kinds_of_findings
from consistency.comparison.findings.collect import in_their_order, of_this_package
from consistency.comparison.findings.evidence import ComparisonEvidence
from tests.comparison.made_records import compared, computed, moved
from tests.conftest import MakeCapture

PACKAGE = Path(consistency.__file__).parent
FOLDER = PACKAGE / "comparison" / "findings"

ORDER = (
    "damaged captures", "lost workers", "failed stages", "nothing compared", "values that are not finite",
    "software", "inputs", "versions",
    "wrong digests", "repeats", "transfers",
    "causes", "engines",
    "device use", "ranks", "healthy splits", "sums again", "undecided texts", "trajectories", "casts",
    "soak", "devices of one model",
    "host problems", "settings", "unknown hosts",
    "adapter without effect", "configs", "quantized weights",
    "tolerances", "planted faults", "skipped checks",
    "unexplained tensors",
)  # fmt: skip
"""The finders of this package, a line per phase: findings of one severity stand in a report in this order."""


def declared_functions() -> set[str]:
    """Return the functions of the folder whose names say that they are finders."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")]
    nodes = [node for tree in trees for node in tree.body]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("find_")}


def test_every_finder_of_the_folder_is_found() -> None:
    finders = [*of_this_package()]
    assert len(declared_functions()) > 20
    assert {finder.find.__name__ for finder in finders} == declared_functions()


def test_all_finders_have_one_signature() -> None:
    for finder in of_this_package():
        parameters = inspect.signature(finder.find).parameters
        assert [*parameters] == ["evidence"], finder.name
        assert parameters["evidence"].annotation == ComparisonEvidence.__name__, finder.name


def test_finders_are_called_in_their_order() -> None:
    assert tuple(entry.finder.name for entry in in_their_order()) == ORDER


def test_no_two_finders_of_this_package_have_one_place_or_one_name() -> None:
    for counts in (
        Counter(finder.place for finder in of_this_package()),
        Counter(finder.name for finder in of_this_package()),
    ):
        assert [value for value, count in counts.items() if count > 1] == []


# --- what others plug in ----------------------------------------------------------------------------------------------

OURS = """
from consistency.comparison import kinds as of_findings
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.result import Finding

KIND = of_findings.declare("of-our-own")

def find_ours(evidence):
    kinds = [str(finding.kind) for finding in evidence.findings]
    names = [worker.label for worker in evidence.workers]
    message = f"{len(evidence.tensors)} tensors on {names}, after {kinds}"
    yield Finding(kind=KIND, severity="error", message=message)

FINDER = Finder(name="ours", find=find_ours, PLACE)
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a plug-in of a test has declared, and how it failed."""
    monkeypatch.setattr(plugins, "_failures", [])
    monkeypatch.setattr(kinds_of_findings, "_DECLARED", {**kinds_of_findings._DECLARED})


def plug_in(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, reference: str = "FINDER") -> None:
    """Have a plug-in of another distribution name a finder in a module on the path."""
    (folder / "our_finder.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "our_finder", raising=False)
    ours = plugins.Plugin(name="ours", finders=(f"our_finder:{reference}",))
    monkeypatch.setattr(plugins, "plugins", lambda: (*plugins.own(), ours))


def capture_with_two_errors(make_capture: MakeCapture) -> Path:
    """Return a capture with a wrong tensor, and with devices of one model that differ."""
    program = {"kernel_key": "torch 2 cuda 13", "architecture": "Hopper sm_90", "model": "H200"}
    records: dict[str, list[TensorRecord]] = {
        "cpu": [moved("x"), computed("c")],
        "cuda:0": [moved(), computed()],
        "cuda:1": [moved(), computed("b")],
    }
    return make_capture("a", dict(records), info={"cuda:0": program, "cuda:1": program})


@pytest.mark.parametrize(
    ("place", "kinds", "earlier"),
    [
        ("phase=Phase.COMPLETENESS", ["of-our-own", "bit-flip", "same-device-type"], []),
        ("phase=Phase.CAUSES, position=1", ["bit-flip", "of-our-own", "same-device-type"], []),
        ("phase=Phase.STAGES", ["bit-flip", "of-our-own", "same-device-type"], ["bit-flip"]),
        ("phase=Phase.AGREEMENT, position=1", ["bit-flip", "of-our-own", "same-device-type"], ["bit-flip"]),
        ("phase=Phase.AGREEMENT", ["bit-flip", "same-device-type", "of-our-own"], ["bit-flip"]),
        ("phase=Phase.REMAINDER", ["bit-flip", "same-device-type", "of-our-own"], ["bit-flip", "same-device-type"]),
    ],
)
def test_a_finder_of_others_is_in_the_report_at_its_place(
    make_capture: MakeCapture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    place: str,
    kinds: list[str],
    earlier: list[str],
) -> None:
    capture = capture_with_two_errors(make_capture)
    plug_in(monkeypatch, tmp_path, OURS.replace("PLACE", place))
    assert main(["compare", str(capture), "--out", str(tmp_path / "out")]) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert [finding["kind"] for finding in errors] == kinds
    (ours,) = (finding for finding in errors if finding["kind"] == "of-our-own")
    assert ours["message"].startswith("2 tensors on ['cpu', 'cuda:0', 'cuda:1'], after [")
    assert [kind for kind in kinds if f"'{kind}'" in ours["message"]] == earlier
    assert plugins.failures() == ()


def test_rows_that_a_finder_of_others_reports_alone_have_no_other_cause(
    make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = "phase=Phase.STAGES, without_own=lambda _, tensors: [t for t in tensors if t.stage != 'adapter']"
    capture = capture_with_two_errors(make_capture)
    assert "bit-flip" in {finding.kind for finding in compared(capture).findings}
    plug_in(monkeypatch, tmp_path, OURS.replace("PLACE", place))
    assert "bit-flip" not in {finding.kind for finding in compared(capture).findings}


@pytest.mark.parametrize(
    ("source", "reference", "said"),
    [
        ("import no_such_library", "FINDER", "No module named 'no_such_library'"),
        ("raise SystemExit(3)", "FINDER", "SystemExit: 3"),
        ("", "FINDER", "no attribute 'FINDER'"),
        ("FINDER = 3", "FINDER", "TypeError: not a consistency.comparison.findings.finder.Finder, but int"),
        (OURS.replace("PLACE", "phase=Phase.MODEL").replace("evidence.workers", "1 / 0"), "FINDER", "division by zero"),
        (OURS.replace("PLACE", "phase=Phase.MODEL").replace('"error"', '"fatal"'), "FINDER", "KeyError: 'fatal'"),
        (OURS.replace("PLACE", "phase=Phase.MODEL").replace("yield Finding", "yield dict"), "FINDER", "'dict' object"),
        (
            OURS.replace("PLACE", "phase=Phase.MODEL").replace("kind=KIND", "kind='a-text'"),
            "FINDER",
            "no kind of findings is declared as a-text",
        ),
        (
            OURS.replace("PLACE", "phase=Phase.MODEL, without_own=lambda _, tensors: tensors[99]"),
            "FINDER",
            "index out of range",
        ),
    ],
)
def test_a_finder_of_others_that_fails_costs_itself_alone(
    make_capture: MakeCapture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: str,
    reference: str,
    said: str,
) -> None:
    capture = capture_with_two_errors(make_capture)
    before = compared(capture).findings
    plug_in(monkeypatch, tmp_path, source, reference)
    after = tuple(finding for finding in compared(capture).findings if finding.kind != "of-our-own")
    assert after == before
    (failure,) = plugins.failures()
    assert "our" in failure.sentence.partition(" cannot be used")[0]
    assert said in failure.sentence
    assert main(["compare", str(capture)]) == 1
    assert f"consistency: {failure.sentence}\n" in capsys.readouterr().err


def test_a_finder_of_this_package_that_fails_is_no_failure_of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours must not end as a note."""
    broken = ComparisonEvidence(workers=(None,))  # type: ignore[arg-type]
    for entry in in_their_order():
        if entry.finder.name == "lost workers":
            with pytest.raises(AttributeError):
                entry.find(broken)
    assert plugins.failures() == ()


# --- what is deleted --------------------------------------------------------------------------------------------------

DELETABLE = (
    "conditions", "lost_workers", "model", "nothing_compared", "tolerances", "workers",
)  # fmt: skip
"""Modules that nothing imports."""


@pytest.mark.process
def test_without_modules_of_finders_the_others_report_what_they_did(make_capture: MakeCapture, tmp_path: Path) -> None:
    capture = capture_with_two_errors(make_capture)
    kept = [
        [str(finding.kind), finding.message]
        for finding in compared(capture).findings
        if finding.kind in ("bit-flip", "same-device-type")
    ]
    home = tmp_path / "copy"
    shutil.copytree(PACKAGE, home / "consistency", ignore=shutil.ignore_patterns("__pycache__", "fixtures"))
    for name in DELETABLE:
        (home / "consistency" / "comparison" / "findings" / f"{name}.py").unlink()
    source = """
        import json, sys
        from pathlib import Path
        from consistency.capture.reader import read_capture
        from consistency.comparison.compare import compare
        findings = compare([read_capture(Path(sys.argv[1]))]).findings
        print(json.dumps([[str(finding.kind), finding.message] for finding in findings]))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(source), str(capture)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(kept) == 2
    assert json.loads(done.stdout) == kept
