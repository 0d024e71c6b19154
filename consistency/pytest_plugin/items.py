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
from consistency.pytest_plugin.item_names import Place, place_of_tensor
from consistency.pytest_plugin.session import LostWorkerError, Session, SessionCase
from consistency.report.summary import class_text
from consistency.text import clean, one_line

_ROOT = "consistency"
# Kinds of findings that no item of a device shows, even where such an item fails.
_RUN_KINDS = frozenset(
    {
        kinds.DRIFT,
        kinds.NOT_REPEATABLE,
        kinds.SAME_DEVICE_TYPE,
        kinds.INPUTS,
        kinds.DAMAGED_CAPTURE,
    }
)


_MOST_MISMATCHES = 20  # of one item, with a text each
_MOST_TENSORS = 10  # names below a finding


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

    def __init__(self, *, case: SessionCase, session_of_case: Session, **node_fields: Any) -> None:
        super().__init__(**node_fields)
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
            # A FAILED line has the message of the place of the crash, and little room beside a long node id.
            crash = ReprFileLocation(str(self.path), 0, one_line(excinfo.value.reason))
            return ReprExceptionInfo(reprtraceback=ReprTracebackNative([text + "\n"]), reprcrash=crash)
        return super().repr_failure(excinfo, style)

    def raise_if_lost(self, comparison: Comparison, name: str, load_path: str) -> None:
        """Raise `LostWorkerError` if this worker was lost or failed; its stack is shown by the first item alone."""
        for worker in comparison.workers:
            if (worker.name, worker.load_path) == (name, load_path) and worker.status != "ok":
                verb = "was lost" if worker.status == "lost" else "failed"
                shown_stacks = self.session_of_case.shown_stacks
                stack = None if worker.stack in shown_stacks else worker.stack
                shown_stacks.add(stack)
                raise LostWorkerError(f"{name} {verb}: {worker.reason}", stack)


class DeviceItem(CaseItem):
    """One tensor, or everything else of a stage, on one device.

    A mismatch fails the test; a worker that was lost before it checked the tensor is an error of the set-up.
    """

    def __init__(self, *, place: Place, plan: WorkerPlan, **node_fields: Any) -> None:
        super().__init__(**node_fields)
        self.place, self.plan = place, plan
        self.extra_keyword_matches.add(plan.info.architecture)  # for -k sm_90
        self.rows: list[tuple[TensorComparison, Outcome]] = []

    def prepare(self) -> None:
        comparison = self.session_of_case.comparison(self.case)
        self.rows = list(self.session_of_case.rows(self.case).rows(self.place, self.plan))
        if not self.rows:
            self.raise_if_lost(comparison, self.plan.name, self.plan.load_path)
        for tensor, row in self.rows:
            if row.status == "blocked":
                self.raise_if_lost(comparison, self.plan.name, self.plan.load_path)
                raise LostWorkerError(f"{describe(tensor, row)}")

    def runtest(self) -> None:
        if not self.rows:
            is_rest = self.place.is_everything_else
            pytest.skip("nothing else was checked" if is_rest else "the loaded model has no such tensor")
        if self.plan.info.simulated:
            self.user_properties.append(("simulated", "true"))
        for tensor, row in self.rows:
            if place_of_tensor(tensor) == self.place:
                self._record(row)
        mismatches = [(tensor, row) for tensor, row in self.rows if row.status in BAD]
        if mismatches:
            self._report(mismatches)
        if all(row.status == "skipped" for _, row in self.rows):
            reasons = {row.reason or "no reason given" for _, row in self.rows}
            pytest.skip(one_line("; ".join(sorted(reasons))))

    def _report(self, mismatches: Sequence[tuple[TensorComparison, Outcome]]) -> None:
        """Fail with the mismatches, or, where the baseline accepts all of them, as expected."""
        accepted = [self.session_of_case.accepted(self.case, tensor, row) for tensor, row in mismatches]
        if all(accepted):
            messages = dict.fromkeys(message for message in accepted if message)
            pytest.xfail(one_line("; ".join(messages)))
        simulated = self.plan.info.simulated
        texts = [_message(tensor, row, simulated=simulated) for tensor, row in mismatches[:_MOST_MISMATCHES]]
        raise MismatchError("\n\n".join(texts), _reason(*mismatches[0]))

    def _record(self, row: Outcome) -> None:
        """Add the figures of a row to the properties of the test, which JUnit files show."""
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
            self.raise_if_lost(comparison, worker.name, worker.load_path)

    def runtest(self) -> None:
        comparison = self.session_of_case.comparison(self.case)
        if comparison.simulated:
            self.user_properties.append(("simulated", "true"))
        shown_mismatches = self._mismatches_of_items()
        findings = []
        for finding in comparison.findings:
            if finding.severity != "error":
                continue
            has_no_item = finding.kind in _RUN_KINDS or _is_alternative(finding)
            if has_no_item or not _is_shown(finding, shown_mismatches):
                findings.append(finding)
        if findings:
            raise MismatchError("\n\n".join(map(_finding_text, findings)), findings[0].message)

    def _mismatches_of_items(self) -> Set[tuple[str, str]]:
        """Return the workers and tensors of the mismatches for which items were selected; those fail by themselves."""
        finder = self.session_of_case.rows(self.case)
        mismatches = set()
        for place, plan in self.session_of_case.selected.get(self.case) or ():
            for tensor, row in finder.rows(place, plan):
                if row.status in BAD:
                    mismatches.add((row.workers[0], tensor.name))
        return mismatches


class InputItem(CaseItem):
    """A case of a suite whose input cannot be used, which is an error of its set-up."""

    def prepare(self) -> None:
        if self.case.error is not None:
            raise self.case.error

    def runtest(self) -> None:
        """Do nothing: the set-up has raised."""


def make_items(parent: pytest.Session, session: Session) -> list[pytest.Item]:
    """Make the items of the session's cases, or those of them that the command line names.

    Raises
    ------
    UsageError
        The command line names one that does not exist.
    """
    root = Branch.from_parent(parent, name=_ROOT, nodeid=_ROOT)
    items = _items_of_session(root, session, session.arguments)
    for argument in session.arguments:
        if not any(_is_within(item.nodeid, argument) for item in items):
            existing = set()
            for item in _items_of_session(root, session, ()):
                existing.update(_prefixes(item.nodeid))
            hint = did_you_mean(argument, existing)
            message = f"not found: {argument}"
            raise pytest.UsageError(f"{message}; {hint}" if hint else message)
    return items


def _items_of_session(root: Branch, session: Session, arguments: Sequence[str]) -> list[pytest.Item]:
    """Return the items of all cases that arguments name, or all items where there are no arguments."""
    return [item for case in session.cases for item in _items_of_case(root, case, session, arguments)]


def _prefixes(nodeid: str) -> list[str]:
    """Return what an argument may name above an item, and the item: the case, the stage, but not the root alone."""
    parts = nodeid.split("::")
    return ["::".join(parts[:count]) for count in range(2, len(parts) + 1)]


def _items_of_case(
    root: Branch, case: SessionCase, session: Session, arguments: Sequence[str]
) -> Iterator[pytest.Item]:
    """Yield the items of a case that arguments name, or all of them where there are no arguments."""
    name = _node_name(case.name)
    case_branch = Branch.from_parent(root, name=name, nodeid=f"{_ROOT}::{name}")
    # an argument may name an item of the case, the case itself, or the root
    is_named = any(
        _is_within(argument, case_branch.nodeid) or _is_within(case_branch.nodeid, argument) for argument in arguments
    )
    if arguments and not is_named:
        return  # do not make thousands of items to find out that none is asked for

    def make(kind: type[CaseItem], branch: Branch, name: str, **fields: Any) -> Iterator[pytest.Item]:
        nodeid = f"{branch.nodeid}::{name}"
        if not arguments or any(_is_within(nodeid, argument) for argument in arguments):
            yield kind.from_parent(branch, name=name, nodeid=nodeid, case=case, session_of_case=session, **fields)

    if case.error is not None:
        yield from make(InputItem, case_branch, "input")
        return
    branches: dict[Stage, Branch] = {}
    for place in case.places:
        if place.stage not in branches:
            stage = place.stage  # names travel between xdist's processes, which know plain strings alone
            branches[place.stage] = Branch.from_parent(case_branch, name=stage, nodeid=f"{case_branch.nodeid}::{stage}")
        for plan in case.workers:
            is_usual = plan.load_path is LoadPath.ISOLATED
            worker = plan.name if is_usual else f"{plan.name}-{plan.load_path}"
            label = f"{_node_name(place.name)}[{worker}]"
            yield from make(DeviceItem, branches[place.stage], label, place=place, plan=plan)
    run_branch = Branch.from_parent(case_branch, name="run", nodeid=f"{case_branch.nodeid}::run")
    yield from make(RunItem, run_branch, "agreement")


def selection(items: Sequence[pytest.Item]) -> dict[SessionCase, list[tuple[Place, WorkerPlan]]]:
    """Return the cases that items need, each with the place and worker of every item of a device."""
    selected_cases: dict[SessionCase, list[tuple[Place, WorkerPlan]]] = {}
    for item in items:
        if isinstance(item, CaseItem):
            selected = selected_cases.setdefault(item.case, [])
            if isinstance(item, DeviceItem):
                selected.append((item.place, item.plan))
    return selected_cases


def select_architectures(
    items: Sequence[pytest.Item], patterns: Sequence[str]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the selected items, and the others.

    Selected are items of devices whose architecture contains one of the patterns, all of them without patterns, and
    items that are of no one device.

    Raises
    ------
    UsageError
        No device has such an architecture.
    """
    names = dict.fromkeys(item.plan.info.architecture for item in items if isinstance(item, DeviceItem))
    for pattern in patterns:
        if names and not any(pattern.lower() in name.lower() for name in names):
            raise pytest.UsageError(f"no device has such an architecture: {pattern}; there are {', '.join(names)}")
    selected_names = set(names)
    if patterns:
        selected_names = {name for name in names if any(pattern.lower() in name.lower() for pattern in patterns)}
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        if isinstance(item, DeviceItem) and item.plan.info.architecture not in selected_names:
            deselected.append(item)
        else:
            selected.append(item)
    return selected, deselected


def _is_within(nodeid: str, argument: str) -> bool:
    """Return whether a node is the one that an argument names, or below it."""
    return nodeid == argument or nodeid.startswith((argument.rstrip(":") + "::", argument + "["))


def _node_name(name: str) -> str:
    """Return a name that is safe in a node id, where `::` separates parts and control characters break reports."""
    return one_line(name.replace("::", "_").replace("\n", " "))


def _message(tensor: TensorComparison, row: Outcome, *, simulated: bool) -> str:
    """Return the lines of a mismatch: where it is, what it looks like, and what it was compared with."""
    worker = f"{row.workers[0]} (simulated)" if simulated else row.workers[0]
    name, _, detail = describe(tensor, row).partition(" · ")
    headline = f"{tensor.stage}: {name} is {row.status} on {worker}"
    if word := _diagnosis(row):
        headline += f" ({word})"
    lines = [headline, detail]
    if row.reference is not None:
        lines.append(f"compared with {row.reference}; rule: {tensor.rule}")
    if tensor.classes:
        lines.append(f"bitwise equal: {class_text(tensor.classes)}")
    return "\n".join(one_line(line) for line in lines if line)


def _diagnosis(row: Outcome) -> str | None:
    """Return the word of a row, if it is more than the status."""
    return None if row.word in (words.DIFFERS, row.status) else row.word


def _reason(tensor: TensorComparison, row: Outcome) -> str:
    """Return why a row is bad without what the node id has: `bit-flip: [0, 5] · got 0.25 (0x3e800000), wanted …`."""
    detail = describe(tensor, row).removeprefix(f"{tensor.layer}.{tensor.tensor}").removeprefix(" · ")
    ratio = "" if row.ratio is None else f", {float(row.ratio):.3g}× tolerance"
    return f"{_diagnosis(row) or row.status}{ratio}: {detail}"


def _is_alternative(finding: Finding) -> bool:
    """Return whether a finding is about alternative load paths only, which have no items."""
    return bool(finding.load_paths) and all(is_alternative(load_path) for load_path in finding.load_paths)


def _is_shown(finding: Finding, shown_mismatches: Set[tuple[str, str]]) -> bool:
    """Return whether an item fails with a mismatch of this finding."""
    return any((worker, tensor) in shown_mismatches for worker in finding.workers for tensor in finding.tensors)


def _finding_text(finding: Finding) -> str:
    return "\n".join(map(one_line, [finding.message, *finding.evidence, *finding.tensors[:_MOST_TENSORS]]))
