"""A feature, or a stage, can be deleted: a copy of the package without its code still does its main job.

What a feature is spread over stands here; the shorter its list, the better.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from consistency.case import standard
from consistency.case.stage import Level, Stage
from consistency.case.stages import SPECS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]

FEATURES = {
    "the drill": ("worker/faults", "extras/diagnosis/drill"),
    "diagnosis": ("extras/diagnosis",),
    "serving": ("extras/serving",),
    "training": ("extras/training",),
    "several adapters, sharding and wrapping": ("extras/peft_api",),
    "files of weights": ("extras/merging",),
    "operations": ("extras/operations",),
    "watching a training": ("extras/watching",),
    "every extra": ("extras",),
    "explaining words": ("cli/glossary.py", "cli/commands/explain.py"),
    "the environment of an issue": ("workflows/host_environment.py", "cli/commands/env.py"),
    "the pytest plugin": ("pytest_plugin",),
}  # fmt: skip
"""The folders and modules of each feature that is off unless it is asked for."""

CORE = frozenset({standard.BASE})
"""The stage that loads the model for all others."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package with its bytecode, which copies of it can use: compiling takes longer than a run."""
    home = tmp_path_factory.mktemp("package") / "consistency"
    shutil.copytree(HERE / "consistency", home, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(home, quiet=1)
    return home


RUNNER = """
import json, os, sys, traceback
import peft, pytest, torch, transformers  # before any copy of the package is there to be imported

def run(home, level):
    os.chdir(home)
    sys.path.insert(0, home)
    import consistency
    assert consistency.__file__.startswith(home), consistency.__file__
    from consistency.cli.main import main
    from tests.launch.in_this_process import in_this_process
    with in_this_process():
        status = main(["run", "--devices", "cpu", "--level", level, "--out", "out"])
    return status or main(["completion", "bash"])

sys.path.append(sys.argv[1])
for line in sys.stdin:
    home, level = json.loads(line)
    child = os.fork()
    if child == 0:
        printed = os.open(home + "/printed", os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        try:
            status = run(home, level)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports the libraries once, and runs each copy in a fork: importing takes as long as two such runs."""

Run = Callable[[Path, Level], int]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-c", RUNNER, str(HERE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None
        requests, answers = runner.stdin, runner.stdout

        def run(home: Path, level: Level) -> int:
            requests.write(json.dumps([str(home), level]) + "\n")
            requests.flush()
            return int(answers.readline())

        yield run


def without(package: Path, run: Run, home: Path, *parts: str, level: Level = Level.QUICK) -> set[str]:
    """Run the built-in case with a copy of the package that lacks these parts; return the stages that were checked."""
    shutil.copytree(package, home / "consistency")
    for folder in ("fixtures", "docs"):
        (home / folder).symlink_to(HERE / folder)
    for part in parts:
        place = home / "consistency" / part
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()
    assert run(home, level) == 0, (home / "printed").read_text(encoding="utf-8")
    assert report_of(home)["verdict"] == "consistent"
    return {row[1] for row in rows_of(home)}


def report_of(home: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((home / "out" / "report.json").read_text(encoding="utf-8"))
    return report


def rows_of(home: Path) -> list[tuple[str, ...]]:
    """Return each row of a report: its place, its status, and what it was judged by."""
    names = ("load_path", "stage", "layer", "tensor", "status", "rule", "word", "reason")
    return sorted(tuple(str(row.get(name)) for name in names) for row in report_of(home)["outcomes"])


@pytest.mark.parametrize("feature", FEATURES)
def test_without_a_feature_the_main_job_is_done(package: Path, run: Run, tmp_path: Path, feature: str) -> None:
    level = Level.STANDARD if feature == "serving" else Level.QUICK  # which are a part of `forward`
    assert {"base", "adapter", "merged"} <= without(package, run, tmp_path, *FEATURES[feature], level=level)


def test_without_any_extra_a_run_has_the_same_rows(package: Path, run: Run, tmp_path: Path) -> None:
    """The verdict would be the same without some of them."""
    for name, parts in (("whole", ()), ("frame", ("extras",))):
        (tmp_path / name).mkdir()
        without(package, run, tmp_path / name, *parts, level=Level.STANDARD)
    whole, frame = rows_of(tmp_path / "whole"), rows_of(tmp_path / "frame")
    assert len(whole) > 400
    assert frame == whole


@pytest.mark.parametrize("stage", [stage for stage in SPECS if stage not in CORE])
def test_without_a_stage_the_others_are_checked(package: Path, run: Run, tmp_path: Path, stage: Stage) -> None:
    part = SPECS[stage].worker.partition(":")[0].removeprefix("consistency.").removesuffix(".worker").replace(".", "/")
    levels = SPECS[stage].levels
    level = Level.STANDARD if Level.STANDARD in levels and Level.QUICK not in levels else Level.QUICK
    checked = without(package, run, tmp_path, part, level=level)
    assert stage not in checked
    assert checked >= {"base", "adapter", "merged"} - {stage}
