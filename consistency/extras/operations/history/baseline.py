"""Baselines: findings that somebody reviewed and accepted, so that a nightly run fails only for new ones.

A baseline is a JSON file that only `consistency baseline init` and `accept` write, kept where it can be reviewed. An
entry accepts one kind of finding on one device for the tensors that it names; anything beyond that fails again. Lost
workers and damaged captures cannot be accepted: they leave a part unchecked. Before the first entry there may be no
file.
"""

from __future__ import annotations

import datetime
import itertools
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

_WAIT_S = 60.0  # time to wait for other processes that change the same baseline: each takes moments


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
        baseline = decode_json(path.read_bytes(), Baseline)
    except FileNotFoundError:
        return Baseline(schema=SCHEMA)
    except OSError as error:
        raise UsageError("cannot read the baseline", where=path, got=error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("not a baseline", where=path, got=error) from None
    if baseline.schema != SCHEMA:
        raise UsageError("unsupported baseline schema", where=path, got=baseline.schema, wanted=SCHEMA)
    return baseline


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
    """Add findings of a report to a baseline; return the entries that were added.

    Parameters
    ----------
    path : Path
        The baseline; created if it does not exist.
    findings, workers
        Findings and workers of the report.
    numbers : sequence of int
        Numbers of the findings to accept, from 1; by default all errors.

    Raises
    ------
    UsageError
        No reason is given, or a finding does not exist or cannot be accepted.
    """
    if not reason.strip():
        raise UsageError("accepting a finding needs a reason", where="--reason", got="nothing")
    accepted_findings = _chosen_findings(findings, numbers)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    device_by_worker = _device_by_worker(workers)
    entries = tuple(
        Accepted(
            kind=finding.kind,
            devices=tuple(_devices(finding, device_by_worker)),
            tensors=finding.tensors,
            state=finding.state,
            message=finding.message,
            reason=reason.strip(),
            date=today,
        )
        for finding in accepted_findings
    )
    with _changing(path):
        # read under the claim, so that an entry that another process adds meanwhile is kept
        write_json(path, Baseline(schema=SCHEMA, accepted=(*read_baseline(path).accepted, *entries)))
    return entries


def _chosen_findings(findings: Sequence[Finding], numbers: Sequence[int]) -> list[Finding]:
    """Return the findings with these numbers, or all errors; raise UsageError where one cannot be accepted."""
    for number in numbers:
        if not 1 <= number <= len(findings):
            raise UsageError(f"the report has no finding {number}", where="--finding", got=f"{len(findings)} findings")
    chosen = [findings[number - 1] for number in numbers]
    if not chosen:
        chosen = [finding for finding in findings if finding.severity == "error"]
    for finding in chosen:
        if is_unseen(finding.kind):
            raise UsageError(
                "a finding about unchecked parts cannot be accepted",
                got=f"{finding.kind}: {finding.message}",
                hint="select the others with --finding N",
            )
    if not chosen:
        raise UsageError("the report has no error to accept", got=f"{len(findings)} notes and warnings")
    return chosen


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Keep other processes from changing a baseline meanwhile: none of them loses what another one adds."""
    with claimed(claim_of(path), wait_s=_WAIT_S):
        remove_leftovers(path.parent)
        yield


def apply(baseline: Baseline, comparison: Comparison) -> Comparison:
    """Return a comparison with accepted findings as notes; the other findings decide its verdict."""
    device_by_worker = _device_by_worker(comparison.workers)
    findings = [_accepted_as_note(baseline, finding, device_by_worker) for finding in comparison.findings]
    return with_findings(comparison, findings)


def with_stale(baseline: Baseline, comparison: Comparison) -> Comparison:
    """Return a comparison with a note for each entry that accepted nothing, though its devices and stages were checked.

    An entry with a state accepts a drift to certain bits. That is needed once, so it is never stale.
    """
    device_by_worker = _device_by_worker(comparison.workers)
    checked_devices = set(device_by_worker.values())
    checked_stages = {tensor.stage for tensor in comparison.tensors}
    accepted = [finding for finding in comparison.findings if finding.accepted is not None]
    notes = []
    for entry in baseline.accepted:
        stages = {name.partition("::")[0] for name in entry.tensors}
        was_checked = checked_devices.issuperset(entry.devices) and stages <= checked_stages
        if entry.state is not None or not was_checked:
            continue
        same_kind = (finding for finding in accepted if finding.kind == entry.kind)
        if not any(_shares_device(entry, finding, device_by_worker) for finding in same_kind):
            message = f"accepted on {entry.date} ({entry.reason}), and not found in this run: {entry.message}"
            notes.append(Finding(kind=kinds.STALE_BASELINE, severity="note", message=message))
    return with_findings(comparison, [*comparison.findings, *notes]) if notes else comparison


def _shares_device(entry: Accepted, finding: Finding, device_by_worker: Mapping[str, str]) -> bool:
    """Return whether a finding concerns a device of an entry; an entry without devices may be about any finding."""
    if not entry.devices:
        return True
    return not set(entry.devices).isdisjoint(_devices(finding, device_by_worker))


def _accepted_as_note(baseline: Baseline, finding: Finding, device_by_worker: Mapping[str, str]) -> Finding:
    """Return a finding as a note where the baseline accepts it on all of its devices; unchanged otherwise."""
    if finding.severity == "note" or is_unseen(finding.kind):
        return finding
    entries = [
        entry for entry in baseline.accepted if entry.kind == finding.kind and finding.state in (entry.state, None)
    ]
    entries_by_device = [
        [entry for entry in entries if device in entry.devices] for device in _devices(finding, device_by_worker)
    ]
    if not entries_by_device:  # the finding is about no device, so is an entry that accepts it
        entries_by_device = [[entry for entry in entries if not entry.devices]]
    if not all(_covers(entries_of_device, finding) for entries_of_device in entries_by_device):
        return finding
    last = max(itertools.chain.from_iterable(entries_by_device), key=lambda entry: entry.date)
    return msgspec.structs.replace(
        finding,
        severity="note",
        accepted=finding.severity,
        message=f"accepted on {last.date} ({last.reason}): {finding.message}",
    )


def _covers(entries: Iterable[Accepted], finding: Finding) -> bool:
    """Return whether entries together name every tensor of a finding, or one names none where the finding has none."""
    if not finding.tensors:
        return any(not entry.tensors for entry in entries)
    accepted_tensors = set(itertools.chain.from_iterable(entry.tensors for entry in entries))
    return accepted_tensors.issuperset(finding.tensors)


def _devices(finding: Finding, device_by_worker: Mapping[str, str]) -> list[str]:
    """Return the devices of a finding's workers; a worker that the report has no device of stands for itself."""
    return [device_by_worker.get(name, name) for name in finding.workers]


def _device_by_worker(workers: Sequence[WorkerSummary]) -> dict[str, str]:
    """Return each worker's device by the worker's name in the report."""
    return {worker.name: worker.device or worker.name for worker in workers}
