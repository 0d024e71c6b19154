"""Baselines: findings that somebody reviewed and accepted, so that a nightly run fails only for new ones.

A baseline is a JSON file that only `consistency baseline init` and `accept` write, kept where it can be reviewed. An
entry accepts one kind of finding on one device for the tensors that it names; anything beyond that fails again. Lost
workers and damaged captures cannot be accepted: they leave a part unchecked. Before the first entry there may be no
file.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from consistency.capture.claim import claim_of, claimed
from consistency.capture.json_codec import decode_json
from consistency.capture.whole_file import remove_leftovers
from consistency.capture.writer import write_json
from consistency.comparison import kinds
from consistency.comparison.kinds import is_unseen
from consistency.comparison.result import Comparison, Finding, WorkerSummary, with_findings
from consistency.errors import UsageError

SCHEMA = "consistency.baseline/1"

_WAIT_S = 60.0  # for others that change the same baseline: each takes moments


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted finding."""

    kind: str
    devices: tuple[str, ...]  # by UUID, or host and name
    tensors: tuple[str, ...]  # names; empty where the finding concerns none
    message: str  # as it was reported
    reason: str
    date: str  # on which day it was accepted
    state: str | None = None  # digest of the accepted bits, where different bits would be a new finding


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of accepted findings."""

    schema: str
    accepted: tuple[Accepted, ...] = ()


def read_baseline(path: Path) -> Baseline:
    """Read a baseline; a file that does not exist accepts nothing.

    Raises
    ------
    UsageError
        It is not a baseline, or has an incomplete entry.
    """
    try:
        found = decode_json(path.read_bytes(), Baseline)
    except FileNotFoundError:
        return Baseline(schema=SCHEMA)
    except OSError as error:
        raise UsageError("cannot read the baseline", where=path, got=error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("not a baseline", where=path, got=error) from None
    if found.schema != SCHEMA:
        raise UsageError("unsupported baseline schema", where=path, got=found.schema, wanted=SCHEMA)
    return found


def init_baseline(path: Path) -> None:
    """Write a baseline that accepts nothing.

    Raises
    ------
    UsageError
        There is a file: its entries may be needed.
    """
    with _changing(path):
        if path.exists():
            raise UsageError("the baseline exists already", where=path)
        write_json(path, Baseline(schema=SCHEMA))


def accept(
    path: Path,
    findings: Sequence[Finding],
    workers: Sequence[WorkerSummary],
    *,
    reason: str,
    numbers: Sequence[int] = (),
) -> tuple[Accepted, ...]:
    """Add findings of a report to a baseline; return what was added.

    Parameters
    ----------
    path : Path
        The baseline; created if it does not exist.
    findings, workers
        Of the report.
    numbers : sequence of int
        Which findings, from 1; by default all errors.

    Raises
    ------
    UsageError
        No reason is given, or a finding does not exist or cannot be accepted.
    """
    if not reason.strip():
        raise UsageError("accepting a finding needs a reason", where="--reason", got="nothing")
    for number in numbers:
        if not 1 <= number <= len(findings):
            raise UsageError(f"the report has no finding {number}", where="--finding", got=f"{len(findings)} findings")
    chosen = [findings[n - 1] for n in numbers] or [f for f in findings if f.severity == "error"]
    for finding in chosen:
        if is_unseen(finding.kind):
            raise UsageError(
                "a finding about unchecked parts cannot be accepted",
                got=f"{finding.kind}: {finding.message}",
                hint="select the others with --finding N",
            )
    if not chosen:
        raise UsageError("the report has no error to accept", got=f"{len(findings)} notes and warnings")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    devices = _devices(workers)
    new = tuple(
        Accepted(
            kind=finding.kind,
            devices=tuple(devices.get(label, label) for label in finding.workers),
            tensors=finding.tensors,
            state=finding.state,
            message=finding.message,
            reason=reason.strip(),
            date=today,
        )
        for finding in chosen
    )
    with _changing(path):
        write_json(path, Baseline(schema=SCHEMA, accepted=(*read_baseline(path).accepted, *new)))
    return new


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Keep other processes from changing a baseline meanwhile: none of them loses what another one adds."""
    with claimed(claim_of(path), wait_s=_WAIT_S):
        remove_leftovers(path.parent)
        yield


def apply(baseline: Baseline, comparison: Comparison) -> Comparison:
    """Turn accepted findings into notes; the others decide the verdict."""
    devices = _devices(comparison.workers)
    return with_findings(comparison, [_weighed(baseline, finding, devices) for finding in comparison.findings])


def with_stale(baseline: Baseline, comparison: Comparison) -> Comparison:
    """Return a comparison with a note for each entry that accepted nothing, though its devices and stages were checked.

    An entry of certain bits, a drift, is needed once.
    """
    devices = _devices(comparison.workers)
    stages = {tensor.stage for tensor in comparison.tensors}
    accepted = [finding for finding in comparison.findings if finding.accepted is not None]
    notes = []
    for entry in baseline.accepted:
        of = {name.partition("::")[0] for name in entry.tensors}
        if entry.state is not None or not {*entry.devices} <= {*devices.values()} or not of <= stages:
            continue
        fitting = (finding for finding in accepted if finding.kind == entry.kind)
        if not any(_is_of(entry, finding, devices) for finding in fitting):
            message = f"accepted on {entry.date} ({entry.reason}), and not found in this run: {entry.message}"
            notes.append(Finding(kind=kinds.STALE_BASELINE, severity="note", message=message))
    return with_findings(comparison, [*comparison.findings, *notes]) if notes else comparison


def _is_of(entry: Accepted, finding: Finding, devices: Mapping[str, str]) -> bool:
    here = {devices.get(label, label) for label in finding.workers}
    return not entry.devices or bool(here & {*entry.devices})


def _weighed(baseline: Baseline, finding: Finding, devices: Mapping[str, str]) -> Finding:
    if finding.severity == "note" or is_unseen(finding.kind):
        return finding
    fitting = [e for e in baseline.accepted if e.kind == finding.kind and finding.state in (e.state, None)]
    here = [devices.get(label, label) for label in finding.workers]
    covering = [[e for e in fitting if device in e.devices] for device in here]
    covering = covering or [[e for e in fitting if not e.devices]]
    if not all(_covers(found, finding) for found in covering):
        return finding
    entries = [entry for found in covering for entry in found]
    last = max(entries, key=lambda entry: entry.date)
    return msgspec.structs.replace(
        finding,
        severity="note",
        accepted=finding.severity,
        message=f"accepted on {last.date} ({last.reason}): {finding.message}",
    )


def _covers(entries: Iterable[Accepted], finding: Finding) -> bool:
    if not finding.tensors:
        return any(not entry.tensors for entry in entries)
    return set(finding.tensors) <= {name for entry in entries for name in entry.tensors}


def _devices(workers: Sequence[WorkerSummary]) -> dict[str, str]:
    """Return each worker's device by the worker's name in the report."""
    return {worker.name: worker.device or worker.name for worker in workers}
