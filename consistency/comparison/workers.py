"""The workers of one or more captures under distinct names, and the reference among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from consistency.capture.folder import CASES, Capture, WorkerCapture, home_of
from consistency.capture.json_codec import encode_json
from consistency.capture.merge_effect import MergeEffect
from consistency.capture.names import LOADED_AGAIN, RAISED, SETTINGS_LAYER, WHOLE_MODEL
from consistency.capture.records import WorkerInfo
from consistency.capture.soak import ChangedTensor
from consistency.case.case import Case
from consistency.case.load_path import is_alternative, main_path
from consistency.case.stages import SPECS
from consistency.comparison.records import Key, Records, RecordTables


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWorker:
    """One worker of one capture."""

    # its name in the comparison: the device, with the capture's folder before it where two captures have that device
    label: str
    capture: Capture
    info: WorkerInfo
    records: Records  # by stage, layer and tensor, in the model's order
    sides: dict[str, Records] = field(default_factory=dict)  # the same by alternative load path
    # what changed during the worker's soak, by stage, layer and tensor
    changes: dict[Key, ChangedTensor] = field(default_factory=dict)
    merging: MergeEffect | None = None  # what merging does to the outputs, where this worker measured it

    @property
    def load_path(self) -> str:
        return self.info.load_path

    @property
    def case(self) -> Case:
        return self.capture.manifest.case

    @property
    def device(self) -> str:
        """Return the identity of the device, which does not change with its number: its UUID, or host and name."""
        name, _, variant = self.info.name.partition("@")
        identity = self.info.uuid or f"{self.capture.manifest.host}/{name}"
        return f"{identity}@{variant}" if variant else identity

    @property
    def is_cpu(self) -> bool:
        return self.info.name.partition("@")[0] == "cpu"

    @property
    def program(self) -> tuple[str, str, str] | None:
        """Return what decides the bits of a computed tensor; workers with the same program are expected to agree."""
        if not self.info.kernel_key:
            return None
        return (self.info.architecture, self.info.model, self.info.kernel_key)

    @property
    def products(self) -> dict[str, str]:
        """Return how float32 products may be computed, by kind of product, where not in float32."""
        found = self.info.environment.get("products")
        names = ("matmul", "convolution")
        return {name: str(found[name]) for name in names if name in found} if isinstance(found, dict) else {}

    def kind(self) -> bytes:
        """Return everything that `judge` may use of a worker other than its record and its stored tensors.

        Of two workers of one kind with equal records only one is judged.
        """
        info = self.info
        facts = (info.architecture, info.model, info.driver, info.capability, info.status, info.kernel_key)
        return encode_json((self.is_cpu, *facts, info.environment, info.in_force, self.case.dtype, list(self.changes)))

    def on(self, load_path: str) -> ComparedWorker | None:
        """Return this worker on a load path: itself, with its records of an alternative path, or None."""
        if load_path == self.load_path:
            return self
        if load_path not in self.sides:
            return None
        return replace(
            self,
            info=msgspec.structs.replace(self.info, load_path=load_path),
            records=self.sides[load_path],
            sides={},
            changes={},
        )

    @property
    def failures(self) -> dict[str, str]:
        """Return why a stage has no further rows, by stage: it failed, or needs what one left changed."""
        rows = (self.records.get((stage, WHOLE_MODEL, spec.whole)) for stage, spec in SPECS.items())
        return {row.stage: row.reason or "" for row in rows if row is not None and RAISED in row.evidence}

    @property
    def apart(self) -> dict[str, str]:
        """Return why a worker is in no group, by the stage that takes one: of what a group does, it has no rows."""
        rows = (self.records.get((stage, WHOLE_MODEL, spec.whole)) for stage, spec in SPECS.items() if spec.together)
        return {row.stage: row.reason or "" for row in rows if row is not None and row.status == "skipped"}

    @property
    def path_unavailable(self) -> bool:
        """Return whether this worker could not take its alternative path: no tensor is expected of it there."""
        record = self.records.get(("adapter", SETTINGS_LAYER, LOADED_AGAIN))
        return is_alternative(self.load_path) and record is not None and record.status in ("skipped", "blocked")

    @property
    def is_engine(self) -> bool:
        """Return whether it stands for the outputs of an inference engine, and not for a device."""
        return self.info.engine is not None

    def expects_stage(self, stage: str) -> bool:
        """Return whether this worker's own case requested what it has no record of in a stage."""
        return not self.is_engine and stage in self.case.stages and not self.case.only and not self.path_unavailable


def gather(captures: Sequence[Capture]) -> tuple[ComparedWorker, ...]:
    """Return the workers of all captures under distinct names."""
    folders = [home_of(capture.folder) for capture in captures]
    # captures of one case in several suites are told apart by the suites, so that workers have one name in all cases
    suites = [folder.parent.parent if folder.parent.name == CASES else folder for folder in folders]
    labels = _labels(suites if len(set(suites)) == len(set(folders)) else folders)
    tables = RecordTables()
    seen = Counter((worker.info.name, worker.info.load_path) for capture in captures for worker in capture.workers)
    prefixed = any(count > 1 for count in seen.values())
    return tuple(
        _worker(f"{label}:{worker.info.name}" if prefixed else worker.info.name, capture, worker, tables)
        for label, capture in zip(labels, captures, strict=True)
        for worker in capture.workers
    )


def _worker(label: str, capture: Capture, worker: WorkerCapture, tables: RecordTables) -> ComparedWorker:
    by_load_path = tables.of(worker.of_tensors)
    own = by_load_path.pop("")
    soak = worker.info.soak
    changes = {} if soak is None else {change.key: change for change in soak.changes}
    return ComparedWorker(
        label=label,
        capture=capture,
        info=worker.info,
        records=own,
        sides=by_load_path,
        changes=changes,
        merging=worker.merging,
    )


def load_paths_of(workers: Sequence[ComparedWorker]) -> tuple[str, ...]:
    """Return the load paths that were taken: those that workers were started for, then the alternative ones."""
    mains = dict.fromkeys(p.load_path for p in workers)
    return (*mains, *dict.fromkeys(side for p in workers for side in p.sides))


def on_load_path(
    workers: Sequence[ComparedWorker], reference: ComparedWorker, load_path: str
) -> tuple[list[ComparedWorker], ComparedWorker]:
    """Return the workers on a load path, and their reference.

    On every default load path this is the reference worker. On an alternative path it is too where it took that path,
    with other devices visible or without; elsewhere another worker takes its place, since each was compared with the
    file. A worker that was lost before an alternative path that others of its capture took is expected there.
    """
    if not is_alternative(load_path):
        members = [p for p in workers if p.load_path == load_path]
        if not any(member is reference for member in members):
            members.insert(0, reference)
        return members, reference
    took = [p.capture for p in workers if load_path in p.sides]
    here: ComparedWorker | None = None
    members = []
    for p in workers:
        view = p.on(load_path)
        is_lost = view is None and p.info.status != "ok" and p.load_path == main_path(load_path)
        if is_lost and any(p.capture is one for one in took):
            view = replace(p, info=msgspec.structs.replace(p.info, load_path=load_path), records=Records({}), sides={})
        if view is not None:
            members.append(view)
            here = view if p is reference else here
    if here is None:
        option = load_path.removeprefix(main_path(load_path))
        elsewhere = next((side for side in reference.sides if side.removeprefix(main_path(side)) == option), None)
        here = None if elsewhere is None else reference.on(elsewhere)
        if here is not None:
            members.insert(0, here)
    return members, here or next((m for m in members if m.records and not m.path_unavailable), members[0])


def in_order_of(workers: Sequence[ComparedWorker], names: Container[str]) -> list[str]:
    """Return the workers of these names, each once."""
    return [name for name in dict.fromkeys(worker.label for worker in workers) if name in names]


def choose_reference(workers: Sequence[ComparedWorker]) -> ComparedWorker | None:
    """Return the first capture's plain CPU, else its first CPU, else its first worker with records."""
    useful = [p for p in workers if p.records and not p.is_engine]
    if not useful:
        return None
    ended_well = [p for p in useful if p.info.status == "ok"] or useful
    first = [p for p in ended_well if p.capture is ended_well[0].capture]
    plain = [p for p in first if p.info.name == "cpu"]
    cpus = [p for p in first if p.is_cpu]
    return (plain or cpus or first)[0]


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path endings that are distinct; the same folder twice gets a number."""
    for depth in range(1, max(len(f.parts) for f in folders) + 1):
        labels = ["/".join(f.parts[-depth:]) for f in folders]
        if len(set(labels)) == len(set(folders)):
            break
    again: Counter[str] = Counter()
    numbered = []
    for label in labels:
        again[label] += 1
        numbered.append(label if again[label] == 1 else f"{label}#{again[label]}")
    return numbered
