"""The items: `consistency::CASE::STAGE::LAYER.TENSOR[DEVICE]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionInfo,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTracebackNative,
    TerminalRepr,
)

from consistency.case.load_path import LoadPath, is_alternative
from consistency.case.stage import Stage
from consistency.comparison import kinds
from consistency.comparison.findings.details import describe
from consistency.comparison.result import BAD, Comparison, Finding, Outcome, TensorComparison
from consistency.errors import did_you_mean
from consistency.launch.plan import WorkerPlan
from consistency.numerics import words
from consistency.pytest_plugin.failures import without_stack
from consistency.pytest_plugin.item_names import Place, own_place
from consistency.pytest_plugin.session import LostWorkerError, Session, SessionCase
from consistency.report.summary import class_text
from consistency.text import clean, one_line

_ROOT = "consistency"
_RUN_KINDS = frozenset(
    {
        kinds.DRIFT,
        kinds.NOT_REPEATABLE,
        kinds.SAME_DEVICE_TYPE,
        kinds.INPUTS,
        kinds.DAMAGED_CAPTURE,
    }
)


class MismatchError(Exception):
    """A tensor does not match its reference; `reason` says why in a few words, for one line of a summary."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Branch(pytest.Collector):
    """A node of the tree of items: the root, a case, or a stage. `make_items` makes its items."""

    def collect(self) -> list[pytest.Item]:
        return []


class CaseItem(pytest.Item):
    """An item whose outcome is part of the comparison of its case."""

    def __init__(self, *, case: SessionCase, session_of_case: Session, **rest: Any) -> None:
        super().__init__(**rest)
        self.case, self.session_of_case = case, session_of_case

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.nodeid.replace("::", " ")  # pytest splits a node id at dots

    def setup(self) -> None:
        with without_stack():
            self.prepare()

    def prepare(self) -> None:
        """Get what the test needs; an error of it is an error of the set-up."""
        raise NotImplementedError

    def repr_failure(self, excinfo: ExceptionInfo[BaseException], style: Any = None) -> str | TerminalRepr:
        if isinstance(excinfo.value, MismatchError):
            text = clean(str(excinfo.value))
            # a FAILED line has the message of the place of the crash, and little room beside a long node id
            place = ReprFileLocation(str(self.path), 0, one_line(excinfo.value.reason))
            return ReprExceptionInfo(reprtraceback=ReprTracebackNative([text + "\n"]), reprcrash=place)
        return super().repr_failure(excinfo, style)

    def lost(self, comparison: Comparison, worker: str, load_path: str) -> None:
        """Raise if this worker was lost."""
        for summary in comparison.workers:
            if (summary.name, summary.load_path) == (worker, load_path) and summary.status != "ok":
                verb = "was lost" if summary.status == "lost" else "failed"
                shown = self.session_of_case.stacks
                stack = None if summary.stack in shown else summary.stack
                shown.add(stack)
                raise LostWorkerError(f"{worker} {verb}: {summary.reason}", stack)


class DeviceItem(CaseItem):
    """One tensor, or the rest of a stage, on one device.

    A mismatch fails the test; a worker that was lost before it checked the tensor is an error of the set-up.
    """

    def __init__(self, *, place: Place, plan: WorkerPlan, **rest: Any) -> None:
        super().__init__(**rest)
        self.place, self.plan = place, plan
        self.extra_keyword_matches.add(plan.info.architecture)  # for -k sm_90
        self.found: list[tuple[TensorComparison, Outcome]] = []

    def prepare(self) -> None:
        comparison = self.session_of_case.comparison(self.case)
        self.found = list(self.session_of_case.rows(self.case).rows(self.place, self.plan))
        if not self.found:
            self.lost(comparison, self.plan.name, self.plan.load_path)
        for tensor, row in self.found:
            if row.status == "blocked":
                self.lost(comparison, self.plan.name, self.plan.load_path)
                raise LostWorkerError(f"{describe(tensor, row)}")

    def runtest(self) -> None:
        found = self.found
        if not found:
            pytest.skip("nothing else was checked" if self.place.is_rest else "the loaded model has no such tensor")
        if self.plan.info.simulated:
            self.user_properties.append(("simulated", "true"))
        for tensor, row in found:
            if own_place(tensor) == self.place:
                self._record(row)
        bad = [(tensor, row) for tensor, row in found if row.status in BAD]
        accepted = [self.session_of_case.accepted(self.case, tensor, row) for tensor, row in bad]
        if bad and all(accepted):
            pytest.xfail(one_line("; ".join(dict.fromkeys(filter(None, accepted)))))
        if bad:
            messages = [_message(tensor, row, simulated=self.plan.info.simulated) for tensor, row in bad[:20]]
            raise MismatchError("\n\n".join(messages), _reason(*bad[0]))
        reasons = {row.reason or "no reason given" for _, row in found if row.status == "skipped"}
        if reasons and all(row.status == "skipped" for _, row in found):
            pytest.skip(one_line("; ".join(sorted(reasons))))

    def _record(self, row: Outcome) -> None:
        self.user_properties += [("status", row.status), ("reference", row.reference or "none")]
        if row.ratio is not None:
            self.user_properties.append(("ratio", f"{float(row.ratio):.6g}"))
        if row.mismatched is not None:
            self.user_properties.append(("mismatched", row.mismatched))


class RunItem(CaseItem):
    """Findings about more than one tensor: results that do not repeat, equal devices that differ, other load paths."""

    def prepare(self) -> None:
        comparison = self.session_of_case.comparison(self.case)
        for worker in comparison.workers:
            self.lost(comparison, worker.name, worker.load_path)

    def runtest(self) -> None:
        comparison = self.session_of_case.comparison(self.case)
        if comparison.simulated:
            self.user_properties.append(("simulated", "true"))
        findings = [f for f in comparison.findings if f.severity == "error"]
        seen = self._items_with_a_mismatch()
        bad = [f for f in findings if f.kind in _RUN_KINDS or _is_alternative(f) or not _is_seen(f, seen)]
        if bad:
            raise MismatchError("\n\n".join(_sentence(f) for f in bad), bad[0].message)

    def _items_with_a_mismatch(self) -> Set[tuple[str, str]]:
        """Return the workers and tensors of the mismatches for which items were selected; those fail by themselves."""
        items = self.session_of_case.selected.get(self.case) or ()
        rows = self.session_of_case.rows(self.case)
        return {
            (row.workers[0], tensor.name)
            for place, plan in items
            for tensor, row in rows.rows(place, plan)
            if row.status in BAD
        }


class InputItem(CaseItem):
    """A case of a suite whose input cannot be used, which is an error of its set-up."""

    def prepare(self) -> None:
        if self.case.error is not None:
            raise self.case.error

    def runtest(self) -> None:
        """Nothing else is to be tested: the set-up raises."""


def make_items(parent: pytest.Session, session: Session) -> list[pytest.Item]:
    """Make the items of the session's cases, or those of them that the command line names.

    Raises
    ------
    UsageError
        The command line names one that does not exist.
    """
    root = Branch.from_parent(parent, name=_ROOT, nodeid=_ROOT)

    def made(wanted: Sequence[str]) -> list[pytest.Item]:
        return [item for case in session.cases for item in _items_of(root, case, session, wanted)]

    found = made(session.arguments)
    for one in session.arguments:
        if not any(_is_within(item.nodeid, one) for item in found):
            hint = did_you_mean(one, {part for item in made(()) for part in _prefixes(item.nodeid)})
            raise pytest.UsageError("; ".join(filter(None, [f"not found: {one}", hint])))
    return found


def _prefixes(nodeid: str) -> list[str]:
    parts = nodeid.split("::")
    return ["::".join(parts[:count]) for count in range(2, len(parts) + 1)]


def _items_of(root: Branch, case: SessionCase, session: Session, wanted: Sequence[str]) -> Iterator[pytest.Item]:
    name = _part(case.name)
    home = Branch.from_parent(root, name=name, nodeid=f"{_ROOT}::{name}")
    if wanted and not any(_is_within(one, home.nodeid) or _is_within(home.nodeid, one) for one in wanted):
        return  # no item of the case is asked for: do not make thousands to find that out
    stages: dict[Stage, Branch] = {}

    def made(kind: type[CaseItem], branch: Branch, name: str, **of_kind: Any) -> Iterator[pytest.Item]:
        nodeid = f"{branch.nodeid}::{name}"
        if not wanted or any(_is_within(nodeid, one) for one in wanted):
            yield kind.from_parent(branch, name=name, nodeid=nodeid, case=case, session_of_case=session, **of_kind)

    if case.error is not None:
        yield from made(InputItem, home, "input")
        return
    for place in case.places:
        if place.stage not in stages:
            stage = place.stage  # names travel between xdist's processes, which know plain strings alone
            stages[place.stage] = Branch.from_parent(home, name=stage, nodeid=f"{home.nodeid}::{stage}")
        for plan in case.workers:
            where = plan.name if plan.load_path is LoadPath.ISOLATED else f"{plan.name}-{plan.load_path}"
            label = f"{_part(place.name)}[{where}]"
            yield from made(DeviceItem, stages[place.stage], label, place=place, plan=plan)
    yield from made(RunItem, Branch.from_parent(home, name="run", nodeid=f"{home.nodeid}::run"), "agreement")


def selection(items: Sequence[pytest.Item]) -> dict[SessionCase, list[tuple[Place, WorkerPlan]]]:
    """Return the cases of items, each with the places and workers of those about a device."""
    found: dict[SessionCase, list[tuple[Place, WorkerPlan]]] = {}
    for item in items:
        if isinstance(item, CaseItem):
            selected = found.setdefault(item.case, [])
            if isinstance(item, DeviceItem):
                selected.append((item.place, item.plan))
    return found


def of_architectures(
    items: Sequence[pytest.Item], patterns: Sequence[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items of devices whose architecture contains one of these texts, or of no one device; and the rest.

    Raises
    ------
    UsageError
        No device has such an architecture.
    """
    names = dict.fromkeys(item.plan.info.architecture for item in items if isinstance(item, DeviceItem))
    for pattern in patterns:
        if names and not any(pattern.lower() in name.lower() for name in names):
            raise pytest.UsageError(f"no device has such an architecture: {pattern}; there are {', '.join(names)}")
    chosen = {name for name in names if not patterns or any(p.lower() in name.lower() for p in patterns)}
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_other = isinstance(item, DeviceItem) and item.plan.info.architecture not in chosen
        (others if is_other else kept).append(item)
    return kept, others


def _is_within(nodeid: str, wanted: str) -> bool:
    return nodeid == wanted or nodeid.startswith((wanted.rstrip(":") + "::", wanted + "["))


def _part(name: str) -> str:
    """Return a name that is safe in a node id, where `::` separates parts and control characters break reports."""
    return one_line(name.replace("::", "_").replace("\n", " "))


def _message(tensor: TensorComparison, row: Outcome, *, simulated: bool) -> str:
    worker = f"{row.workers[0]} (simulated)" if simulated else row.workers[0]
    place, _, detail = describe(tensor, row).partition(" · ")
    word = _diagnosis(row)
    lines = [f"{tensor.stage}: {place} is {row.status} on {worker}" + (f" ({word})" if word else ""), detail]
    if row.reference is not None:
        lines.append(f"compared with {row.reference}; rule: {tensor.rule}")
    if tensor.classes:
        lines.append(f"bitwise equal: {class_text(tensor.classes)}")
    return "\n".join(map(one_line, filter(None, lines)))


def _diagnosis(row: Outcome) -> str | None:
    """Return what the diagnosis adds to the status."""
    return None if row.word in (words.DIFFERS, row.status) else row.word


def _reason(tensor: TensorComparison, row: Outcome) -> str:
    """Return why a row is bad without what the node id has: `bit-flip: [0, 5] · got 0.25 (0x3e800000), wanted …`."""
    detail = describe(tensor, row).removeprefix(f"{tensor.layer}.{tensor.tensor}").removeprefix(" · ")
    share = "" if row.ratio is None else f", {float(row.ratio):.3g}× tolerance"
    return f"{_diagnosis(row) or row.status}{share}: {detail}"


def _is_alternative(finding: Finding) -> bool:
    """Return whether a finding is about alternative load paths only, which have no items."""
    return bool(finding.load_paths) and all(is_alternative(load_path) for load_path in finding.load_paths)


def _is_seen(finding: Finding, seen: Set[tuple[str, str]]) -> bool:
    return any((worker, tensor) in seen for worker in finding.workers for tensor in finding.tensors)


def _sentence(finding: Finding) -> str:
    return "\n".join(map(one_line, [finding.message, *finding.evidence, *finding.tensors[:10]]))
