"""A fleet from its plan to its verdict: start a capture on every node, follow them, and compare what was delivered."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.archives import read_sent
from consistency.capture.claim import scratch_folder
from consistency.capture.folder import Capture
from consistency.capture.node_group import NodeGroup, lost_node
from consistency.capture.node_status import NodeStatus
from consistency.capture.reader import RecordPool, brief
from consistency.capture.transport import is_remote
from consistency.capture.whole_file import write_whole
from consistency.capture.wording import counted, some
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.requirements import Requirements, requirements_of
from consistency.comparison import kinds
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Comparison, Finding, with_findings, with_provenance
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.devices.interpreter import python_command
from consistency.errors import CaptureError, ConsistencyError, UsageError
from consistency.extras.operations.fleet.folder import PLAN, FleetFolder, FleetRecord, NodeOutcome
from consistency.extras.operations.fleet.following import (
    NodeLimits,
    NodeState,
    NodeWatcher,
    Progress,
    follow,
    lost_nodes,
    other_software,
    without_accelerator,
)
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from consistency.extras.operations.fleet.schedulers.scheduler import (
    FleetScheduler,
    NodeTask,
    SchedulerError,
    connect_scheduler,
)
from consistency.text import one_line
from consistency.workflows import judging, report_folder
from consistency.workflows.past import NO_PAST, Past

_PAUSE_S, _REMOTE_PAUSE_S = 0.5, 5.0  # between two looks at all nodes; the store is a folder, or at a URL
_PAUSE_PER_NODE_S = 0.001  # about the time to read a status on a shared file system

_SEEN_S, _LOOK_AGAIN_S = 60.0, 2.0
"""Time for which a client of NFS may take what it knows of a folder for true: its `acdirmax`, unless it is set."""

_MOST_REASONS = 6  # reasons in an error


class LostFleetError(ConsistencyError):
    """No node has delivered a capture that can be compared."""

    exit_status = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A fleet that can be started."""

    scheduler: FleetScheduler
    options: FleetOptions
    nodes: tuple[str, ...]
    command: tuple[str, ...]  # words of a command line that start this tool on a node
    words: tuple[str, ...]  # the options of the case, as words of a command line
    requirements: Requirements
    name: str = ""  # name of the case

    def record(self) -> FleetRecord:
        """Return the record of the fleet before any node has started."""
        return FleetRecord(
            engine=self.options.engine,
            case=self.words,
            requirements=self.requirements,
            nodes=dict.fromkeys(self.nodes, NodeOutcome()),
        )


def prepare_fleet(
    case: Options, words: Sequence[str], options: FleetOptions, *, command: Sequence[str] = ()
) -> FleetPlan:
    """Check everything that can be checked before a node starts, and read the files that all of them must have.

    Raises
    ------
    ConsistencyError
        A file of the case is missing or unsuitable, or the scheduler does not know a node.
    """
    if options.together and is_remote(options.store or ""):
        raise UsageError("the nodes of one group meet in a folder", where=f"--store {options.store}", got="a URL")
    scheduler = connect_scheduler(options)
    nodes = scheduler.nodes(options.nodes)
    prepared = prepare_case(case)
    requirements = requirements_of(prepared, accelerators=options.gpus or 0)
    return FleetPlan(
        scheduler=scheduler,
        options=options,
        nodes=nodes,
        words=tuple(words),
        requirements=requirements,
        command=tuple(command) or (*python_command(), "consistency"),
        name=prepared.name,
    )


def run_fleet(
    plan: FleetPlan,
    out: Path,
    *,
    watch: NodeWatcher,
    replace: bool = False,
    groups: SiteGroups = NO_GROUPS,
    past: Past = NO_PAST,
) -> Comparison:
    """Have every node make its capture, and compare those that arrive.

    A node that delivers none is an error of the report, and its verdict is then `incomplete`. If the run is stopped,
    what was started is cancelled, and what was delivered is kept. The result is added to a history.

    Raises
    ------
    LostFleetError
        No node has delivered a capture that can be compared.
    """
    started = time.monotonic()
    store = plan.options.store or str(out.resolve() / report_folder.CAPTURES)
    folder = FleetFolder(out=out, store=store.rstrip("/"))
    resume = plan.options.resume
    with (
        report_folder.output(out, replace=replace or resume, keeps=lambda path: (path / PLAN).exists()),
        past.noted(plan.name, out),
    ):
        record = plan.record()
        delivered_before = folder.delivered(record, plan.nodes) if resume else []
        for node in delivered_before:
            watch(node, Progress(state=NodeState.DELIVERED, text="by the earlier run"))
        missing = [node for node in plan.nodes if node not in delivered_before]
        folder.prepare(plan.requirements, missing, replace=replace or resume)
        progress_by_node = _make_captures(plan, folder, record, missing, watch=watch)
        nodes = _sort_nodes(plan, folder, progress_by_node)
        try:
            comparison = _compare(nodes, folder, out, groups, past)
        except LostFleetError:
            folder.save(msgspec.structs.replace(record, nodes=_outcomes(nodes)))
            raise
        comparison = with_provenance(comparison, time.monotonic() - started)
        comparison = report_folder.write_reports(comparison, out)
        folder.save(msgspec.structs.replace(record, nodes=_outcomes(nodes, comparison)))
    return comparison


def _make_captures(
    plan: FleetPlan, folder: FleetFolder, record: FleetRecord, nodes: Sequence[str], *, watch: NodeWatcher
) -> dict[str, Progress]:
    """Start a capture on each node and follow it to its end; whatever happens, nothing is left running."""
    options = plan.options
    limits = NodeLimits(timeout_s=options.node_timeout, stall_s=options.node_stall)
    pause_s = _REMOTE_PAUSE_S if folder.is_remote else _PAUSE_S
    pause_s += _PAUSE_PER_NODE_S * len(nodes)
    progress_by_node: dict[str, Progress] = {}
    if options.together:
        _write_groups(folder, nodes)
        watch = _telling_the_group(folder, watch)
    try:
        for node in nodes:
            plan.scheduler.submit(_task(plan, folder, node))
            watch(node, Progress(state=NodeState.WAITING))
        folder.save(record)  # from here on there is something to resume
        progress_by_node = follow(plan.scheduler, nodes, folder.read_status, limits, watch=watch, pause_s=pause_s)
    except SchedulerError as error:
        raise CaptureError("the engine does not answer", where=f"--engine {options.engine}", got=error) from None
    finally:
        ended = {node for node, progress in progress_by_node.items() if progress.state.is_final}
        plan.scheduler.cancel([node for node in nodes if node not in ended])
        if options.together:
            shutil.rmtree(folder.together, ignore_errors=True)
    return progress_by_node


def _write_groups(folder: FleetFolder, nodes: Sequence[str]) -> None:
    """Tell each node with which others its devices form a group."""
    shutil.rmtree(folder.together, ignore_errors=True)
    for node in nodes:
        group = NodeGroup(node=node, nodes=tuple(nodes), folder=str(folder.together.resolve()))
        group.write(folder.group(node))


def _telling_the_group(folder: FleetFolder, watch: NodeWatcher) -> NodeWatcher:
    """Return a watcher that also tells the nodes of a group which of them is lost: the others wait for it."""

    def watch_and_tell(node: str, progress: Progress) -> None:
        if progress.state is NodeState.LOST:
            write_whole(lost_node(folder.together, node), [progress.text.encode()])
        watch(node, progress)

    return watch_and_tell


def _task(plan: FleetPlan, folder: FleetFolder, node: str) -> NodeTask:
    """Return the command that makes the capture of a node, reports its progress, and delivers it."""
    words = [
        *plan.command,
        "capture",
        *plan.words,
        "--force",
        f"--out={folder.capture(node)}",
        f"--progress={folder.status(node)}",
        f"--require={folder.requirements}",
    ]
    if plan.options.together:
        words.append(f"--together={folder.group(node).resolve()}")
    return NodeTask(node=node, command=words, log=folder.log(node))


@dataclass(slots=True, kw_only=True)
class _SortedNodes:
    """The nodes of a fleet that has ended: each is in one of these."""

    captures: dict[str, str]  # places of the captures to compare, by node
    lost: dict[str, str] = field(default_factory=dict)  # reasons why nodes have no capture to compare
    other_software: dict[str, str] = field(default_factory=dict)  # differences of nodes that are left out for them


def _sort_nodes(plan: FleetPlan, folder: FleetFolder, progress_by_node: Mapping[str, Progress]) -> _SortedNodes:
    """Sort the nodes by whether they have a capture to compare, once all have ended."""
    lost = dict(lost_nodes(progress_by_node))
    statuses: dict[str, NodeStatus] = {}
    for node in plan.nodes:
        status = folder.read_status(node)
        if status is not None and status.phase == "delivered":
            lost.pop(node, None)  # it may have been given up, and has come after all
            statuses[node] = status
            continue
        reason = lost.get(node, "its capture was not delivered")
        has_said_why = status is not None and status.phase == "failed"
        last_line = "" if has_said_why else folder.logged(node)
        lost[node] = f"{reason}; its output ends: {last_line}" if last_line else reason
    # each node has one reason: one without an accelerator is not named for its software too
    bare = without_accelerator(statuses)
    odd = other_software({node: status for node, status in statuses.items() if node not in bare})
    captures = {node: folder.capture(node) for node in statuses if node not in bare and node not in odd}
    return _SortedNodes(captures=captures, lost={**lost, **bare}, other_software=odd)


def _compare(nodes: _SortedNodes, folder: FleetFolder, out: Path, groups: SiteGroups, past: Past) -> Comparison:
    """Return the comparison of the captures that can be read, with a finding for each reason to leave nodes out."""
    with scratch_folder("fleet") as scratch:
        captures = _read_captures(nodes, scratch)
        if not captures:
            raise _lost_fleet(nodes, folder)
        comparison = judging.compare_captures(captures, groups=groups)
        comparison = msgspec.structs.replace(comparison, captures=tuple(nodes.captures.values()))
        findings = _findings(nodes)
        if findings:
            comparison = msgspec.structs.replace(comparison, verdict="incomplete")
            comparison = with_findings(comparison, [*findings, *comparison.findings])
        return past.judged(captures, comparison, out)


def _read_captures(nodes: _SortedNodes, scratch: Path) -> list[Capture]:
    """Return the captures that can be read, and move the nodes of the others to the lost ones.

    A file may be seen later than the status that says that it was delivered, or not in full at first.
    """
    pool = RecordPool()
    capture_by_node: dict[str, Capture] = {}
    unread = dict.fromkeys(nodes.captures, "")
    give_up_at = None
    while True:
        for node in list(unread):
            try:
                capture_by_node[node] = read_sent(nodes.captures[node], scratch, pool)
                del unread[node]
            except CaptureError as error:
                unread[node] = f"its capture cannot be read: {one_line(brief(error))}"
        # the time counts from the end of the first look at all of them
        give_up_at = give_up_at or time.monotonic() + _SEEN_S
        if not unread or time.monotonic() > give_up_at:
            break
        time.sleep(_LOOK_AGAIN_S)
    for node, reason in unread.items():
        nodes.lost[node] = reason
        del nodes.captures[node]
    return [capture_by_node[node] for node in nodes.captures]


def _findings(nodes: _SortedNodes) -> list[Finding]:
    """Return an error for each reason to leave nodes out, about all nodes with that reason."""
    return [
        *_finding_per_reason(kinds.ENVIRONMENT, "left out for other software", nodes.other_software),
        *_finding_per_reason(kinds.LOST_NODE, "not compared", nodes.lost),
    ]


def _finding_per_reason(kind: str, verb: str, reason_by_node: Mapping[str, str]) -> Iterator[Finding]:
    """Yield an error for each reason."""
    for reason, nodes in group_by_key((reason, node) for node, reason in reason_by_node.items()).items():
        message = f"{some(nodes)} · {verb}: {one_line(reason)}"
        yield Finding(kind=kind, severity="error", message=message, detail=tuple(nodes))


def _outcomes(nodes: _SortedNodes, comparison: Comparison | None = None) -> dict[str, NodeOutcome]:
    """Return how every node ended; a worker's name begins with that of its node."""
    messages: dict[str, list[str]] = {node: [] for node in nodes.captures}
    findings = () if comparison is None else comparison.findings
    for finding in findings:
        if finding.severity != "error":
            continue
        for node in {_node_of(worker, messages) for worker in finding.workers}:
            if node is not None:
                messages[node].append(finding.message)
    outcomes = {node: NodeOutcome(state="lost", reason=reason) for node, reason in nodes.lost.items()}
    for node, difference in nodes.other_software.items():
        outcomes[node] = NodeOutcome(state="delivered", reason=f"other software: {difference}")
    for node, texts in messages.items():
        outcomes[node] = NodeOutcome(state="delivered", findings=tuple(texts))
    return outcomes


def _node_of(worker: str, nodes: Mapping[str, object]) -> str | None:
    """Return the node of a worker: `n1` of `n1:cpu`; a fleet of one node has its devices alone."""
    if len(nodes) == 1:
        return next(iter(nodes))
    return next((node for node in nodes if worker.startswith(f"{node}:")), None)


def _lost_fleet(nodes: _SortedNodes, folder: FleetFolder) -> LostFleetError:
    """Return the error that there is nothing to compare, with the first reasons."""
    count = len(nodes.lost) + len(nodes.other_software)
    reasons = [finding.message for finding in _findings(nodes)]
    return LostFleetError(
        f"none of {counted(count, 'node')} delivered a capture",
        where=folder.store,
        got="\n          ".join(reasons[:_MOST_REASONS]),
    )
