"""A status as metrics in Prometheus' text format, for the textfile collector of node_exporter.

The labels `gpu`, `UUID`, `modelName` and `Hostname` are those of NVIDIA's DCGM exporter, so that series of the two can
be joined; `UUID` is the one that does not change with the numbers of devices. Times are values and not timestamps: the
collector refuses those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from consistency.report.status.record import EXIT_STATUS, DeviceStatus, Status

Sample = tuple[dict[str, str], float]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metrics(status: Status, *, stale: bool | None) -> Iterator[str]:
    """Yield the lines; `stale` is None where nobody said how old a result may be."""
    for name, text, samples in _families(status, stale):
        found = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
        if found:
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} gauge"
            yield from found


def _families(status: Status, stale: bool | None) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    run = {"Hostname": status.host, "case": status.case}
    devices = [(_device_labels(status, device), device) for device in status.devices]
    yield (
        "consistency_verdict",
        "Verdict of the last run: 0 consistent, 1 inconsistent, 2 not checked, 3 incomplete.",
        [(run, EXIT_STATUS[status.verdict])],
    )
    yield (
        "consistency_device_verdict",
        "Verdict of the last run on a device: 0 consistent, 1 inconsistent, 3 its worker was lost.",
        [(labels, EXIT_STATUS[device.verdict]) for labels, device in devices],
    )
    yield (
        "consistency_devices",
        "Devices of the last run by model and verdict; of many, only those that are not consistent have series of "
        "their own.",
        [
            (
                {**run, "architecture": one.architecture, "modelName": one.model, "verdict": one.verdict},
                one.count,
            )
            for one in status.device_classes
        ],
    )
    yield (
        "consistency_bound_ratio",
        "Worst error/tolerance of the model's tensors on a device; above 1 is outside.",
        [(labels, device.ratio) for labels, device in devices if device.ratio is not None],
    )
    yield (
        "consistency_case_verdict",
        "Verdict of a case of the last suite, as consistency_verdict.",
        [({**run, "case": name}, EXIT_STATUS[verdict]) for name, verdict in status.cases.items()],
    )
    yield (
        "consistency_findings",
        "Findings of the last run by severity; those that the baseline accepts are notes.",
        [({**run, "severity": severity}, count) for severity, count in status.findings.items()],
    )
    yield "consistency_findings_accepted", "Findings that the baseline accepts.", [(run, status.accepted)]
    yield (
        "consistency_workers",
        "Workers of the last run by how they ended.",
        [({**run, "status": name}, status.workers.get(name, 0)) for name in ("ok", "lost", "failed")],
    )
    ended = status.created.timestamp()
    yield "consistency_last_run_timestamp_seconds", "When the last run ended, in Unix time.", [(run, ended)]
    if status.elapsed_s is not None:
        yield "consistency_last_run_duration_seconds", "Time that the last run took.", [(run, status.elapsed_s)]
    if stale is not None:
        yield "consistency_stale", "Whether the result was older than --max-age when this was written.", [(run, stale)]
    marked = {mark.replace(" ", "_"): "true" for mark in status.marks}
    yield (
        "consistency_info",
        "Version and profile of the last run; planted_fault and simulated where it does not describe hardware.",
        [({**run, "version": status.tool, "profile": status.profile, **marked}, 1)],
    )


def _device_labels(status: Status, device: DeviceStatus) -> dict[str, str]:
    number = device.name.rpartition(":")[2].partition("@")[0]  # of `cuda:1@tf32`, and of `host-a:cuda:1`
    labels = {"gpu": number} if number.isdigit() else {}
    labels |= {"UUID": device.uuid} if device.uuid else {}
    return {
        **labels,
        "modelName": device.model,
        "Hostname": device.host or status.host,
        "worker": device.name,
        "case": status.case,
    }


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
