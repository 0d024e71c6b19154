"""Fixtures that start the tool as its users do, and captures made by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.json_codec import encode_json
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.reading import make_options
from consistency.case.suite import SuiteOptions
from consistency.cli.main import main
from consistency.comparison.result import Comparison
from consistency.devices.host import HostFacts
from consistency.workflows import pipeline, suite
from tests.accelerator.fixtures import Warm, double, run_on_double, shared_temp, warm_double  # noqa: F401 - fixtures for all tests
from tests.extras.operations.fleet.schedulers.ray_cluster import ray_nodes  # noqa: F401 - the same
from tests.extras.operations.fleet.schedulers.slurm_cluster import slurm  # noqa: F401 - the same
from tests.launch.in_this_process import in_this_process
from tests.launch.warm import ROOT, forked_workers, warm_process
from tests.trained import smollm2  # noqa: F401 - the same

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class FinishedRun:
    """A run of the command line that left its files."""

    process: subprocess.CompletedProcess[str]
    folder: Path


class _Output(io.TextIOWrapper):
    """What a command writes, as text and as bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.seek(0)
        return self.read()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", "consistency", *map(str, arguments)]


HAS_WORKERS = ("run", "capture", "drill")


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Return the process that has imported the libraries, for workers of many runs; it starts when it is asked for."""
    with warm_process(tmp_path_factory.getbasetemp(), {}) as process:
        yield process


@pytest.fixture(scope="session")
def cli(warm: Warm) -> Cli:
    """Run the command line in a process of its own.

    Its workers are forked from one process for all runs, unless `by_exec` asks for those that users have.
    """

    def run(*arguments: object, by_exec: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"timeout": 300, "env": os.environ, **options}
        words = command(*arguments)
        if not by_exec and arguments[:1] and arguments[0] in HAS_WORKERS:
            words = warm().command(*arguments)
            path = [str(ROOT), options["env"].get("PYTHONPATH")]
            options["env"] = {**options["env"], "PYTHONPATH": os.pathsep.join(filter(None, path))}
        return subprocess.run(words, capture_output=True, text=True, check=False, **options)

    return run


@pytest.fixture
def warm_pytest(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pytest that `pytester` starts have workers that are forked from one process for all runs."""
    for name, value in warm().environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def cli_here() -> Cli:
    """Run the command line in this process, its workers too, where neither is what a test is about."""

    def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        out, err = _Output(), _Output()
        words = [str(argument) for argument in arguments]
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
        with contextlib.ExitStack() as stack:
            for number, handler in handlers.items():
                stack.callback(signal.signal, number, handler)  # the command line takes them for itself
            stack.enter_context(in_this_process())
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            if cwd is not None:
                stack.enter_context(contextlib.chdir(cwd))
            try:
                status = main(words)
            except SystemExit as ended:  # `--help` and `--version`
                status = int(ended.code or 0)
        return subprocess.CompletedProcess(words, status, out.text(), err.text())

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Run the main job as users do, once for all tests that read its results, on all processes of xdist."""
    home = shared_temp(tmp_path_factory) / "main-job"
    home.mkdir(exist_ok=True)
    done, folder = home / "process.json", home / "out"
    with FileLock(home / "lock"):
        if not done.exists():
            words = command("run", "--out", folder, "--repeat", 2)
            process = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
            done.write_text(json.dumps({**vars(process), "args": process.args}))
    return FinishedRun(subprocess.CompletedProcess(**json.loads(done.read_text())), folder)


@pytest.fixture
def run_with_faults() -> Callable[..., Comparison]:
    """Run a built-in case with faults planted in its workers, which are in this process."""

    def run(faults: dict[str, str], **options: Any) -> Comparison:
        options = {"base": "builtin:llama", "devices": ("cpu", "cpu@baseline"), **options}
        plan = pipeline.prepare(make_options(options))
        plan = dataclasses.replace(plan, faults=faults)
        with in_this_process():
            return pipeline.run(plan, None, watch=lambda *_: None).comparison

    return run


RunSuiteWithFaults = Callable[..., dict[str, Comparison]]


@pytest.fixture(scope="session")
def run_suite_with_faults(warm: Warm) -> RunSuiteWithFaults:
    """Run cases in one set of workers, with faults by case and device: a process for each run costs most of its time.

    The workers are in this process, or `forked` where the kernels of a variant matter or a fault ends them, or started
    as users have them where their environment matters (`processes`). That nothing of a case, nor of a fault, is left
    for the next one is seen in test_kept_base.py and test_faults.py.
    """

    def run(
        cases: dict[str, dict[str, Any]], faults: dict[str, dict[str, str]], *, processes: bool = False,
        forked: bool = False, **shared: Any,
    ) -> dict[str, Comparison]:  # fmt: skip
        shared = {"base": "builtin:llama", "devices": ("cpu", "cpu@baseline"), **shared}
        options = tuple(make_options({**shared, **own, "name": name}) for name, own in cases.items())
        plan = suite.prepare_suite(SuiteOptions(name="faults", shared=make_options(shared), cases=options))
        plan = plan.with_faults(faults)
        found: dict[str, Comparison] = {}
        with forked_workers(warm().address) if forked else contextlib.nullcontext() if processes else in_this_process():
            result = suite.run_suite(plan, None, watch=lambda *_: None, each=found.__setitem__)
        assert {case.name: case.error for case in result.cases if case.error is not None} == {}
        return found

    return run


MakeCapture = Callable[..., Path]


@pytest.fixture
def make_capture(tmp_path: Path) -> MakeCapture:
    """Write a capture of records made by hand."""

    def make(
        name: str,
        workers: dict[str, Sequence[TensorRecord]],
        *,
        info: dict[str, dict[str, Any]] | None = None,
        case: dict[str, Any] | None = None,
        host_facts: HostFacts | None = None,
        host: str | None = None,
    ) -> Path:
        full_case = Case(**{"name": "made-up", "base": "base", "adapter": "adapter", **(case or {})})
        with CaptureWriter(tmp_path / name) as writer:
            slugs = []
            for device, records in workers.items():
                fields: dict[str, Any] = {
                    "name": device,
                    "load_path": "isolated",
                    "architecture": "x86-64",
                    "model": "chip",
                    "status": "ok",
                    "stages_done": ("base", "adapter", "merged", "forward"),
                    **((info or {}).get(device) or {}),
                }
                slug = worker_slug(device, fields["load_path"])
                writer.write_worker(slug, WorkerInfo(**fields))
                lines = b"".join(encode_json(record) + b"\n" for record in records)
                (writer.worker_folder(slug) / "records.jsonl").write_bytes(lines)
                slugs.append(slug)
            return writer.commit(
                CaptureManifest(
                    schema=SCHEMA,
                    tool="0",
                    created="2026-01-01",
                    host=host or name,
                    case=full_case,
                    workers=tuple(slugs),
                    host_facts=host_facts,
                )
            )

    return make


@pytest.fixture
def llama_base() -> Path:
    return builtin_folder("llama") / "base"


@pytest.fixture
def llama_adapter() -> Path:
    return builtin_folder("llama") / "adapter"


@pytest.fixture
def worker_commands() -> Callable[[], list[str]]:
    """Return the command lines of this machine's workers that write below a folder of the test."""

    def workers() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "consistency.worker" in text:
                found.append(text)
        return found

    return workers
