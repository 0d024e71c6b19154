"""A run -> what it leaves in a history: its record, and tables of digests.

A fleet has thousands of workers, and of each stage a few different tables of records: what is done per tensor is done
once per table.
"""

from __future__ import annotations

import datetime
import hashlib
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
    devices = (one for one in gather(captures) if not one.is_engine)
    workers = _told_apart([recorder.worker(one, run_host) for one in devices], run_host)
    environment = comparison.workers[0].environment if comparison.workers else {}
    run = RunRecord(
        schema=SCHEMA,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        host=run_host,
        case=comparison.case,
        verdict=comparison.verdict,
        tool=captures[0].manifest.tool,
        versions={k: environment[k] for k in ("torch", "cuda", "transformers", "peft") if environment.get(k)},
        findings=tuple(f.message for f in comparison.findings if f.severity == "error"),
        workers=RunWorkers.of(workers),
        planted=any(f.kind == kinds.PLANTED for f in comparison.findings),
        auto={
            capture.manifest.host: facts.auto.masks
            for capture in captures
            if (facts := capture.manifest.host_facts) is not None and facts.auto is not None
        },
    )
    return run, recorder.tables


@dataclass(frozen=True, slots=True)
class _StageDigests:
    """What a history keeps of a table of records."""

    bits: str  # digest of all tensors; empty where none has one
    number: int  # equal for tables with the same digest of every tensor
    digests: tuple[tuple[Key, str], ...]  # of each tensor, sorted
    read: tuple[str, ...]  # digests of what was in the files


def _told_apart(workers: Sequence[WorkerRecord], run_host: str) -> tuple[WorkerRecord, ...]:
    """Return workers with devices of their own: those of hosts that share a name are known by the captures' names.

    Two that counted as one would be compared with each other from run to run.
    """
    count = Counter(worker.key for worker in workers)
    return tuple(
        worker
        if count[worker.key] == 1
        else msgspec.structs.replace(worker, device=f"{worker.host or run_host}/{worker.name}")
        for worker in workers
    )


class _Recorder:
    def __init__(self, ratios: Mapping[str, float]) -> None:
        self.tables: dict[str, bytes] = {}
        self._ratios = ratios
        self._stages: dict[StageTable, _StageDigests] = {}
        self._numbers: dict[tuple[tuple[Key, str], ...], int] = {}
        self._names: dict[tuple[int, ...], str] = {}
        self._files: dict[tuple[object, ...], str] = {}

    def worker(self, worker: ComparedWorker, run_host: str) -> WorkerRecord:
        """Return the record of a worker; its table is in `tables`."""
        info, host = worker.info, worker.capture.manifest.host
        stages = {name: self._stage(table) for name, table in worker.records.stages.items()}
        ratio = self._ratios.get(worker.label)
        return WorkerRecord(
            name=worker.label,
            load_path=worker.load_path,
            device=worker.device,
            architecture=info.architecture,
            model=info.model,
            status=info.status,
            software=_software(info),
            inputs=self._inputs(worker, stages),
            bits={name: stage.bits for name, stage in stages.items() if stage.bits},
            table=self._table(tuple(stages.values())),
            simulated=info.simulated,
            ratio=None if ratio is None else Real(ratio),
            host="" if host == run_host else host,
            driver=info.driver or "",
        )

    def _stage(self, table: StageTable) -> _StageDigests:
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

    def _table(self, stages: Sequence[_StageDigests]) -> str:
        """Return the name of the table of a worker's digests, which workers with the same ones share."""
        same = tuple(stage.number for stage in stages if stage.digests)
        if same not in self._names:
            digests = sorted(one for stage in stages for one in stage.digests)
            raw = encode_json({tensor_name(*key): digest for key, digest in digests})
            self._names[same] = hashlib.sha256(raw).hexdigest()
            self.tables[self._names[same]] = raw
        return self._names[same]

    def _inputs(self, worker: ComparedWorker, stages: Mapping[str, _StageDigests]) -> str:
        """Return a digest of a worker's inputs: the bytes that it read, else name, size and time of each file."""
        case = worker.case
        read = [stages[name].read if name in stages else () for name in ("base", "adapter")]
        adapters = tuple((one.name, one.path) for one in case.adapters)
        given = worker.info.inputs_digest, worker.info.sources
        same = (case.dtype, case.level, *given, case.base, case.adapter, *read, adapters)
        if same not in self._files:
            parts: list[Any] = [case.dtype, case.level, *given]
            parts += [
                digests or _marks(folder) for digests, folder in zip(read, (case.base, case.adapter), strict=True)
            ]
            parts += [[one.name, _marks(one.path)] for one in case.adapters]
            self._files[same] = digest_of(parts)
        return self._files[same]


def _software(info: WorkerInfo) -> str:
    """Return a digest of what decides the bits of a worker: of an accelerator without what concerns the host alone."""
    kind = info.name.partition("@")[0].partition(":")[0]
    left_out = frozenset() if backend_of(kind).computes_on_host else HOST_SETTINGS
    settings = {name: value for name, value in info.in_force.items() if name not in left_out}
    return digest_of([info.kernel_key, info.driver, sorted(settings.items(), key=str)])


def _marks(folder: str | None) -> list[Any]:
    """Identify the files of a folder that no stage read completely."""
    if not folder or not Path(folder).is_dir():
        return [folder]
    files = sorted(file for file in Path(folder).iterdir() if file.suffix in (".safetensors", ".bin", ".json"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
