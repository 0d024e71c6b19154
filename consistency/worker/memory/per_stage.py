"""Host and device memory that each stage takes."""

from __future__ import annotations

import torch

from consistency.capture.records import StageMemory
from consistency.worker.memory.host_memory import peak_bytes, reset_peak, resident_bytes
from consistency.worker.memory.placement import Allocator


class StageMemoryLog:
    """Reset the high-water marks when a stage begins, and read them when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocator = None if device.type == "cpu" else Allocator(device.type)
        self._whole_peak = peak_bytes()
        self._host_peak = self._device_peak = 0

    @property
    def peak_bytes(self) -> int:
        """Largest resident size of the process so far."""
        self._whole_peak = max(self._whole_peak, peak_bytes())
        return self._whole_peak

    def begin(self) -> None:
        self.keep()
        reset_peak()
        self._host_peak = self._device_peak = 0
        if self._allocator is not None:
            self._allocator.reset_peak(self._device)

    def keep(self) -> None:
        """Note the marks; to be called before one is reset within a stage."""
        self._host_peak = max(self._host_peak, peak_bytes())
        self._whole_peak = max(self._whole_peak, self._host_peak)
        if self._allocator is not None:
            self._device_peak = max(self._device_peak, self._allocator.figures(self._device).peak_allocated or 0)

    def end(self, stage: str) -> StageMemory:
        self.keep()
        resident = resident_bytes()
        device = None if self._allocator is None else self._allocator.figures(self._device)
        return StageMemory(
            stage=stage,
            host_resident_bytes=resident,
            host_peak_bytes=max(resident, self._host_peak),
            device_resident_bytes=None if device is None else device.allocated,
            device_peak_bytes=None if device is None or device.peak_allocated is None else self._device_peak,
        )
