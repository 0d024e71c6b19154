"""Find unexpected device use: which other devices this process touches, in which step, by which call.

No query here creates a context. Allocators are read only where the backend is in use, and the existence of a context
comes from the driver, or from NVML by the device's UUID; the free memory of another device is never queried, because
that query alone opens it.

Bytes on another device need not be a fault. Without `torch_device`, `PeftModel.from_pretrained` reads the adapter's
file onto device 0 and copies it from there to the base's device; that is the default, on healthy machines too. So bytes
that pass through and are released are `within` a limit (word `touched`, with a warning that explains how to avoid it);
bytes that stay, or exceed an adapter that passes through, are `outside`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from consistency.capture.wording import listed
from consistency.case.stages import stages_of
from consistency.devices.backends import backend_of
from consistency.numerics.dispatch_mode import DispatchMode

_LIBRARIES = ("peft", "safetensors", "transformers", "accelerate")
"""Libraries whose frames are shown of a call."""

_MOST_FRAMES = 3

ON_PURPOSE = stages_of(lambda spec: spec.opens_devices)
"""Stages that check other devices: the memory that they take there is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """An allocator's counters of one device, in bytes; None where the backend has no such counter."""

    allocated: int | None = None
    peak_allocated: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None


class Allocator:
    """The allocator of an accelerator's backend, by the functions that torch's own backends have in common."""

    def __init__(self, kind: str) -> None:
        self._module: Any = torch.get_device_module(kind)

    @property
    def in_use(self) -> bool:
        """Whether the backend is initialized; before that torch can have touched none of its devices."""
        initialized = getattr(self._module, "is_initialized", None)
        return initialized is None or bool(initialized())

    @property
    def counts_peaks(self) -> bool:
        needed = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
        return all(hasattr(self._module, name) for name in needed)

    def figures(self, device: torch.device) -> Figures:
        return Figures(
            allocated=self._count("memory_allocated", device),
            peak_allocated=self._count("max_memory_allocated", device),
            reserved=self._count("memory_reserved", device),
            peak_reserved=self._count("max_memory_reserved", device),
        )

    def requested(self, device: torch.device) -> Figures:
        """Return the bytes that tensors asked for where they are counted; else `figures`, whose blocks may be larger.

        CUDA's allocator leaves up to 1 MiB more in a block of its large pool rather than split it
        (`should_split`, c10/cuda/CUDACachingAllocator.cpp).
        """
        figures = self.figures(device)
        if not self.in_use or not hasattr(self._module, "memory_stats"):
            return figures
        stats = self._module.memory_stats(device)
        current, peak = stats.get("requested_bytes.all.current"), stats.get("requested_bytes.all.peak")
        counts_nothing = not current and bool(figures.allocated)  # `cudaMallocAsync` has the name, and counts nothing
        if peak is None or counts_nothing:
            return figures
        return Figures(allocated=current, peak_allocated=peak)

    def reset_peak(self, device: torch.device) -> None:
        if self.counts_peaks and self.in_use:
            self._module.reset_peak_memory_stats(device)

    def _count(self, name: str, device: torch.device) -> int | None:
        if not self.in_use:
            return 0
        count = getattr(self._module, name, None)
        return None if count is None else int(count(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSeen:
    """Whether this process has a context on a device.

    Attributes
    ----------
    exists : bool or None
        None where that is unknown, for the `reason`.
    seen_by : str
        The source of this knowledge.
    used_bytes : int or None
        Memory of the process on the device by NVML, including the context, which torch's counters leave out.
    """

    exists: bool | None
    seen_by: str = ""
    used_bytes: int | None = None
    reason: str | None = None


class Contexts:
    """Contexts of this process, by the CUDA driver and by NVML.

    NVML lists processes by the PIDs of its own side of a container, which may belong to other processes here. So it is
    trusted only where it lists this process on `own`, the device that it certainly uses.
    """

    def __init__(self, own: torch.device) -> None:
        self._own = own

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Hold NVML open while several devices are looked at: opening it takes milliseconds each time.

        NVML counts its users, so that `listed_by_nvml` opens and closes no more than a count meanwhile.
        """
        with ExitStack() as stack:
            if backend_of(self._own.type).shows_contexts and torch.cuda.is_initialized():
                with suppress(ImportError):
                    import pynvml

                    with suppress(pynvml.NVMLError):
                        pynvml.nvmlInit()
                        stack.callback(_shut_down, pynvml)
            yield

    def look(self, device: torch.device) -> ContextSeen:
        if not backend_of(device.type).shows_contexts:
            return ContextSeen(exists=None, reason=f"contexts cannot be observed on {device.type}")
        if not torch.cuda.is_initialized():
            return ContextSeen(exists=False, seen_by="torch, which has not initialized CUDA")
        has_primary = _has_primary_context(device)
        uuid, own_uuid = _uuid(device), _uuid(self._own)
        is_listed, used_bytes = None, None
        if uuid and own_uuid:
            is_listed, used_bytes = listed_by_nvml(uuid, own=own_uuid, pid=os.getpid())
        if is_listed is not None:
            return ContextSeen(exists=is_listed or bool(has_primary), seen_by="NVML", used_bytes=used_bytes)
        if has_primary is not None:
            return ContextSeen(exists=has_primary, seen_by="the driver")
        return ContextSeen(exists=None, reason="NVML does not list this process even on its own device")


def _shut_down(nvml: Any) -> None:
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def listed_by_nvml(uuid: str, *, own: str, pid: int, nvml: ModuleType | None = None) -> tuple[bool | None, int | None]:
    """Ask NVML whether a process is on a device, None where it does not know, and how many bytes it has there.

    `own` is the UUID of a device that the process certainly uses: where NVML does not list it there, its PIDs are not
    ours.
    """
    try:
        import pynvml
    except ImportError:
        return None, None
    api: Any = nvml or pynvml
    try:
        api.nvmlInit()
        try:
            if pid not in _processes(api, own):
                return None, None
            processes = _processes(api, uuid)
            return pid in processes, processes.get(pid)
        finally:
            api.nvmlShutdown()
    except pynvml.NVMLError:
        return None, None


def _processes(nvml: Any, uuid: str) -> Mapping[int, int | None]:
    """Return the bytes on a device of each process that NVML lists there, by PID."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return {process.pid: process.usedGpuMemory for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def _has_primary_context(device: torch.device) -> bool | None:
    """Report whether the CUDA driver has this process's context of a device; None where torch cannot ask."""
    # cuDevicePrimaryCtxGetState, which creates nothing; torch's own test of stray contexts asks by this name
    has_primary_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    try:
        return None if has_primary_context is None else bool(has_primary_context(device.index))
    except RuntimeError:
        return None


def _uuid(device: torch.device) -> str | None:
    """Return the UUID of a device as NVML takes it, None where it has none."""
    if not (backend_of(device.type).shows_contexts and torch.cuda.is_initialized()):
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    if not uuid:
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def other_devices(own: torch.device) -> tuple[torch.device, ...]:
    """Return the visible accelerators other than this process's own."""
    if not torch.accelerator.is_available():
        return ()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ()
    devices = (torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count()))
    return tuple(device for device in devices if device != own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The first operation that made a tensor on a device, and the library calls that led to it, innermost first."""

    operation: str
    frames: tuple[str, ...]


class Placement:
    """Check the devices other than a process's own after every step, and note the first step that touched each."""

    def __init__(self, own: torch.device, *, contexts: Contexts | None = None) -> None:
        self.own = own
        self.others = other_devices(own)
        self.calls: dict[torch.device, Call] = {}
        self._contexts = contexts or Contexts(own)
        self._touches: dict[tuple[torch.device, str], str] = {}
        """The first step that moved a counter, by device and counter."""
        self._before: dict[torch.device, Figures] = {}
        """Counters that are not this case's, or are of stages that use a device on purpose."""
        self._opened: dict[torch.device, str] = {}
        """Why a context on a device says nothing, for devices that were opened on purpose."""

    def look(self, step: str) -> None:
        """Read every counter; a change since the last call happened in this step."""
        with self._contexts.asking() if self.others else nullcontext():
            self._look(step)

    def _look(self, step: str) -> None:
        for device in self.others:
            if step in ON_PURPOSE:
                self._start_again(device, f"the stages {listed(sorted(ON_PURPOSE))} open every device")
                continue
            figures = self.figures(device)
            if figures.peak_allocated:
                self._touches.setdefault((device, "allocated"), step)
            if figures.peak_reserved:
                self._touches.setdefault((device, "reserved"), step)
            if (device, "context") not in self._touches and self.context(device).exists:
                self._touches[device, "context"] = step

    def figures(self, device: torch.device) -> Figures:
        """Return the counters of a device, less what stages that use other devices on purpose have left there."""
        now, before = Allocator(device.type).figures(device), self._before.get(device, Figures())

        def excess(name: str) -> int | None:
            # A peak was reset when `_before` was read, so it has counted from the bytes that were there then.
            count, count_before = getattr(now, name), getattr(before, name.removeprefix("peak_"))
            return None if count is None else max(0, count - (count_before or 0))

        return Figures(**{field.name: excess(field.name) for field in fields(Figures)})

    def context(self, device: torch.device) -> ContextSeen:
        """Return whether there is a context; unknown once it was opened on purpose, unless it was seen before that."""
        if device in self._opened and (device, "context") not in self._touches:
            return ContextSeen(exists=None, reason=self._opened[device])
        return self._contexts.look(device)

    def start_again(self) -> None:
        """Count nothing that an earlier case of this process has left on other devices."""
        for device in self.others:
            is_unopened = self._contexts.look(device).exists is False
            self._start_again(device, "" if is_unopened else "an earlier case of this process may have opened it")

    def _start_again(self, device: torch.device, opened: str) -> None:
        """Count from here on; `opened` says why the device may have a context already, empty if it has none."""
        allocator = Allocator(device.type)
        allocator.reset_peak(device)
        self._before[device] = allocator.figures(device)
        if opened:
            self._opened[device] = opened

    def first_step(self, device: torch.device, counter: str) -> str | None:
        """Return the step in which a counter (`allocated`, `reserved`, `context`) first moved on a device."""
        return self._touches.get((device, counter))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the first call in this thread that makes a tensor on another device."""
        if not self.others:
            yield
            return
        with _FirstCall(frozenset(self.others), self.calls):
            yield


class _FirstCall(DispatchMode):
    """Note the first operation that makes a tensor on each of some devices in `calls`; change no result."""

    def __init__(self, devices: frozenset[torch.device], calls: dict[torch.device, Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = devices
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if len(self._calls) < len(self._devices):
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor) and leaf.device in self._devices - self._calls.keys():
                    frames = library_frames(traceback.extract_stack())
                    self._calls[leaf.device] = Call(operation=str(func), frames=frames)
        return result


def library_frames(stack: Sequence[traceback.FrameSummary]) -> tuple[str, ...]:
    """Return the innermost frames of the libraries that load models: `peft/peft_model.py:540 from_pretrained`."""
    frames = []
    for frame in reversed(stack):
        parts = Path(frame.filename).parts
        # the innermost folder with the name of a library: an outer one may have it by chance
        folders = (index for index in range(len(parts) - 1, -1, -1) if parts[index] in _LIBRARIES)
        start = next(folders, None)
        if start is not None:
            frames.append(f"{'/'.join(parts[start:])}:{frame.lineno} {frame.name}")
    return tuple(frames[:_MOST_FRAMES])
