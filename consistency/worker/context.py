"""What every stage is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from consistency.capture.names import module_place
from consistency.case.stage import StageSpec
from consistency.numerics.digest import TensorDigest, digest
from consistency.worker.memory.per_stage import StageMemoryLog
from consistency.worker.memory.placement import Placement
from consistency.worker.model.id_checks import Tables, look
from consistency.worker.model.loading import LoadedBase
from consistency.worker.model.structure import Structure
from consistency.worker.protocol import EventLog, Job
from consistency.worker.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A worker without a model: its device, and where to write."""

    job: Job
    events: EventLog
    record: Recorder
    placement: Placement
    """Which devices were touched so far."""
    memory: StageMemoryLog
    """What the stage takes so far."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.job.device)

    @property
    def scratch(self) -> Path:
        return Path(self.job.scratch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Machine):
    """One worker's model on its device, and where to write."""

    base: LoadedBase
    model: torch.nn.Module
    """The adapted model, or the base where the case has no adapter."""
    expected: Mapping[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Parameter name in `model` to (name in the adapter's file, tensor on the CPU)."""
    initial: Mapping[str, str] = field(default_factory=dict)
    """Digest of each of the adapter's parameters before its file was loaded, by name in `model`."""
    rewritten: frozenset[str] = frozenset()
    """Tensors of the base that loading the adapter has changed."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Name in the base of each of its tensors, by name in `model`: PEFT's layer replication numbers layers anew."""
    bare: Structure | None = None
    """The base as it was before any adapter, of a case with several."""

    @property
    def base_folder(self) -> str | None:
        """Return the base's folder, None where a function makes it."""
        return None if self.job.case.factory is not None else self.job.case.base

    def changed_base(self) -> dict[str, TensorDigest]:
        """Return what differs now from the base before the adapter: the digests of today, by name."""
        now = {name: digest(tensor) for name, tensor in self.base.on_device()}
        return {name: after for name, after in now.items() if after.value != self.base.digests[name].value}

    def expected_base(self, name: str) -> torch.Tensor | None:
        """Return the file's value of a tensor of the base under the adapter.

        None where no file holds it, and where the adapter's method rewrites it (PiSSA, OLoRA): there the bytes on the
        device are the reference, and the stage `base` reports that they changed.
        """
        if name in self.rewritten or name not in self.base.tensors:
            return None
        return self.base.expected(name)

    def expected_under(self, layer: str, part: str) -> torch.Tensor | None:
        """Return the same for a tensor inside an adapted layer, by its name in that layer: `base_layer.weight`."""
        found = self.origins.get(f"{layer}.{part}")
        if found is None:  # a tensor in the place of the base's
            found = f"{module_place(layer)}.{part.removeprefix('base_layer.')}"
        return self.expected_base(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterStages:
    """What a plug-in is given that goes on after the stages (`consistency.case.final_step`)."""

    context: Machine
    """A `Context` where a model is loaded."""
    specs: Sequence[StageSpec]
    """The stages of the case, in the order in which they ran."""
    device_uuid: str | None
    update: Callable[..., None]
    """Change fields of the worker's state, by name, and write it."""


INPUTS = "inputs"
"""Layer name of the rows about a stage's inputs."""


def inputs_fit(context: Context, stage: str, inputs: Mapping[str, torch.Tensor], *, every: bool = False) -> bool:
    """Record what is wrong with ids and labels, or `every` check of them; report whether the model may run on a device.

    They are looked at on the CPU.
    """
    model = context.base.model
    seen = look(inputs, Tables.of(model))
    if every or any(one.word for one in seen):  # else the tokenizer's file, which may be large, is not needed
        seen = look(inputs, Tables.of(model, context.base_folder))
    for one in seen:
        if one.word or every:
            context.record.fact(
                stage,
                INPUTS,
                one.name,
                status="outside" if one.word else "equal",
                word=one.word,
                evidence=one.evidence,
                reason=one.sentence,
            )
    return not any(one.word for one in seen)
