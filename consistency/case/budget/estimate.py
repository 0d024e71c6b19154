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

_LOAD_BASE, _LOAD_ADAPTER = "load base", "load adapter"

WEIGHT_OF_THE_START = 4.0
"""Nominal weight of importing the libraries, in the unit of a stage's `weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """A worker whose memory is to be estimated."""

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
    """Bytes of files in the scratch folder that the stage removes."""
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
    """Bytes of files in the scratch folder that stay for the other workers of the case."""

    def shares(self, case: Case) -> list[tuple[str, float]]:
        """Return each stage with its part of the worker's time, from 0 to 1, by nominal weights: for the progress."""
        steps = final_steps(case)
        weights = []
        for estimate in self.stages:
            step = steps.get(estimate.stage)
            weights.append(_weight(estimate) if step is None else step.seconds(case))
        return [(estimate.stage, weight / sum(weights)) for estimate, weight in zip(self.stages, weights, strict=True)]


def final_steps(case: Case) -> dict[str, FinalStep]:
    """Return the steps of a worker after its stages that a case asks for, by name."""
    steps: Iterable[FinalStep] = plugins.asked("final_steps", case)
    return {step.name: step for step in steps}


def _weight(estimate: StageEstimate) -> float:
    """Return the nominal weight of a stage, or of a step of loading."""
    if estimate.stage == START:
        return WEIGHT_OF_THE_START
    return weight_of(Stage(estimate.stage), estimate.passes)


def estimate_worker(case: Case, shape: Shape, worker: PlannedWorker, *, offloads: bool = False) -> WorkerEstimate:
    """Estimate one worker; with `offloads`, the base stays on the host and is streamed through the device."""
    setting = Setting(shape=shape, case=case, on_device=worker.on_device, makes_reference=worker.makes_reference)
    costs = list(_costs(case, setting, worker))
    stages = list(_estimate_stages(costs, setting, worker, offloads=offloads))
    for step in final_steps(case).values():
        step_estimate: StageEstimate | None = pkgutil.resolve_name(step.estimate)(stages, case, worker)
        if step_estimate is not None:
            stages.append(step_estimate)
    return WorkerEstimate(
        worker=worker.label,
        makes_reference=worker.makes_reference,
        placement=_placement(worker, offloads=offloads),
        host_private_bytes=max(stage.host_private_bytes for stage in stages),
        host_mapped_bytes=max(stage.host_mapped_bytes for stage in stages),
        device_bytes=max(stage.device_bytes or 0 for stage in stages) if worker.on_device else None,
        device_memory_bytes=worker.device_memory_bytes,
        wave=worker.wave,
        stages=tuple(stages),
        scratch_bytes=max(stage.scratch_bytes for stage in stages),
        kept_bytes=sum(cost.kept_bytes for _, cost in costs),
    )


def _placement(worker: PlannedWorker, *, offloads: bool) -> str:
    if not worker.on_device:
        return "host"
    return "offload" if offloads else "device"


def _costs(case: Case, setting: Setting, worker: PlannedWorker) -> Iterator[tuple[str, Cost]]:
    """Yield each step and stage of a worker with its cost, in the order in which its session makes them."""
    yield START, Cost()
    is_loaded = False
    for spec in run_order(case.stages, sees_others=worker.sees_others):
        # The first stage that needs the model has it loaded; stages of the machine may run before.
        if case.needs_model and not is_loaded and spec.model.name != "UNUSED":
            is_loaded = True
            yield from _loading_costs(case, setting)
        # the stage `base` is a part of loading, and was yielded there
        if spec.stage == standard.BASE or (spec.needs_adapter and case.adapter is None):
            continue
        yield spec.stage, cost_of(spec.stage, setting)


def _loading_costs(case: Case, setting: Setting) -> Iterator[tuple[str, Cost]]:
    """Yield the steps of loading base and adapter; the stage `base` runs between them."""
    yield _LOAD_BASE, load_base(setting)
    if standard.BASE in case.stages:
        yield standard.BASE, cost_of(standard.BASE, setting)
    if case.adapter is not None:
        yield _LOAD_ADAPTER, load_adapter(setting)
        yield "base, after the adapter", after_adapter(setting)


@dataclass(slots=True, kw_only=True)
class _HeldBytes:
    """The memory that a worker holds between two stages; it changes where something is loaded."""

    private: int
    mapped: int
    device: int


def _estimate_stages(
    costs: Iterable[tuple[str, Cost]], setting: Setting, worker: PlannedWorker, *, offloads: bool
) -> Iterator[StageEstimate]:
    """Yield the estimate of each stage: its cost, and the memory that the worker holds beside it."""
    shape, on_device = setting.shape, setting.on_device
    has_driver = on_device and not worker.simulated
    held = _HeldBytes(
        private=ACCELERATOR_PROCESS_BYTES if has_driver else PROCESS_BYTES, mapped=LIBRARY_BYTES, device=0
    )
    for name, cost in costs:
        if name == _LOAD_BASE:
            _hold_base(held, shape, on_device=on_device, offloads=offloads)
        yield _estimate_stage(name, cost, held, setting, worker)
        if name == _LOAD_BASE and (not on_device or offloads):
            held.mapped += shape.mapped_bytes  # a page is there once it is read
        if name == _LOAD_ADAPTER:
            if on_device:
                held.device += shape.adapter_bytes
            else:
                held.private += shape.adapter_bytes
        if name == standard.FORWARD and shape.merges_whole and not on_device:
            # the whole model is merged in place: a mapped page that is written becomes the worker's own
            rewritten = min(shape.mapped_bytes, sum(layer.elements for layer in shape.layers) * shape.width)
            held.mapped -= rewritten
            held.private += rewritten


def _hold_base(held: _HeldBytes, shape: Shape, *, on_device: bool, offloads: bool) -> None:
    """Add the base to the memory that a worker holds; pages of its files are added once they were read."""
    if on_device and offloads:
        held.device += shape.largest_elements * shape.width  # one layer at a time
    elif on_device:
        held.device += shape.loaded_bytes
    if not on_device or offloads:
        held.private += shape.converted_bytes


def _estimate_stage(name: str, cost: Cost, held: _HeldBytes, setting: Setting, worker: PlannedWorker) -> StageEstimate:
    """Return the estimate of one stage: its cost on top of the memory that the worker holds."""
    shape, on_device = setting.shape, setting.on_device
    host_bytes, window_bytes = cost.host_bytes, cost.window_bytes
    if on_device and setting.makes_reference and name in (standard.FORWARD, standard.GRADIENT):
        # without a CPU among the devices, this worker loads the model on the host too
        host_bytes += shape.converted_bytes + shape.adapter_bytes
        window_bytes += shape.mapped_bytes
    device_bytes = held.device + cost.device_bytes if on_device else None
    private_bytes = held.private + host_bytes
    if worker.takes_from_host:
        private_bytes += device_bytes or 0
    if worker.scratch_in_memory:
        private_bytes += cost.scratch_bytes
    return StageEstimate(
        stage=name,
        host_private_bytes=private_bytes,
        host_mapped_bytes=held.mapped + window_bytes,
        device_bytes=device_bytes,
        scratch_bytes=cost.scratch_bytes,
        passes=passes_of(Stage(name), setting),
    )


def together(workers: Sequence[WorkerEstimate]) -> tuple[int, int]:
    """Return private and mapped bytes of workers side by side; the files of a base are mapped once for all."""
    private_bytes = sum(worker.host_private_bytes for worker in workers)
    return private_bytes, max((worker.host_mapped_bytes for worker in workers), default=0)
