"""The estimate of a case: the memory that each worker takes in each stage, and that they take together."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from consistency import plugins
from consistency.case import standard
from consistency.case.budget.costs import (
    ACCELERATOR_PROCESS_BYTES,
    LIBRARY_BYTES,
    PROCESS_BYTES,
    Cost,
    Setting,
    after_adapter,
    cost_of,
    load_adapter,
    load_base,
)
from consistency.case.budget.passes import Pass, passes_of, weight_of
from consistency.case.budget.shape import Shape
from consistency.case.case import Case
from consistency.case.final_step import FinalStep
from consistency.case.stage import Stage
from consistency.case.stages import run_order
from consistency.devices.spec import DeviceSpec

START = "start"
"""Name of the step before the first stage."""

WEIGHT_OF_THE_START = 4.0
"""As a stage's `weight`: to import the libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """A worker to estimate."""

    label: str
    spec: DeviceSpec
    device_memory_bytes: int | None = None
    """None on the CPU, and where the backend does not report it."""
    simulated: bool = False
    """Whether the device is software."""
    shares_memory: bool = False
    """Whether the device's memory is the host's, as that of software is."""
    makes_reference: bool = False
    sees_others: bool = False
    wave: int = 0
    """Workers of one wave run side by side."""
    scratch_in_memory: bool = False
    """Whether the host keeps the files of the scratch folder in memory."""

    @property
    def on_device(self) -> bool:
        return not self.spec.is_cpu

    @property
    def takes_from_host(self) -> bool:
        return self.simulated or self.shares_memory


class StageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one worker."""

    stage: str
    """A stage, or a step before or after it: `start`, `load base`, `load adapter`, `soak`."""
    host_private_bytes: int
    """Peak that no other process shares, with the scratch files that the stage removes where these are in memory."""
    host_mapped_bytes: int
    """Peak of mapped files, which the workers of a host share, and which the kernel can drop and read again."""
    device_bytes: int | None = None
    """Peak on the worker's device; None on the CPU."""
    scratch_bytes: int = 0
    """Of files in the scratch folder that the stage removes."""
    passes: tuple[Pass, ...] = ()
    """The passes that it makes of the model, in their order."""

    @property
    def host_bytes(self) -> int:
        """Return the resident size."""
        return self.host_private_bytes + self.host_mapped_bytes


class WorkerEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its stages, and the largest of each figure."""

    worker: str
    makes_reference: bool
    placement: str
    host_private_bytes: int
    host_mapped_bytes: int
    device_bytes: int | None
    device_memory_bytes: int | None
    wave: int
    stages: tuple[StageEstimate, ...]
    scratch_bytes: int = 0
    kept_bytes: int = 0
    """Of files in the scratch folder that stay for the other workers of the case."""

    def shares(self, case: Case) -> list[tuple[str, float]]:
        """Return each stage with its share of the worker's time, by nominal weights: for the progress."""
        later = final_steps(case)
        weights = [later[one.stage].seconds(case) if one.stage in later else _weight(one) for one in self.stages]
        return [(one.stage, weight / sum(weights)) for one, weight in zip(self.stages, weights, strict=True)]


def final_steps(case: Case) -> dict[str, FinalStep]:
    """Return what a worker of a case does after its stages, by name."""
    steps: Iterable[FinalStep] = plugins.asked("final_steps", case)
    return {step.name: step for step in steps}


def _weight(one: StageEstimate) -> float:
    """Return the nominal weight of a stage, or of a step of loading."""
    return WEIGHT_OF_THE_START if one.stage == START else weight_of(Stage(one.stage), one.passes)


def estimate_worker(case: Case, shape: Shape, worker: PlannedWorker, *, offloads: bool = False) -> WorkerEstimate:
    """Estimate one worker."""
    setting = Setting(shape=shape, case=case, on_device=worker.on_device, makes_reference=worker.makes_reference)
    costs = list(_costs(case, setting, worker))
    stages = list(_stages(costs, setting, worker, offloads=offloads))
    for step in final_steps(case).values():
        further: StageEstimate | None = pkgutil.resolve_name(step.estimate)(stages, case, worker)
        if further is not None:
            stages.append(further)
    return WorkerEstimate(
        worker=worker.label,
        makes_reference=worker.makes_reference,
        placement="host" if not worker.on_device else "offload" if offloads else "device",
        host_private_bytes=max(stage.host_private_bytes for stage in stages),
        host_mapped_bytes=max(stage.host_mapped_bytes for stage in stages),
        device_bytes=max(stage.device_bytes or 0 for stage in stages) if worker.on_device else None,
        device_memory_bytes=worker.device_memory_bytes,
        wave=worker.wave,
        stages=tuple(stages),
        scratch_bytes=max(stage.scratch_bytes for stage in stages),
        kept_bytes=sum(cost.kept_bytes for _, cost in costs),
    )


def _costs(case: Case, setting: Setting, worker: PlannedWorker) -> Iterator[tuple[str, Cost]]:
    """Yield what a worker does, in the order in which its session does it."""
    yield START, Cost()
    loaded = False
    for spec in run_order(case.stages, sees_others=worker.sees_others):
        if case.needs_model and not loaded and spec.model.name != "UNUSED":
            loaded = True
            yield "load base", load_base(setting)
            if standard.BASE in case.stages:
                yield standard.BASE, cost_of(standard.BASE, setting)
            if case.adapter is not None:
                yield "load adapter", load_adapter(setting)
                yield "base, after the adapter", after_adapter(setting)
        if spec.stage == standard.BASE or (spec.needs_adapter and case.adapter is None):
            continue
        yield spec.stage, cost_of(spec.stage, setting)


def _stages(
    costs: Iterable[tuple[str, Cost]], setting: Setting, worker: PlannedWorker, *, offloads: bool
) -> Iterator[StageEstimate]:
    """Yield each stage with what the worker holds beside it."""
    shape, on_device = setting.shape, setting.on_device
    private = ACCELERATOR_PROCESS_BYTES if on_device and not worker.simulated else PROCESS_BYTES
    mapped, device = LIBRARY_BYTES, 0
    for name, cost in costs:
        if name == "load base" and on_device:
            device += shape.largest_elements * shape.width if offloads else shape.loaded_bytes  # one layer at a time
        if name == "load base" and (not on_device or offloads):
            private += shape.converted_bytes
        own, window = cost.host_bytes, cost.window_bytes
        if on_device and setting.makes_reference and name in (standard.FORWARD, standard.GRADIENT):
            # without a CPU among the devices, this worker loads the model on the host too
            own += shape.converted_bytes + shape.adapter_bytes
            window += shape.mapped_bytes
        of_device = device + cost.device_bytes if on_device else None
        yield StageEstimate(
            stage=name,
            host_private_bytes=(
                private
                + own
                + (of_device or 0) * worker.takes_from_host
                + cost.scratch_bytes * worker.scratch_in_memory
            ),
            host_mapped_bytes=mapped + window,
            device_bytes=of_device,
            scratch_bytes=cost.scratch_bytes,
            passes=passes_of(Stage(name), setting),
        )
        if name == "load base" and (not on_device or offloads):
            mapped += shape.mapped_bytes  # a page is there once it is read
        if name == "load adapter" and on_device:
            device += shape.adapter_bytes
        elif name == "load adapter":
            private += shape.adapter_bytes
        if name == standard.FORWARD and shape.merges_whole and not on_device:
            # the whole model is merged in place: a mapped page that is written becomes the worker's own
            rewritten = min(shape.mapped_bytes, sum(layer.elements for layer in shape.layers) * shape.width)
            mapped -= rewritten
            private += rewritten


def together(workers: Sequence[WorkerEstimate]) -> tuple[int, int]:
    """Return private and mapped memory of workers side by side; the files of a base are mapped once for all."""
    return sum(w.host_private_bytes for w in workers), max((w.host_mapped_bytes for w in workers), default=0)
