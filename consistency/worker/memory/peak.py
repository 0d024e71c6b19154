"""Peak allocation of an action, counted by the allocator itself, and so the same every time.

Resident size is too coarse: a layer's weight may be smaller than what the C library keeps for reuse. On an accelerator
the backend's allocator counts; the CPU's has no counters, but reports every allocation and release to torch's profiler.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.profiler import profile, record_function

from consistency.worker.memory.placement import Allocator, Figures

Mark = Callable[[], None]
"""Called by an action at the point that splits its peak in two."""

Action = Callable[[Mark], None]

_MARK = "consistency: mark"
_ALLOCATION = "[memory]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes allocated on top of those before an action: the peaks before and after its mark, and those at its end.

    Attributes
    ----------
    kept : int
        Bytes that are still allocated at the end; negative where the action freed more than it allocated.
    """

    before_mark: int
    after_mark: int
    kept: int

    @property
    def whole(self) -> int:
        return max(self.before_mark, self.after_mark)


class PeakMeter(Protocol):
    """A way to count what an action allocates."""

    def measure(self, action: Action) -> Peaks: ...


class ProfilerMeter:
    """Measure an action on the CPU: the running sum over the allocations and releases in torch's profile."""

    def measure(self, action: Action) -> Peaks:
        def mark() -> None:
            with record_function(_MARK):
                pass

        with _no_collection(), profile(profile_memory=True) as profiled:
            action(mark)
        assert profiled.kineto_results is not None
        allocated, is_marked = 0, False
        peaks = {False: 0, True: 0}  # before the mark, and after it
        for event in sorted(profiled.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == _MARK:
                is_marked = True
                peaks[True] = max(peaks[True], allocated)
            elif event.name() == _ALLOCATION:
                allocated += event.nbytes()
                peaks[is_marked] = max(peaks[is_marked], allocated)
        return Peaks(before_mark=peaks[False], after_mark=peaks[True], kept=allocated)


class AllocatorMeter:
    """Measure an action on an accelerator: the counters of its allocator, reset at the beginning and at the mark.

    Parameters
    ----------
    before_reset : callable
        Called before the peak, which others read too, is reset.
    """

    def __init__(self, device: torch.device, before_reset: Callable[[], None]) -> None:
        self._device = device
        self._before_reset = before_reset
        self._allocator = Allocator(device.type)

    def measure(self, action: Action) -> Peaks:
        before = self._figures().allocated or 0
        peaks = []

        def reset() -> None:
            self._before_reset()
            self._allocator.reset_peak(self._device)

        def mark() -> None:
            peaks.append((self._figures().peak_allocated or 0) - before)
            reset()

        with _no_collection():
            reset()
            action(mark)
            last = self._figures()
        peaks.append((last.peak_allocated or 0) - before)
        return Peaks(before_mark=peaks[0], after_mark=max(peaks[1:], default=0), kept=(last.allocated or 0) - before)

    def _figures(self) -> Figures:
        return self._allocator.requested(self._device)


def meter_of(device: torch.device, *, before_reset: Callable[[], None]) -> PeakMeter | None:
    """Return the meter of a device; None where its backend counts no peaks."""
    if device.type == "cpu":
        return ProfilerMeter()
    return AllocatorMeter(device, before_reset) if Allocator(device.type).counts_peaks else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Release no earlier garbage during an action."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
