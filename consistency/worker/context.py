"""The arguments of every stage: a worker's device, its model, and where to write."""

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
    """Notes which devices were touched."""
    memory: StageMemoryLog
    """Measures the memory that the stage takes."""

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
        """Return the current digests of the tensors that differ from the base before the adapter, by name."""
        current = {name: digest(tensor) for name, tensor in self.base.on_device()}
        return {name: now for name, now in current.items() if now.value != self.base.digests[name].value}

    def expected_base(self, name: str) -> torch.Tensor | None:
        """Return the file's value of a tensor of the base under the adapter.

        None where no file holds it, and where the adapter's method rewrites it (PiSSA, OLoRA): there the bytes on the
        device are the reference, and the stage `base` reports that they changed.
        """
        if name in self.rewritten or name not in self.base.tensors:
            return None
        return self.base.expected(name)

    def expected_under(self, layer: str, part: str) -> torch.Tensor | None:
        """Return the file's value of a tensor inside an adapted layer, as `expected_base` does.

        Parameters
        ----------
        layer : str
            Name of the layer in the model.
        part : str
            Name of the tensor in that layer, such as `base_layer.weight`.
        """
        name_in_base = self.origins.get(f"{layer}.{part}")
        if name_in_base is None:  # a tensor in the place of the base's
            name_in_base = f"{module_place(layer)}.{part.removeprefix('base_layer.')}"
        return self.expected_base(name_in_base)


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterStages:
    """The argument of a plug-in's step after the stages (`consistency.case.final_step`)."""

    context: Machine
    """A `Context` where a model is loaded."""
    specs: Sequence[StageSpec]
    """The stages of the case, in the order in which they ran."""
    device_uuid: str | None
    """None where the device has none."""
    update: Callable[..., None]
    """Changes fields of the worker's state, by name, and writes it."""


INPUTS = "inputs"
"""Layer name of the rows about a stage's inputs."""


def inputs_fit(context: Context, stage: str, inputs: Mapping[str, torch.Tensor], *, every: bool = False) -> bool:
    """Check ids and labels on the CPU, and report whether the model may run on them on a device.

    Parameters
    ----------
    every : bool
        Record every check; else only those that fail.
    """
    model = context.base.model
    checks = look(inputs, Tables.of(model))
    if every or any(check.word for check in checks):  # else the tokenizer's file, which may be large, is not needed
        checks = look(inputs, Tables.of(model, context.base_folder))
    for check in checks:
        if check.word or every:
            context.record.fact(
                stage,
                INPUTS,
                check.name,
                status="outside" if check.word else "equal",
                word=check.word,
                evidence=check.evidence,
                reason=check.sentence,
            )
    return not any(check.word for check in checks)
