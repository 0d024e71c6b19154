"""Make the record of a run for a history, and its tables of digests.

A fleet has thousands of workers, and of each stage a few different tables of records: what is done per tensor is done
once per table.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture import origin
from consistency.capture.folder import Capture
from consistency.capture.json_codec import encode_json
from consistency.capture.records import WorkerInfo
from consistency.comparison import kinds
from consistency.comparison.by_worker import worst_ratios
from consistency.comparison.records import Key, StageTable
from consistency.comparison.result import Comparison, tensor_name
from consistency.comparison.workers import ComparedWorker, gather
from consistency.devices.backends import backend_of
from consistency.devices.settings import HOST_SETTINGS
from consistency.extras.operations.history.records import SCHEMA, RunRecord, RunWorkers, WorkerRecord, digest_of
from consistency.numerics.real import Real


def record_of(captures: Sequence[Capture], comparison: Comparison) -> tuple[RunRecord, dict[str, bytes]]:
    """Return what a run leaves in a history: its record, and its tables by name."""
    recorder = _Recorder(worst_ratios(comparison))
    hosts = {capture.manifest.host for capture in captures}
    run_host = captures[0].manifest.host if len(hosts) == 1 else origin.host()
    # an inference engine's file is of the moment when it was written, and need not have the bits of an earlier one
    device_workers = (worker for worker in gather(captures) if not worker.is_engine)
    records = [recorder.worker_record(worker, run_host) for worker in device_workers]
    environment = comparison.workers[0].environment if comparison.workers else {}
    run = RunRecord(
        schema=SCHEMA,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        host=run_host,
        case=comparison.case,
        verdict=comparison.verdict,
        tool=captures[0].manifest.tool,
        versions={name: environment[name] for name in _PACKAGES if environment.get(name)},
        findings=tuple(finding.message for finding in comparison.findings if finding.severity == "error"),
        workers=RunWorkers.of(_with_distinct_devices(records, run_host)),
        planted=any(finding.kind == kinds.PLANTED for finding in comparison.findings),
        auto=_auto_masks(captures),
    )
    return run, recorder.tables


_PACKAGES = ("torch", "cuda", "transformers", "peft")
"""Packages whose versions a history keeps."""


def _auto_masks(captures: Sequence[Capture]) -> dict[str, dict[str, str]]:
    """Return the variables that show a part of the devices, by host whose devices `auto` chose."""
    masks_by_host: dict[str, dict[str, str]] = {}
    for capture in captures:
        facts = capture.manifest.host_facts
        if facts is not None and facts.auto is not None:
            masks_by_host[capture.manifest.host] = facts.auto.masks
    return masks_by_host


@dataclass(frozen=True, slots=True)
class _StageDigests:
    """The digests of a table of records."""

    bits: str  # digest of all tensors; empty where none has one
    number: int  # equal for tables with the same digest of every tensor
    digests: tuple[tuple[Key, str], ...]  # keys of the tensors with their digests, sorted
    read: tuple[str, ...]  # digests of the tensors as they are in the files


def _with_distinct_devices(workers: Sequence[WorkerRecord], run_host: str) -> tuple[WorkerRecord, ...]:
    """Return workers with devices of their own: those of hosts that share a name are known by the captures' names.

    Two that counted as one would be compared with each other from run to run.
    """
    count = Counter(worker.key for worker in workers)
    distinct = []
    for worker in workers:
        if count[worker.key] > 1:
            worker = msgspec.structs.replace(worker, device=f"{worker.host or run_host}/{worker.name}")
        distinct.append(worker)
    return tuple(distinct)


class _Recorder:
    """Make the records of the workers of a run; everything that workers have in common is made once."""

    def __init__(self, ratios: Mapping[str, float]) -> None:
        self.tables: dict[str, bytes] = {}  # JSON of the tables of digests, by name
        self._ratios = ratios  # worst error/tolerance by the name of the worker
        self._stages: dict[StageTable, _StageDigests] = {}
        self._numbers: dict[tuple[tuple[Key, str], ...], int] = {}  # numbers of `_StageDigests`, by their digests
        self._names: dict[tuple[int, ...], str] = {}  # names of tables, by the numbers of their stages
        self._inputs: dict[tuple[object, ...], str] = {}  # digests of inputs, by what they are made of

    def worker_record(self, worker: ComparedWorker, run_host: str) -> WorkerRecord:
        """Return the record of a worker; its table is in `tables`."""
        info, host = worker.info, worker.capture.manifest.host
        stages = {name: self._stage_digests(table) for name, table in worker.records.stages.items()}
        ratio = self._ratios.get(worker.label)
        return WorkerRecord(
            name=worker.label,
            load_path=worker.load_path,
            device=worker.device,
            architecture=info.architecture,
            model=info.model,
            status=info.status,
            software=_software_digest(info),
            inputs=self._inputs_digest(worker, stages),
            bits={name: stage.bits for name, stage in stages.items() if stage.bits},
            table=self._table_name(tuple(stages.values())),
            simulated=info.simulated,
            ratio=None if ratio is None else Real(ratio),
            host="" if host == run_host else host,
            driver=info.driver or "",
        )

    def _stage_digests(self, table: StageTable) -> _StageDigests:
        """Return the digests of a table of records."""
        if table in self._stages:
            return self._stages[table]
        bits = hashlib.blake2b(digest_size=8)
        # bits that may be others in each run of a healthy device are no sign of drift
        promised = ((key, record.promised_digest) for key, record in table.items())
        digests = [(key, digest) for key, digest in promised if digest is not None]
        for key, digest in digests:
            bits.update(f"{key}{digest}".encode())
        ordered = tuple(sorted(digests))
        self._stages[table] = _StageDigests(
            bits=bits.hexdigest() if digests else "",
            number=self._numbers.setdefault(ordered, len(self._numbers)),
            digests=ordered,
            read=tuple(record.reference_digest for _, record in sorted(table.items()) if record.reference_digest),
        )
        return self._stages[table]

    def _table_name(self, stages: Sequence[_StageDigests]) -> str:
        """Return the name of the table of a worker's digests, which workers with the same ones share."""
        numbers = tuple(stage.number for stage in stages if stage.digests)
        if numbers not in self._names:
            digests = sorted(itertools.chain.from_iterable(stage.digests for stage in stages))
            raw = encode_json({tensor_name(*key): digest for key, digest in digests})
            self._names[numbers] = hashlib.sha256(raw).hexdigest()
            self.tables[self._names[numbers]] = raw
        return self._names[numbers]

    def _inputs_digest(self, worker: ComparedWorker, stages: Mapping[str, _StageDigests]) -> str:
        """Return a digest of a worker's inputs: the bytes that it read, else name, size and time of each file."""
        case = worker.case
        read_digests = [stages[name].read if name in stages else () for name in ("base", "adapter")]
        adapters = tuple((adapter.name, adapter.path) for adapter in case.adapters)
        options = (case.dtype, case.level, worker.info.inputs_digest, worker.info.sources)
        # files are looked at once for all workers with the same case that read the same
        inputs_key = (*options, case.base, case.adapter, *read_digests, adapters)
        if inputs_key not in self._inputs:
            inputs: list[Any] = [*options]
            for digests, folder in zip(read_digests, (case.base, case.adapter), strict=True):
                inputs.append(digests or _file_marks(folder))
            for adapter in case.adapters:
                inputs.append([adapter.name, _file_marks(adapter.path)])
            self._inputs[inputs_key] = digest_of(inputs)
        return self._inputs[inputs_key]


def _software_digest(info: WorkerInfo) -> str:
    """Return a digest of what decides the bits of a worker: of an accelerator without what concerns the host alone."""
    device_type = info.name.partition("@")[0].partition(":")[0]
    left_out = frozenset() if backend_of(device_type).computes_on_host else HOST_SETTINGS
    settings = {name: value for name, value in info.in_force.items() if name not in left_out}
    return digest_of([info.kernel_key, info.driver, sorted(settings.items(), key=str)])


def _file_marks(folder: str | None) -> list[Any]:
    """Return name, size and time of the files of a folder, which no stage read completely.

    Without a folder on this host, return its name alone.
    """
    if not folder or not Path(folder).is_dir():
        return [folder]
    files = sorted(file for file in Path(folder).iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
