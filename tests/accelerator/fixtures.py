"""The double for tests: built once, plugged in by environment alone, and runs of the tool on it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from consistency.comparison.result import Comparison
from consistency.workflows import comparing
from tests.launch.warm import WarmProcess, warm_process

from .build import NotBuiltError, build
from .software_accelerator.settings import LATER, VARIABLE, VISIBLE, Settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Double:
    """The built double.

    Attributes
    ----------
    folder : Path
        On `PYTHONPATH` it is a backend of torch.
    """

    folder: Path

    def environment(self, **settings: Any) -> dict[str, str]:
        """Return the environment of a process that has the double, with `Settings` as in JSON."""
        text = json.dumps(settings)
        Settings.checked(text)
        path = [str(self.folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {name: value for name, value in os.environ.items() if name not in (VISIBLE, "PYTEST_ADDOPTS")}
        # a real GPU of this machine would come before it
        return found | {"PYTHONPATH": os.pathsep.join(path), VARIABLE: text, "CUDA_VISIBLE_DEVICES": ""}

    def python(self, *arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run Python in a process that has the double."""
        command = [sys.executable, "-P", *map(str, arguments)]
        environment = self.environment(**settings)
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, env=environment, cwd=ROOT
        )


@dataclass(frozen=True)
class RunOnDouble:
    """A run of the command line on the double, and what it left."""

    process: subprocess.CompletedProcess[str]
    folder: Path

    @functools.cached_property
    def comparison(self) -> Comparison:
        return comparing.compare_folders([self.folder / "captures"], None)

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return found


RunsOnDouble = Callable[..., RunOnDouble]
Warm = Callable[[], WarmProcess]


def shared_temp(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this test run, the same one for all processes of pytest-xdist."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def double(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Double:
    """Build the double, or skip with the reason why it cannot be built here."""
    cache = getattr(pytestconfig, "cache", None)  # none with `-p no:cacheprovider`
    folder = shared_temp(tmp_path_factory) if cache is None else cache.mkdir("software_accelerator")
    try:
        return Double(folder=build(Path(folder)))
    except NotBuiltError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def warm_double(double: Double, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Return the process that has imported the libraries with the double, whose devices are made in its forks."""
    environment = {**double.environment(), VARIABLE: LATER, VISIBLE: ""}
    with warm_process(tmp_path_factory.getbasetemp(), environment) as process:
        yield process


@pytest.fixture(scope="session")
def run_on_double(double: Double, warm_double: Warm, tmp_path_factory: pytest.TempPathFactory) -> RunsOnDouble:
    """Run `consistency run` on the double: settings of the double first, then the command's options by name.

    Its workers are forked from one process for all runs, unless `by_exec` asks for those that users have.
    """
    folder = tmp_path_factory.getbasetemp()

    def run(settings: dict[str, Any], *, by_exec: bool = False, **options: str) -> RunOnDouble:
        out = Path(tempfile.mkdtemp(dir=folder, prefix="on-double-")) / "out"
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        # without `python -P`, which the double adds itself
        command = ("-m", "consistency") if by_exec else warm_double().command()[2:]
        return RunOnDouble(double.python(*command, "run", "--out", out, *words, **settings), out)

    return run
