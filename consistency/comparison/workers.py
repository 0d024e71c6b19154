"""The workers of one or more captures under distinct names, and the reference among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Sequence
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
    records: Records  # its records on its own load path, in the model's order
    sides: dict[str, Records] = field(default_factory=dict)  # its records on alternative load paths
    # tensors that changed during the worker's soak, by stage, layer and tensor
    changes: dict[Key, ChangedTensor] = field(default_factory=dict)
    merging: MergeEffect | None = (
        None  # the effect of merging on the outputs; None where this worker did not measure it
    )

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
        """Return the architecture, model and kernels that decide the bits of a computed tensor.

        Workers with the same program are expected to agree; None where the kernels are not known.
        """
        if not self.info.kernel_key:
            return None
        return (self.info.architecture, self.info.model, self.info.kernel_key)

    @property
    def products(self) -> dict[str, str]:
        """Return how float32 products may be computed, by kind of product, where not in float32."""
        recorded = self.info.environment.get("products")
        if not isinstance(recorded, dict):
            return {}
        return {name: str(recorded[name]) for name in ("matmul", "convolution") if name in recorded}

    def kind(self) -> bytes:
        """Return, encoded, all properties of a worker that `judge` may use, besides its record and its stored tensors.

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
        # a soak repeats the worker's own path alone, so nothing changed here
        return replace(
            self,
            info=msgspec.structs.replace(self.info, load_path=load_path),
            records=self.sides[load_path],
            sides={},
            changes={},
        )

    @property
    def failures(self) -> dict[str, str]:
        """Return why a stage has no further rows, by stage: it failed, or it needs a state that another one changed."""
        records = (self.records.get((stage, WHOLE_MODEL, spec.whole)) for stage, spec in SPECS.items())
        failed = (record for record in records if record is not None and RAISED in record.evidence)
        return {record.stage: record.reason or "" for record in failed}

    @property
    def apart(self) -> dict[str, str]:
        """Return why a worker is in no group, by the stage that takes one: it has no rows of that stage."""
        stages = [(stage, spec) for stage, spec in SPECS.items() if spec.together]
        records = (self.records.get((stage, WHOLE_MODEL, spec.whole)) for stage, spec in stages)
        skipped = (record for record in records if record is not None and record.status == "skipped")
        return {record.stage: record.reason or "" for record in skipped}

    @property
    def path_unavailable(self) -> bool:
        """Return whether this worker could not take its alternative path: no tensor is expected of it there."""
        record = self.records.get(("adapter", SETTINGS_LAYER, LOADED_AGAIN))
        return is_alternative(self.load_path) and record is not None and record.status in ("skipped", "blocked")

    @property
    def is_engine(self) -> bool:
        """Return whether the worker stands for the outputs of an inference engine, and not for a device."""
        return self.info.engine is not None

    def expects_stage(self, stage: str) -> bool:
        """Return whether this worker's own case requested a stage, so that a missing record is a mismatch."""
        return not self.is_engine and stage in self.case.stages and not self.case.only and not self.path_unavailable


def gather(captures: Sequence[Capture]) -> tuple[ComparedWorker, ...]:
    """Return the workers of all captures under distinct names."""
    folders = [home_of(capture.folder) for capture in captures]
    # captures of one case in several suites are told apart by the suites, so that workers have one name in all cases
    suites = [_suite_of(folder) for folder in folders]
    suites_are_distinct = len(set(suites)) == len(set(folders))
    labels = _labels(suites) if suites_are_distinct else _labels(folders)
    tables = RecordTables()
    workers = itertools.chain.from_iterable(capture.workers for capture in captures)
    counts = Counter((worker.info.name, worker.info.load_path) for worker in workers)
    # device names suffice unless two captures have the same one
    needs_prefix = any(count > 1 for count in counts.values())
    compared = []
    for label, capture in zip(labels, captures, strict=True):
        for worker in capture.workers:
            name = f"{label}:{worker.info.name}" if needs_prefix else worker.info.name
            compared.append(_compared_worker(name, capture, worker, tables))
    return tuple(compared)


def _suite_of(folder: Path) -> Path:
    """Return the folder of the suite that a capture is part of, else the folder of the capture."""
    return folder.parent.parent if folder.parent.name == CASES else folder


def _compared_worker(label: str, capture: Capture, worker: WorkerCapture, tables: RecordTables) -> ComparedWorker:
    records_by_load_path = tables.of(worker.of_tensors)
    own_records = records_by_load_path.pop("")
    soak = worker.info.soak
    changes = {} if soak is None else {change.key: change for change in soak.changes}
    return ComparedWorker(
        label=label,
        capture=capture,
        info=worker.info,
        records=own_records,
        sides=records_by_load_path,
        changes=changes,
        merging=worker.merging,
    )


def load_paths_of(workers: Sequence[ComparedWorker]) -> tuple[str, ...]:
    """Return the load paths that were taken: the ones workers were started for, then alternative ones."""
    mains = dict.fromkeys(worker.load_path for worker in workers)
    sides = dict.fromkeys(itertools.chain.from_iterable(worker.sides for worker in workers))
    return (*mains, *sides)


def on_load_path(
    workers: Sequence[ComparedWorker], reference: ComparedWorker, load_path: str
) -> tuple[list[ComparedWorker], ComparedWorker]:
    """Return the workers on a load path, and their reference.

    On every default load path this is the reference worker. On an alternative path it is too where it took that path,
    with other devices visible or without; elsewhere another worker takes its place, since each was compared with the
    file. A worker that was lost before an alternative path that others of its capture took is expected there.
    """
    if not is_alternative(load_path):
        members = [worker for worker in workers if worker.load_path == load_path]
        if not any(member is reference for member in members):
            members.insert(0, reference)
        return members, reference
    members, own_reference = _on_alternative_path(workers, reference, load_path)
    if own_reference is None:
        own_reference = _reference_elsewhere(reference, load_path)
        if own_reference is not None:
            members.insert(0, own_reference)
    if own_reference is None:
        usable = (member for member in members if member.records and not member.path_unavailable)
        own_reference = next(usable, members[0])
    return members, own_reference


def _on_alternative_path(
    workers: Sequence[ComparedWorker], reference: ComparedWorker, load_path: str
) -> tuple[list[ComparedWorker], ComparedWorker | None]:
    """Return the workers on an alternative path, and the reference worker there; None where it did not take it."""
    captures = [worker.capture for worker in workers if load_path in worker.sides]
    members: list[ComparedWorker] = []
    reference_there: ComparedWorker | None = None
    for worker in workers:
        member = worker.on(load_path)
        is_lost = member is None and worker.info.status != "ok" and worker.load_path == main_path(load_path)
        # what others of its capture took was to come for a lost worker too: it has no records there
        if is_lost and any(worker.capture is capture for capture in captures):
            info = msgspec.structs.replace(worker.info, load_path=load_path)
            member = replace(worker, info=info, records=Records({}), sides={})
        if member is not None:
            members.append(member)
            if worker is reference:
                reference_there = member
    return members, reference_there


def _reference_elsewhere(reference: ComparedWorker, load_path: str) -> ComparedWorker | None:
    """Return the reference worker on a path with the same option, but other visible devices; None where it has none."""
    option = load_path.removeprefix(main_path(load_path))
    for side in reference.sides:
        if side.removeprefix(main_path(side)) == option:
            return reference.on(side)
    return None


def labels_of(workers: Iterable[ComparedWorker]) -> tuple[str, ...]:
    """Return the names of workers, each once: a worker has one name on all its load paths."""
    return tuple(dict.fromkeys(worker.label for worker in workers))


def in_order_of(workers: Sequence[ComparedWorker], names: Container[str]) -> list[str]:
    """Return the names that workers have, each once, in the order of the comparison."""
    return [label for label in labels_of(workers) if label in names]


def choose_reference(workers: Sequence[ComparedWorker]) -> ComparedWorker | None:
    """Return the first capture's plain CPU, else its first CPU, else its first worker with records."""
    # an engine computes in its own way: it is compared with a device, and never the reverse
    useful = [worker for worker in workers if worker.records and not worker.is_engine]
    if not useful:
        return None
    # a lost worker is the reference only where no other has records
    ended_well = [worker for worker in useful if worker.info.status == "ok"] or useful
    of_first_capture = [worker for worker in ended_well if worker.capture is ended_well[0].capture]
    plain_cpus = [worker for worker in of_first_capture if worker.info.name == "cpu"]
    cpus = [worker for worker in of_first_capture if worker.is_cpu]
    return (plain_cpus or cpus or of_first_capture)[0]


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path endings that are distinct; the same folder twice gets a number."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        labels = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(labels)) == len(set(folders)):
            break
    counts: Counter[str] = Counter()
    numbered = []
    for label in labels:
        counts[label] += 1
        if counts[label] > 1:
            label = f"{label}#{counts[label]}"
        numbered.append(label)
    return numbered
