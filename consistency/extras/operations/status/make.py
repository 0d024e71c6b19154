"""Make the status of a comparison, or of a suite: when it is written, or from a report that has none."""

from __future__ import annotations

import datetime
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture import origin
from consistency.capture.bounded import read_regular
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.version import __version__
from consistency.capture.wording import time_of
from consistency.comparison import kinds
from consistency.comparison.by_worker import verdicts, worse, worst_ratios
from consistency.comparison.kinds import WORST_FIRST, is_unseen
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Comparison, Finding, Verdict, WorkerSummary
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.extras.operations.status.record import SCHEMA, DeviceClass, DeviceStatus, Status
from consistency.numerics.real import Real
from consistency.report.formats import View
from consistency.report.json import read as read_report
from consistency.report.runs import SUITE
from consistency.report.sentences import sentence

_SEVERITIES = ("error", "warning", "note")

MOST_DEVICES = 64
"""As many are written one by one, whatever their verdict: as many as a report has in full."""


class _Head(msgspec.Struct):
    """What a report states beside its result."""

    tool: str = ""


def render(found: Comparison | SuiteResult, _: View) -> Iterator[bytes]:
    """Yield `status.json`, or `suite-status.json`."""
    yield encode_json(of_suite(found) if isinstance(found, SuiteResult) else of_comparison(found), indent=1) + b"\n"


def of_comparison(found: Comparison, *, created: datetime.datetime | None = None, tool: str = __version__) -> Status:
    """Return the status of a run; `created` is for one that does not state its own time."""
    ratios = worst_ratios(found)
    return Status(
        schema=SCHEMA,
        tool=tool,
        created=_created(found) or created or _now(),
        host=found.host or _host(found.workers),
        case=found.case,
        verdict=found.verdict,
        exit_status=found.exit_status,
        sentence=sentence(found),
        reason=_reason(found.findings),
        marks=tuple(_marks(found.simulated, found.findings)),
        profile=found.profile,
        settings=found.settings,
        elapsed_s=found.elapsed_s,
        ratio=_worst(ratios.values()),
        findings=_count(found.findings),
        accepted=sum(f.accepted is not None for f in found.findings),
        workers=dict(Counter(worker.status for worker in found.workers)),
        **_devices(found.workers, verdicts(found.workers, found.findings), ratios),
        command=found.command,
    )


def of_suite(suite: SuiteResult, *, created: datetime.datetime | None = None, tool: str = __version__) -> Status:
    """Return the status of a suite; a device's is that of its worst case, and `created` as of a run."""
    findings = common_findings(suite.cases)
    workers = [worker for case in suite.cases for worker in case.workers]
    ratios: dict[str, float] = {}
    found: dict[str, Verdict] = {}
    for case in suite.cases:
        for name, ratio in case.ratios.items():
            ratios[name] = worse(float(ratio), ratios.get(name))
        for name, verdict in verdicts(case.workers, case.findings).items():
            found[name] = min(verdict, found.get(name, verdict), key=WORST_FIRST.index)
    first = suite.cases[0] if suite.cases else None
    return Status(
        schema=SCHEMA,
        tool=tool,
        created=time_of(suite.created) or created or _now(),
        host=_host(workers),
        case=suite.name,
        verdict=suite.verdict,
        exit_status=suite.exit_status,
        sentence=suite.sentence,
        reason=_reason(findings),
        marks=tuple(_marks(suite.simulated, findings)),
        profile=first.profile if first else "",
        settings=first.settings if first else (),
        elapsed_s=suite.elapsed_s,
        ratio=_worst(ratios.values()),
        findings=_count(findings),
        accepted=sum(c.accepted for c in suite.cases),
        workers=dict(Counter(worker.status for worker in workers)),
        **_devices(workers, found, ratios),
        cases={case.name: case.verdict for case in suite.cases},
    )


def of_file(path: Path, root: Path | None = None) -> Status:
    """Return the status of `report.json`, or of `suite.json`; raise what decoding it raises."""
    raw = read_regular(path, root)
    created, tool = _written(path), decode_json(raw, _Head).tool
    if path.name == SUITE:
        return of_suite(decode_json(raw, SuiteResult), created=created, tool=tool)
    return of_comparison(read_report(raw), created=created, tool=tool)


def _devices(
    workers: Iterable[WorkerSummary], found: Mapping[str, Verdict], ratios: Mapping[str, float]
) -> dict[str, Any]:
    """Return the fields of a status about devices: all of few; of many, those that are not consistent."""
    devices: dict[tuple[str, str], DeviceStatus] = {}
    for worker in workers:
        ratio = ratios.get(worker.name)
        device = DeviceStatus(
            name=worker.name,
            host=worker.host,
            architecture=worker.architecture,
            model=worker.model,
            uuid=worker.uuid,
            verdict=found[worker.name],
            ratio=None if ratio is None else Real(ratio),
            simulated=worker.simulated,
        )
        devices.setdefault((worker.host, worker.name), device)
    everything = tuple(devices.values())
    shown = everything
    if len(everything) > MOST_DEVICES:
        shown = tuple(device for device in everything if device.verdict != "consistent")
    return {
        "devices": shown,
        "devices_left_out": len(everything) - len(shown),
        "device_classes": tuple(_classes(everything)),
    }


def _classes(devices: Iterable[DeviceStatus]) -> Iterator[DeviceClass]:
    of_kinds = gathered(((one.architecture, one.model, one.verdict), one) for one in devices)
    for (architecture, model, verdict), same in of_kinds.items():
        yield DeviceClass(
            architecture=architecture,
            model=model,
            verdict=verdict,
            count=len(same),
            simulated=any(one.simulated for one in same),
            ratio=_worst(one.ratio for one in same if one.ratio is not None),
        )


def _marks(simulated: bool, findings: Iterable[Finding]) -> Iterator[str]:
    if any(finding.kind == kinds.PLANTED for finding in findings):
        yield "planted fault"
    if simulated:
        yield "simulated"


def _reason(findings: Sequence[Finding]) -> str:
    """Return the first error, or the first warning: what is lost, then the order of findings, but for software."""
    found = (f for f in findings if f.severity != "note")
    worst = sorted(found, key=lambda f: (_SEVERITIES.index(f.severity), not is_unseen(f.kind)))
    return worst[0].message if worst else ""


def _count(findings: Iterable[Finding]) -> dict[str, int]:
    found = Counter(finding.severity for finding in findings)
    return {severity: found[severity] for severity in _SEVERITIES}  # type: ignore[index]  # all that there are


def _worst(ratios: Iterable[float]) -> Real | None:
    known: float | None = functools.reduce(lambda one, ratio: worse(ratio, one), ratios, None)
    return None if known is None else Real(known)


def _created(found: Comparison) -> datetime.datetime | None:
    """Return when a result was made: of captures that were made apart, when the oldest of them was."""
    times = [source.created for source in found.sources] if found.captures else []
    times = times or ([found.created] if found.created is not None else [])
    return min(filter(None, map(time_of, times)), default=None)


def _now() -> datetime.datetime:
    return datetime.datetime.fromisoformat(origin.now())


def _written(path: Path) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)


def _host(workers: Iterable[WorkerSummary]) -> str:
    return next((worker.host for worker in workers if worker.host), origin.host())
