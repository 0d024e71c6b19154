"""A fleet from its plan to its verdict: start a capture on every node, follow them, and compare what was delivered."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
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
from consistency.extras.operations.fleet.schedulers.engine import EngineError, FleetEngine, NodeTask, fleet_engine
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from consistency.text import one_line
from consistency.workflows import judging, report_folder
from consistency.workflows.past import NO_PAST, Past

_PAUSE_S, _REMOTE_PAUSE_S = 0.5, 5.0
_PAUSE_PER_NODE_S = 0.001  # about what a status on a shared file system takes to be read

_SEEN_S, _LOOK_AGAIN_S = 60.0, 2.0
"""How long a client of NFS may take what it knows of a folder for true: its `acdirmax`, unless it is set."""


class LostFleetError(ConsistencyError):
    """No node has delivered a capture that can be compared."""

    exit_status = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A fleet that can be started."""

    engine: FleetEngine
    options: FleetOptions
    nodes: tuple[str, ...]
    command: tuple[str, ...]  # what starts this tool on a node
    words: tuple[str, ...]  # the options of the case, as words of a command line
    requirements: Requirements
    name: str = ""  # of the case

    def record(self) -> FleetRecord:
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
        A file of the case is missing or unsuitable, or the engine does not know a node.
    """
    if options.together and is_remote(options.store or ""):
        raise UsageError("the nodes of one group meet in a folder", where=f"--store {options.store}", got="a URL")
    engine = fleet_engine(options)
    nodes = engine.nodes(options.nodes)
    prepared = prepare_case(case)
    requirements = requirements_of(prepared, accelerators=options.gpus or 0)
    return FleetPlan(
        engine=engine,
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
    folder = FleetFolder(out=out, store=(plan.options.store or str(out.resolve() / report_folder.CAPTURES)).rstrip("/"))
    resume = plan.options.resume
    with (
        report_folder.output(out, replace=replace or resume, keeps=lambda path: (path / PLAN).exists()),
        past.noted(plan.name, out),
    ):
        record = plan.record()
        kept = folder.delivered(record, plan.nodes) if resume else []
        for node in kept:
            watch(node, Progress(state=NodeState.DELIVERED, text="by the earlier run"))
        missing = [node for node in plan.nodes if node not in kept]
        folder.prepare(plan.requirements, missing, replace=replace or resume)
        found = _captured(plan, folder, record, missing, watch=watch)
        gathered = _gather(plan, folder, found)
        try:
            comparison = _compare(gathered, folder, out, groups, past)
        except LostFleetError:
            folder.save(msgspec.structs.replace(record, nodes=_outcomes(gathered)))
            raise
        comparison = with_provenance(comparison, time.monotonic() - started)
        comparison = report_folder.write_reports(comparison, out)
        folder.save(msgspec.structs.replace(record, nodes=_outcomes(gathered, comparison)))
    return comparison


def _captured(
    plan: FleetPlan, folder: FleetFolder, record: FleetRecord, nodes: Sequence[str], *, watch: NodeWatcher
) -> dict[str, Progress]:
    """Start a capture on each node and follow it to its end; whatever happens, nothing is left running."""
    options = plan.options
    limits = NodeLimits(timeout_s=options.node_timeout, stall_s=options.node_stall)
    pause_s = (_REMOTE_PAUSE_S if folder.is_remote else _PAUSE_S) + _PAUSE_PER_NODE_S * len(nodes)
    found: dict[str, Progress] = {}
    if options.together:
        _join(folder, nodes)
        watch = _telling(folder, watch)
    try:
        for node in nodes:
            plan.engine.submit(_task(plan, folder, node))
            watch(node, Progress(state=NodeState.WAITING))
        folder.save(record)  # from here on there is something to resume
        found = follow(plan.engine, nodes, folder.read_status, limits, watch=watch, pause_s=pause_s)
    except EngineError as error:
        raise CaptureError("the engine does not answer", where=f"--engine {options.engine}", got=error) from None
    finally:
        over = {node for node, progress in found.items() if progress.state.is_final}
        plan.engine.cancel([node for node in nodes if node not in over])
        if options.together:
            shutil.rmtree(folder.together, ignore_errors=True)
    return found


def _join(folder: FleetFolder, nodes: Sequence[str]) -> None:
    """Tell each node with which others its devices form a group."""
    shutil.rmtree(folder.together, ignore_errors=True)
    for node in nodes:
        group = NodeGroup(node=node, nodes=tuple(nodes), folder=str(folder.together.resolve()))
        group.write(folder.group(node))


def _telling(folder: FleetFolder, watch: NodeWatcher) -> NodeWatcher:
    """Tell the nodes of a group which of them is lost, for whom the others wait."""

    def watching(node: str, progress: Progress) -> None:
        if progress.state is NodeState.LOST:
            write_whole(lost_node(folder.together, node), [progress.text.encode()])
        watch(node, progress)

    return watching


def _task(plan: FleetPlan, folder: FleetFolder, node: str) -> NodeTask:
    words = [
        *plan.command,
        "capture",
        *plan.words,
        "--force",
        f"--out={folder.capture(node)}",
        f"--progress={folder.status(node)}",
        f"--require={folder.requirements}",
        *([f"--together={folder.group(node).resolve()}"] if plan.options.together else ()),
    ]
    return NodeTask(node=node, command=words, log=folder.log(node))


@dataclass(slots=True, kw_only=True)
class _Gathered:
    """The nodes with a capture to compare, and why the others have none."""

    places: dict[str, str]
    lost: dict[str, str] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)


def _gather(plan: FleetPlan, folder: FleetFolder, found: Mapping[str, Progress]) -> _Gathered:
    lost = dict(lost_nodes(found))
    statuses: dict[str, NodeStatus] = {}
    for node in plan.nodes:
        status = folder.read_status(node)
        if status is not None and status.phase == "delivered":
            lost.pop(node, None)  # it may have been given up, and has come after all
            statuses[node] = status
            continue
        reason = lost.get(node, "its capture was not delivered")
        spoke = status is not None and status.phase == "failed"  # it has said why itself
        said = "" if spoke else folder.logged(node)
        lost[node] = f"{reason}; its output ends: {said}" if said else reason
    bare = without_accelerator(statuses)
    odd = other_software({node: status for node, status in statuses.items() if node not in bare})
    places = {node: folder.capture(node) for node in statuses if node not in bare and node not in odd}
    return _Gathered(places=places, lost={**lost, **bare}, odd=odd)


def _compare(gathered: _Gathered, folder: FleetFolder, out: Path, groups: SiteGroups, past: Past) -> Comparison:
    with scratch_folder("fleet") as scratch:
        captures = _read(gathered, scratch)
        if not captures:
            raise _nothing(gathered, folder)
        comparison = judging.compare_captures(captures, groups=groups)
        comparison = msgspec.structs.replace(comparison, captures=tuple(gathered.places.values()))
        findings = _findings(gathered)
        if findings:
            comparison = msgspec.structs.replace(comparison, verdict="incomplete")
            comparison = with_findings(comparison, [*findings, *comparison.findings])
        return past.judged(captures, comparison, out)


def _read(gathered: _Gathered, scratch: Path) -> list[Capture]:
    """Return the captures that can be read; one that cannot does not keep the others from being compared.

    A file may be seen later than the status that says that it was delivered, or not in full at first.
    """
    pool = RecordPool()
    found: dict[str, Capture] = {}
    unread = dict.fromkeys(gathered.places, "")
    until = None
    while True:
        for node in list(unread):
            try:
                found[node] = read_sent(gathered.places[node], scratch, pool)
                del unread[node]
            except CaptureError as error:
                unread[node] = f"its capture cannot be read: {one_line(brief(error))}"
        until = until or time.monotonic() + _SEEN_S
        if not unread or time.monotonic() > until:
            break
        time.sleep(_LOOK_AGAIN_S)
    for node, reason in unread.items():
        gathered.lost[node] = reason
        del gathered.places[node]
    return [found[node] for node in gathered.places]


def _findings(gathered: _Gathered) -> list[Finding]:
    found = []
    for kind, verb, reasons in (
        (kinds.ENVIRONMENT, "left out for other software", gathered.odd),
        (kinds.LOST_NODE, "not compared", gathered.lost),
    ):
        same: dict[str, list[str]] = {}
        for node, reason in reasons.items():
            same.setdefault(reason, []).append(node)
        found += [
            Finding(
                kind=kind,
                severity="error",
                message=f"{some(nodes)} · {verb}: {one_line(reason)}",
                detail=tuple(nodes),
            )
            for reason, nodes in same.items()
        ]
    return found


def _outcomes(gathered: _Gathered, comparison: Comparison | None = None) -> dict[str, NodeOutcome]:
    """Return what became of every node; a worker's name begins with that of its node."""
    named: dict[str, list[str]] = {node: [] for node in gathered.places}
    for finding in () if comparison is None else comparison.findings:
        if finding.severity == "error":
            nodes = {_node_of(worker, named) for worker in finding.workers} - {None}
            for node in nodes:
                named[str(node)].append(finding.message)
    found = {node: NodeOutcome(state="lost", reason=reason) for node, reason in gathered.lost.items()}
    for node, why in gathered.odd.items():
        found[node] = NodeOutcome(state="delivered", reason=f"other software: {why}")
    return found | {node: NodeOutcome(state="delivered", findings=tuple(texts)) for node, texts in named.items()}


def _node_of(worker: str, nodes: Mapping[str, object]) -> str | None:
    """Return the node of a worker: `n1` of `n1:cpu`; a fleet of one node has its devices alone."""
    if len(nodes) == 1:
        return next(iter(nodes))
    return next((node for node in nodes if worker.startswith(f"{node}:")), None)


def _nothing(gathered: _Gathered, folder: FleetFolder) -> LostFleetError:
    nodes = len(gathered.lost) + len(gathered.odd)
    texts = [finding.message for finding in _findings(gathered)]
    return LostFleetError(
        f"none of {counted(nodes, 'node')} delivered a capture", where=folder.store, got="\n          ".join(texts[:6])
    )
