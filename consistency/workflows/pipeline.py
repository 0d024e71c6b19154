"""The one place that composes the steps: case and devices -> capture -> compare -> files of a report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.folder import Capture, capture_name
from consistency.capture.reader import NoCaptureError, RecordPool, brief, read_capture
from consistency.capture.sent import read_sent
from consistency.capture.transport import ARCHIVE, deliver, is_remote, refuse_to_replace, travels
from consistency.capture.whole_file import write_whole
from consistency.case.budget.fit import Budget
from consistency.case.case import Case
from consistency.case.engine_file import EngineFile
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.comparison.compare import compare
from consistency.comparison.history.baseline import Baseline, apply
from consistency.comparison.history.drift import add_run
from consistency.comparison.history.store import History
from consistency.comparison.result import Comparison, made
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.weight_files.diff import diff
from consistency.devices.discovery import select
from consistency.devices.spec import DeviceInfo
from consistency.errors import CaptureError, UsageError
from consistency.launch.engine import LOCAL, Captured, CaseTask, Limits, Watcher, capture_case, engine
from consistency.launch.plan import plan_waves
from consistency.report.formats import Chosen, View, formats
from consistency.report.summary import all_groups
from consistency.workflows.engine_capture import case_of_engines, engines_alone, on_the_cpu
from consistency.workflows.planning import budget_of

CAPTURES = "captures"
_MOST_DAMAGE = 6  # one line of an error is no place for a thousand workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A valid case, the devices it runs on, and how long it may take.

    Attributes
    ----------
    faults : mapping of str to str
        Fault to plant (of `consistency.worker.faults`) by name of the device, to test the tool itself.
    engine : str
        What runs the workers, of `consistency.launch.engine`.
    stages : mapping of str to sequence of (str, float)
        By worker its stages, with their shares of its time.
    """

    case: Case
    devices: tuple[DeviceInfo, ...]
    limits: Limits
    faults: Mapping[str, str] = field(default_factory=dict)
    engine: str = LOCAL
    stages: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a run; `folder` holds the files of the report and `captures/`, None where nothing was kept."""

    comparison: Comparison
    folder: Path | None
    elapsed_s: float

    def __repr__(self) -> str:
        """Return what that of the comparison says."""
        return repr(self.comparison).replace("<Comparison", "<Report", 1)

    @property
    def verdict(self) -> str:
        return self.comparison.verdict

    @property
    def exit_status(self) -> int:
        return self.comparison.exit_status


def prepare(options: Options) -> Plan:
    """Check everything that can be checked before a worker starts."""
    return plan_of(prepare_case(options), options)


def plan_of(case: Case, options: Options) -> Plan:
    """Return the plan of a case on the devices, and within the limits, that the options name; cut to what fits.

    Raises
    ------
    InputError
        It does not fit the memory of this host, however it is cut.
    """
    with options.source.naming():
        devices = select(options.devices)
        budget = budget_of(case, devices, threads=options.threads)
        if budget.refusal is not None:
            raise budget.refusal
    return plan_within(budget, options, devices)


def plan_within(budget: Budget, options: Options, devices: tuple[DeviceInfo, ...]) -> Plan:
    """Return the plan of a case that fits, on these devices."""
    limits = Limits(timeout_s=options.timeout, stall_s=options.stall, threads=options.threads, at_once=budget.at_once)
    stages = {worker.worker: [(stage.stage, stage.share) for stage in worker.stages] for worker in budget.workers}
    return Plan(case=budget.case, devices=devices, limits=limits, stages=stages)


def expected(plan: Plan) -> Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]:
    """Return the stages of the workers by the name of the case, for a display of the progress."""
    return {plan.case.name: plan.stages}


def capture(plan: Plan, target: Path, *, watch: Watcher, replace: bool = False) -> Captured:
    """Have the plan's engine run one worker per device and load path, and leave captures at `target`."""
    return capture_case(engine(plan.engine), task_of(plan, target), plan.limits, watch=watch, replace=replace)


def task_of(plan: Plan, target: Path) -> CaseTask:
    """Return what an engine has to capture of a case."""
    waves = plan_waves(plan.case, plan.devices)
    return CaseTask(case=plan.case, waves=waves, target=target, faults=plan.faults)


def capture_to(plan: Plan, target: str, *, watch: Watcher, replace: bool = False) -> Capture:
    """Leave a capture in a folder, in one file (`….zip`), or at a URL; return what is in it."""
    sent = travels(target)
    if sent and not replace:
        refuse_to_replace(target)
    with tempfile.TemporaryDirectory(prefix="consistency-capture-") as scratch:
        folder = Path(scratch, "capture") if sent else Path(target)
        capture(plan, folder, watch=watch, replace=replace)
        found = read_capture(folder)
        if sent:
            deliver(folder, target)
    return found


def run(
    plan: Plan,
    out: Path | None,
    *,
    watch: Watcher,
    replace: bool = False,
    history: History | None = None,
    baseline: Baseline | None = None,
) -> Report:
    """Capture, compare and report.

    Parameters
    ----------
    out : Path or None
        Folder for the files of the report and `captures/`; None keeps nothing.
    replace : bool
        Overwrite what an earlier run left in `out`.
    history : History, optional
        Earlier runs to compare with and append to.
    baseline : Baseline, optional
        Accepted findings.
    """
    started = time.monotonic()
    with output(out, replace=replace) as folder:
        left = capture(plan, folder / CAPTURES, watch=watch, replace=replace)
        captures, unread = read_captures(left.captures)
        comparison = compare_captures(captures, unread=[*left.lost, *unread])
        comparison = judged(captures, comparison, out, history=history, baseline=baseline)
        elapsed_s = time.monotonic() - started
        comparison = made(comparison, elapsed_s)
        write_reports(comparison, out)
    return Report(comparison=comparison, folder=out, elapsed_s=elapsed_s)


def compare_folders(
    given: Sequence[Capture | str | Path],
    out: Path | None,
    *,
    replace: bool = False,
    baseline: Baseline | None = None,
    schema: int | None = None,
    groups: SiteGroups = NO_GROUPS,
    history: History | None = None,
    engines: Sequence[EngineFile] = (),
    watch: Watcher = lambda *_: None,
) -> Comparison:
    """Compare captures that were made apart; write the report to `out`.

    They are given read, or as folders, ZIP files or URLs of captures or of the `--out` folders of runs. `engines` are
    outputs of inference engines, which are judged for the case of the first capture. The result is compared with, and
    added to, a history.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="consistency-compare-") as scratch:
        captures, unread = read_captures(given, Path(scratch))
        if engines:
            captures.append(_engines(captures[0], engines, Path(scratch), watch))
        comparison = _compared(captures, unread, given, groups)
        comparison = judged(captures, comparison, out, history=history, baseline=baseline)
        comparison = made(comparison, time.monotonic() - started)
        folders = [one.folder if isinstance(one, Capture) else Path(one) for one in given if _is_local(one)]
        with output(out, replace=replace, reads=folders):
            write_reports(comparison, out, schema=schema)
    return comparison


def compare_read(folders: Sequence[Path], groups: SiteGroups = NO_GROUPS) -> tuple[list[Capture], Comparison]:
    """Compare captures in folders of this host, and write nothing; return them with their comparison."""
    captures, unread = read_captures(folders)
    return captures, _compared(captures, unread, folders, groups)


def _compared(
    captures: Sequence[Capture],
    unread: Sequence[str],
    given: Sequence[Capture | str | Path],
    groups: SiteGroups,
) -> Comparison:
    comparison = compare_captures(captures, unread=unread, groups=groups)
    return msgspec.structs.replace(comparison, captures=tuple(map(_place, given)))


def judged(
    captures: Sequence[Capture],
    comparison: Comparison,
    out: Path | None,
    *,
    history: History | None,
    baseline: Baseline | None,
) -> Comparison:
    """Return a comparison with what a history and a baseline say of it; it is added to the history.

    `out` is the folder that its report will be in.
    """
    if history is not None:
        return add_run(history, captures, comparison, baseline, report="" if out is None else str(out.resolve()))
    return comparison if baseline is None else apply(baseline, comparison)


def _engines(first: Capture, files: Sequence[EngineFile], scratch: Path, watch: Watcher) -> Capture:
    """Judge the outputs of inference engines for the case of a capture; its float64 reference is computed again."""
    plan = plan_of(case_of_engines(first, files), on_the_cpu())
    target = scratch / "engines"
    capture(plan, target, watch=watch)
    return engines_alone(read_capture(target))


def _place(one: Capture | str | Path) -> str:
    if isinstance(one, Capture):
        return str(one.folder)
    return str(one) if is_remote(str(one)) else str(Path(one).resolve())


def _is_local(one: Capture | str | Path) -> bool:
    return isinstance(one, Capture) or not travels(str(one))


def read_captures(
    sources: Sequence[Capture | str | Path], scratch: Path | None = None
) -> tuple[list[Capture], list[str]]:
    """Return the captures that can be read, and one sentence for each of the others.

    One damaged capture, or one of another version, does not keep a thousand others from being compared. A path that
    leads nowhere is a mistake in the command, not a damaged capture.

    Parameters
    ----------
    scratch : Path or None
        Where those that are no folders are unpacked, as long as the captures are used; None if all are folders.

    Raises
    ------
    CaptureError
        A folder is missing or is no capture, or no capture can be read.
    """
    pool = RecordPool()
    found: list[Capture] = []
    errors: list[CaptureError] = []
    unread: list[str] = []
    for one in sources:
        try:
            if isinstance(one, Capture):
                found.append(one)
            else:
                found.append(read_capture(Path(one), pool) if scratch is None else read_sent(str(one), scratch, pool))
        except NoCaptureError:
            raise
        except CaptureError as error:
            errors.append(error)
            unread.append(f"{capture_name(Path(str(one))).removesuffix(ARCHIVE)}: left out: {brief(error)}")
    if errors and not found:
        raise errors[0]
    return found, unread


def diff_weights(
    actual: Path, expected: Path, out: Path | None, *, allow_pickle: bool = False, replace: bool = False
) -> Comparison:
    """Compare two weight files or folders; write the report to `out`."""
    with output(out, replace=replace, reads=(actual, expected)):  # refused before any work
        started = time.monotonic()
        comparison = diff(actual, expected, allow_pickle=allow_pickle)
        comparison = made(comparison, time.monotonic() - started)
        write_reports(comparison, out)
    return comparison


def compare_captures(
    captures: Sequence[Capture], *, unread: Sequence[str] = (), groups: SiteGroups = NO_GROUPS
) -> Comparison:
    """Compare captures; `unread` has one sentence for each of them that cannot be read.

    Raises
    ------
    UsageError
        No tensor was checked, and no worker was lost: the options select nothing.
    """
    comparison = compare(captures, unread=unread, groups=groups)
    if not comparison.tensors and all(worker.status == "ok" for worker in comparison.workers):
        damage = [text for capture in captures for text in capture.damage]
        if damage:
            raise CaptureError("no worker of the capture can be read", got="; ".join(damage[:_MOST_DAMAGE]))
        raise UsageError("no tensor was checked: the options select none", where="--stages or --only")
    return comparison


def write_reports(comparison: Comparison, out: Path | None, *, schema: int | None = None) -> None:
    """Write the files of a report to a folder; `schema` is that of `report.json` (`View`)."""
    if out is not None:
        view = View(schema=schema, elapsed_s=comparison.elapsed_s, groups=all_groups(comparison))
        for row in formats(Chosen.OUT):
            write_whole(out / row.name, row.render(comparison, view))


@contextmanager
def output(
    out: Path | None,
    *,
    replace: bool,
    reads: Sequence[Path] = (),
    writes: Sequence[str] | None = None,
    keeps: Callable[[Path], bool] = lambda _: False,
) -> Iterator[Path]:
    """Yield the folder to write into; one that was made here is removed where the work fails.

    Parameters
    ----------
    reads : sequence of Path
        Folders that are read, and so cannot be it.
    writes : sequence of str, optional
        What will be in it, and must not be there yet unless `replace`; by default what a run writes.
    keeps : callable
        Reports whether the folder of failed work holds something worth keeping.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="consistency-run-") as scratch:
            yield Path(scratch)
        return
    if out.exists() and not out.is_dir():
        raise CaptureError("--out must be a folder", where=out, got="a file")
    if out.resolve() in [folder.resolve() for folder in reads]:
        raise CaptureError("--out is one of the folders that are compared", where=out, hint="choose another folder")
    names = (*(row.name for row in formats(Chosen.OUT)), CAPTURES) if writes is None else writes
    present = [name for name in names if (out / name).exists()]
    if present and not replace:
        raise CaptureError(
            "an earlier run's results are in the way",
            where=out,
            got=", ".join(present),
            hint="choose another --out, or give --force to replace them",
        )
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError("cannot make the output folder", where=out, got=error) from None
    try:
        yield out
    except BaseException:
        if not existed and not keeps(out):
            with suppress(OSError):
                shutil.rmtree(out)
        raise
