"""Make the status of a comparison, or of a suite: when it is written, or from a report that has none."""

from __future__ import annotations

import datetime
import itertools
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
from consistency.comparison.outcomes import group_by_key
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
"""Devices that are written one by one, whatever their verdict: as many as a report has in full."""
"""As many are written one by one, whatever their verdict: as many as a report has in full."""


class _Head(msgspec.Struct):
    """The facts of a report beside its result."""

    tool: str = ""


def render(result: Comparison | SuiteResult, _: View) -> Iterator[bytes]:
    """Yield `status.json`, or `suite-status.json`."""
    status = of_suite(result) if isinstance(result, SuiteResult) else of_comparison(result)
    yield encode_json(status, indent=1) + b"\n"


def of_comparison(
    comparison: Comparison, *, created: datetime.datetime | None = None, tool: str = __version__
) -> Status:
    """Return the status of a run; `created` is for one that does not state its own time."""
    ratios = worst_ratios(comparison)
    return Status(
        schema=SCHEMA,
        tool=tool,
        created=_created(comparison) or created or _now(),
        host=comparison.host or _host(comparison.workers),
        case=comparison.case,
        verdict=comparison.verdict,
        exit_status=comparison.exit_status,
        sentence=sentence(comparison),
        reason=_reason(comparison.findings),
        marks=tuple(_marks(comparison.simulated, comparison.findings)),
        profile=comparison.profile,
        settings=comparison.settings,
        elapsed_s=comparison.elapsed_s,
        ratio=_worst(ratios.values()),
        findings=_count_by_severity(comparison.findings),
        accepted=sum(finding.accepted is not None for finding in comparison.findings),
        workers=dict(Counter(worker.status for worker in comparison.workers)),
        **_device_fields(comparison.workers, verdicts(comparison.workers, comparison.findings), ratios),
        command=comparison.command,
    )


def of_suite(suite: SuiteResult, *, created: datetime.datetime | None = None, tool: str = __version__) -> Status:
    """Return the status of a suite; a device's is that of its worst case, and `created` as of a run."""
    findings = common_findings(suite.cases)
    workers = list(itertools.chain.from_iterable(case.workers for case in suite.cases))
    worst_ratio: dict[str, float] = {}  # of each device, over all cases
    worst_verdict: dict[str, Verdict] = {}
    for case in suite.cases:
        for name, ratio in case.ratios.items():
            worst_ratio[name] = worse(float(ratio), worst_ratio.get(name))
        for name, verdict in verdicts(case.workers, case.findings).items():
            worst_verdict[name] = min(verdict, worst_verdict.get(name, verdict), key=WORST_FIRST.index)
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
        ratio=_worst(worst_ratio.values()),
        findings=_count_by_severity(findings),
        accepted=sum(case.accepted for case in suite.cases),
        workers=dict(Counter(worker.status for worker in workers)),
        **_device_fields(workers, worst_verdict, worst_ratio),
        cases={case.name: case.verdict for case in suite.cases},
    )


def of_file(path: Path, root: Path | None = None) -> Status:
    """Return the status of `report.json`, or of `suite.json`; raise what decoding it raises."""
    raw = read_regular(path, root)
    created, tool = _written(path), decode_json(raw, _Head).tool
    if path.name == SUITE:
        return of_suite(decode_json(raw, SuiteResult), created=created, tool=tool)
    return of_comparison(read_report(raw), created=created, tool=tool)


def _device_fields(
    workers: Iterable[WorkerSummary], verdict_by_worker: Mapping[str, Verdict], ratios: Mapping[str, float]
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
            verdict=verdict_by_worker[worker.name],
            ratio=None if ratio is None else Real(ratio),
            simulated=worker.simulated,
        )
        # a device has a worker per load path, and in a suite per case
        devices.setdefault((worker.host, worker.name), device)
    all_devices = tuple(devices.values())
    listed = all_devices
    if len(all_devices) > MOST_DEVICES:
        listed = tuple(device for device in all_devices if device.verdict != "consistent")
    return {
        "devices": listed,
        "devices_left_out": len(all_devices) - len(listed),
        "device_classes": tuple(_classes(all_devices)),
    }


def _classes(devices: Iterable[DeviceStatus]) -> Iterator[DeviceClass]:
    """Yield the classes of devices: one for each model and verdict."""
    classes = group_by_key(((device.architecture, device.model, device.verdict), device) for device in devices)
    for (architecture, model, verdict), devices_of_class in classes.items():
        yield DeviceClass(
            architecture=architecture,
            model=model,
            verdict=verdict,
            count=len(devices_of_class),
            simulated=any(device.simulated for device in devices_of_class),
            ratio=_worst(device.ratio for device in devices_of_class if device.ratio is not None),
        )


def _marks(simulated: bool, findings: Iterable[Finding]) -> Iterator[str]:
    """Yield what keeps a result from describing hardware."""
    if any(finding.kind == kinds.PLANTED for finding in findings):
        yield "planted fault"
    if simulated:
        yield "simulated"


def _reason(findings: Sequence[Finding]) -> str:
    """Return the message of the first error, or of the first warning where there is no error; empty without either.

    Of several errors, one about unchecked parts comes first, then the order of findings counts.
    """
    serious = (finding for finding in findings if finding.severity != "note")
    first = min(serious, key=_reason_order, default=None)
    return "" if first is None else first.message


def _reason_order(finding: Finding) -> tuple[int, bool]:
    return _SEVERITIES.index(finding.severity), not is_unseen(finding.kind)


def _count_by_severity(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of findings of each severity, also of those without any."""
    counts = Counter(finding.severity for finding in findings)
    return {severity: counts[severity] for severity in _SEVERITIES}  # type: ignore[index]  # all that there are


def _worst(ratios: Iterable[float]) -> Real | None:
    """Return the largest ratio; NaN is larger than any number, and None stands for no ratio at all."""
    worst: float | None = None
    for ratio in ratios:
        worst = worse(ratio, worst)
    return None if worst is None else Real(worst)


def _created(comparison: Comparison) -> datetime.datetime | None:
    """Return when a result was made; of captures that were made apart, when the oldest of them was."""
    times = []
    if comparison.captures:
        times = [source.created for source in comparison.sources]
    if not times and comparison.created is not None:
        times = [comparison.created]
    return min(filter(None, map(time_of, times)), default=None)


def _now() -> datetime.datetime:
    return datetime.datetime.fromisoformat(origin.now())


def _written(path: Path) -> datetime.datetime:
    """Return when a file was written."""
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)


def _host(workers: Iterable[WorkerSummary]) -> str:
    """Return the host of the first worker that has one, else this host."""
    return next((worker.host for worker in workers if worker.host), origin.host())
