"""The workers of one or more captures under names that tell them apart, and which of them is the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from consistency.capture import Capture
from consistency.case import Case
from consistency.numbers import encode_json
from consistency.records import TensorRecord, WorkerInfo

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One worker of one capture.

    Attributes
    ----------
    label : str
        Its name in the comparison: the device, with the capture's folder before it where two captures have that device.
    capture : Capture
    info : WorkerInfo
    records : dict
        What it saw, by stage, layer and tensor, in the model's order.
    """

    label: str
    capture: Capture
    info: WorkerInfo
    records: dict[Key, TensorRecord]

    @property
    def road(self) -> str:
        return self.info.road

    @property
    def case(self) -> Case:
        return self.capture.manifest.case

    @property
    def device(self) -> str:
        """Return who the device is, whatever number it has today: its UUID, or host and name, and its variant."""
        name, _, variant = self.info.name.partition("@")
        identity = self.info.uuid or f"{self.capture.manifest.host}/{name}"
        return f"{identity}@{variant}" if variant else identity

    @property
    def is_cpu(self) -> bool:
        return self.info.name.partition("@")[0] == "cpu"

    @property
    def program(self) -> tuple[str, str, str] | None:
        """Return what decides the bits of a computed tensor; workers of equal program are expected to agree."""
        if not self.info.kernel_key:
            return None
        return (self.info.architecture, self.info.model, self.info.kernel_key)

    def kind(self) -> bytes:
        """Return everything that `judge` may look at of a worker, beside its record and the tensors it kept.

        Of two workers of one kind with equal records only one is judged.
        """
        info = self.info
        facts = (info.architecture, info.model, info.driver, info.capability, info.status, info.kernel_key)
        return encode_json((self.is_cpu, *facts, info.environment, info.in_force, self.case.dtype))

    def could_have_seen(self, key: Key) -> bool:
        """Tell whether this worker's own case asked for a tensor that it has no record of."""
        case, stage = self.case, key[0]
        return stage in case.stages and not case.only


def gather(captures: Sequence[Capture]) -> tuple[Participant, ...]:
    """Return the workers of all captures, named apart."""
    labels = _labels([_home(capture.folder) for capture in captures])
    keys: dict[Key, Key] = {}  # one tuple per tensor for all workers
    seen = Counter((worker.info.name, worker.info.road) for capture in captures for worker in capture.workers)
    prefixed = any(count > 1 for count in seen.values())
    return tuple(
        Participant(
            label=f"{label}:{worker.info.name}" if prefixed else worker.info.name,
            capture=capture,
            info=worker.info,
            records={keys.setdefault(record.key, record.key): record for record in worker.records},
        )
        for label, capture in zip(labels, captures, strict=True)
        for worker in capture.workers
    )


def choose_reference(participants: Sequence[Participant]) -> Participant | None:
    """Return the first capture's plain CPU, else its first CPU, else its first worker that saw anything."""
    useful = [p for p in participants if p.records]
    if not useful:
        return None
    ended_well = [p for p in useful if p.info.status == "ok"] or useful
    first = [p for p in ended_well if p.capture is ended_well[0].capture]
    plain = [p for p in first if p.info.name == "cpu"]
    cpus = [p for p in first if p.is_cpu]
    return (plain or cpus or first)[0]


def _home(folder: Path) -> Path:
    """Return the folder that a user gave: a run keeps its capture in `captures/`."""
    folder = folder.resolve()
    return folder.parent if folder.name == "captures" else folder


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that tell the folders apart; the same folder twice gets a number."""
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
