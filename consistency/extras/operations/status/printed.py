"""A status in one line, for people and Nagios, with the exit status beside it; and as metrics for Prometheus.

Health checkers cut a message at 80 bytes, so a line has no more, and each character is one byte. Names of cases,
devices and tensors may be a stranger's: what is not printable ASCII is escaped or replaced.

Metrics have the text format of node_exporter's textfile collector, which refuses timestamps: times are values. Their
labels `gpu`, `UUID`, `modelName` and `Hostname` are those of NVIDIA's DCGM exporter, so that series of the two can be
joined; `UUID` is the one that does not change with the numbers of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from consistency.case.duration import duration_text
from consistency.comparison.kinds import EXIT_STATUS
from consistency.extras.operations.status.record import CLOCK_SKEW_S, DeviceClass, DeviceStatus, Status
from consistency.text import one_line

MOST_BYTES = 80

_MOST_HEAD = 46  # the verdict and both marks, with a name of five letters; a longer one is cut

NO_RESULT = 2
"""Exit status where there is no result to read: bad input."""

STALE = 3
"""Exit status of a result that is too old: like that of a run of which a part was not checked."""

NAGIOS = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}
"""Monitoring Plugins Development Guidelines, 2.2: https://www.monitoring-plugins.org/doc/guidelines.html"""

_PLAIN = str.maketrans({"·": "-", "×": "x", "≤": "<=", "…": "...", "→": "->", "–": "-", "✗": "x"})
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def state(status: Status, *, stale: bool) -> str:
    """Return Nagios' word for a result.

    A lost worker is CRITICAL: its device may be dead. UNKNOWN is what says nothing of the devices: no result, a stale
    one, or a suite of which no case could be worse than unusable.
    """
    if stale or status.verdict == "unchecked":
        return "UNKNOWN"
    if status.verdict != "consistent":
        return "CRITICAL"
    return "WARNING" if status.findings.get("warning") else "OK"


def is_stale(age_s: float, max_age_s: float | None) -> bool:
    """Return whether a result is older than allowed, or from the future."""
    return max_age_s is not None and not -CLOCK_SKEW_S <= age_s <= max_age_s


def text_line(status: Status, age_s: float, max_age_s: float | None) -> str:
    """Return the line for people."""
    word = "STALE" if is_stale(age_s, max_age_s) else status.verdict.upper()
    marks = [f"[{mark}]" for mark in status.marks]
    head = _cut(_ascii(" ".join([word, *marks, status.case])), _MOST_HEAD)
    return _line(f"{head}: ", _message(status, age_s, max_age_s), f" ({_age_text(age_s)})")


def nagios_line(status: Status, age_s: float, max_age_s: float | None) -> str:
    """Return the line for Nagios and what descends from it; performance data is in it as far as it fits."""
    word = state(status, stale=is_stale(age_s, max_age_s))
    figures = [f"age={max(age_s, 0):.0f}s", f"findings={sum_of(status)}"]
    ratio = "" if status.ratio is None else f"ratio={_perf(status.ratio)};;1"
    # of a good result the ratio is kept and the message cut; of any other the message matters more
    tail = ""
    if ratio and word == "OK":
        tail = f" | {ratio}"
    elif ratio:
        figures.insert(0, ratio)
    marks = "".join(f"[{mark}] " for mark in status.marks)
    # a bar would begin the performance data
    message = _message(status, age_s, max_age_s).replace("|", "/")
    line = _line(f"CONSISTENCY {word} - {marks}", message, tail)
    separator = " " if tail else " | "
    for figure in figures:
        if len(line) + len(separator) + len(figure) <= MOST_BYTES:
            line = f"{line}{separator}{figure}"
            separator = " "
    return line


def no_result_line(message: str, form: str) -> str:
    """Return the line where there is no result."""
    if form == "nagios":
        return _line("CONSISTENCY UNKNOWN - ", message.replace("|", "/"), "")
    return _line("UNKNOWN ", message, "")


def sum_of(status: Status) -> int:
    """Return how many errors and warnings there are."""
    return sum(count for severity, count in status.findings.items() if severity != "note")


def _message(status: Status, age_s: float, max_age_s: float | None) -> str:
    """Return the reason of a bad result, the sentence of a good one, or why a stale one does not count."""
    if is_stale(age_s, max_age_s):
        assert max_age_s is not None
        if age_s < 0:
            return f"{status.verdict}, but dated in the future: check the clock"
        return f"{status.verdict}, but older than {duration_text(max_age_s)}"
    is_good = status.verdict == "consistent" and not status.findings.get("warning")
    return status.sentence if is_good or not status.reason else status.reason


def _line(head: str, text: str, tail: str) -> str:
    """Return a line of at most `MOST_BYTES`; head and tail are kept, and the text between them is cut."""
    return head + _cut(_ascii(text), MOST_BYTES - len(head) - len(tail)) + tail


def _cut(text: str, most: int) -> str:
    """Return a text of at most so many characters, cut behind a clause where that keeps more than half of it."""
    if len(text) <= most:
        return text
    start = text[: most - 3]
    clause_end = max(start.rfind("; "), start.rfind(" - "))
    if clause_end > most // 2:
        return start[:clause_end] + "..."
    return start.rstrip() + "..."


def _ascii(text: str) -> str:
    """Return a text in printable ASCII; other characters are written in another way, or as `?`."""
    return one_line(text.translate(_PLAIN)).encode("ascii", "replace").decode()


def _age_text(age_s: float) -> str:
    """Return an age in its largest whole unit: 26 hours are `1d ago`."""
    size, unit = next(((size, unit) for size, unit in _UNITS if age_s >= size), _UNITS[-1])
    return f"{max(age_s, 0) // size:.0f}{unit} ago"


def _perf(value: float) -> str:
    """Return a value of performance data; `U` is what the guidelines (2.6) have for one that is no number."""
    return f"{value:.3g}" if math.isfinite(value) else "U"


Sample = tuple[dict[str, str], float]
"""Labels and value."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metrics(status: Status, *, stale: bool | None) -> Iterator[str]:
    """Yield the lines; `stale` is None where nobody said how old a result may be."""
    for name, text, samples in _families(status, stale):
        lines = [f"{name}{_written_labels(labels)} {_number(value)}" for labels, value in samples]
        if lines:
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} gauge"
            yield from lines


def _families(status: Status, stale: bool | None) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    """Yield the families of metrics: name, help, and samples."""
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
        [(_class_labels(run, devices), devices.count) for devices in status.device_classes],
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


def _class_labels(run: dict[str, str], devices: DeviceClass) -> dict[str, str]:
    """Return the labels of the series of a class of devices; `run` are those of the run."""
    return {**run, "architecture": devices.architecture, "modelName": devices.model, "verdict": devices.verdict}


def _device_labels(status: Status, device: DeviceStatus) -> dict[str, str]:
    """Return the labels of the series of a device."""
    labels: dict[str, str] = {}
    number = device.name.rpartition(":")[2].partition("@")[0]  # `1` in `cuda:1@tf32`, and in `host-a:cuda:1`
    if number.isdigit():
        labels["gpu"] = number
    if device.uuid:
        labels["UUID"] = device.uuid
    return {
        **labels,
        "modelName": device.model,
        "Hostname": device.host or status.host,
        "worker": device.name,
        "case": status.case,
    }


def _written_labels(labels: dict[str, str]) -> str:
    """Return labels as the text format has them: `{gpu="1",case="night"}`."""
    pairs = [f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
