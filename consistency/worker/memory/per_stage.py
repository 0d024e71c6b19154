"""Measure the host and device memory, and the time, that each stage takes."""

from __future__ import annotations

import time

import torch

from consistency.capture.records import StageMemory
from consistency.worker.memory.host_memory import peak_bytes, private_bytes, reset_peak, resident_bytes
from consistency.worker.memory.placement import Allocator, Figures


class StageMemoryLog:
    """Reset the high-water marks when a stage begins, and read them when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocator = None if device.type == "cpu" else Allocator(device.type)
        self._whole_peak = peak_bytes()
        self._host_peak = self._device_peak = 0
        self._began_s, self._processor_s = time.monotonic(), time.process_time()

    @property
    def peak_bytes(self) -> int:
        """Largest resident size of the process so far."""
        self._whole_peak = max(self._whole_peak, peak_bytes())
        return self._whole_peak

    def begin(self) -> None:
        """Begin a stage: reset the marks, after noting them for the process as a whole."""
        self.keep()
        reset_peak()
        self._host_peak = self._device_peak = 0
        if self._allocator is not None:
            self._allocator.reset_peak(self._device)
        self._began_s, self._processor_s = time.monotonic(), time.process_time()

    def keep(self) -> None:
        """Note the marks; to be called before one is reset within a stage."""
        self._host_peak = max(self._host_peak, peak_bytes())
        self._whole_peak = max(self._whole_peak, self._host_peak)
        if self._allocator is not None:
            self._device_peak = max(self._device_peak, self._allocator.figures(self._device).peak_allocated or 0)

    def end(self, stage: str) -> StageMemory:
        """Return the memory and time that a stage has taken."""
        elapsed_s, processor_s = time.monotonic() - self._began_s, time.process_time() - self._processor_s
        self.keep()
        resident = resident_bytes()
        device = Figures() if self._allocator is None else self._allocator.figures(self._device)
        return StageMemory(
            stage=stage,
            host_resident_bytes=resident,
            host_peak_bytes=max(resident, self._host_peak),
            device_resident_bytes=device.allocated,
            device_peak_bytes=None if device.peak_allocated is None else self._device_peak,
            host_private_bytes=private_bytes(),
            elapsed_s=elapsed_s,
            processor_s=processor_s,
        )
