"""The one place through which every copy between two devices goes, and the faults that a test plants in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import NAME, _native
from .settings import CopyFault, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy that was asked for, and what was done to it.

    Attributes
    ----------
    fault : str or None
        None where it was made as asked for.
    """

    source: str
    target: str
    size: int
    under_load: bool
    fault: str | None


log: list[Copy] = []
"""Every copy between devices that this process has asked for since `clear`."""

_faults: list[CopyFault] = []
_late: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []
_visible: tuple[int, ...] = ()


def install(settings: Settings) -> None:
    """Take every copy of this process."""
    global _visible
    _visible = settings.visible
    _faults.extend(settings.copies)
    _native.set_carrier(_carry, _deliver)


def plant(fault: CopyFault) -> None:
    """Add a fault, after those that are there."""
    _faults.append(fault)


def clear() -> None:
    """Forget faults, delayed copies and the log."""
    _faults.clear()
    _late.clear()
    log.clear()


def _deliver(index: int) -> None:
    """Make the delayed copies of a device."""
    here = _name(index)
    due = [entry for entry in _late if here in entry[:2]]
    _late[:] = [entry for entry in _late if here not in entry[:2]]
    for _, _, source, target in due:
        target.copy_(source)


def _carry(source: torch.Tensor, target: torch.Tensor, start: int, end: int, under_load: bool) -> None:
    """Copy `source` to `target`, which are views of both devices' memory from the host.

    `start` and `end` are devices as this process numbers them, -1 the host.
    """
    names, size = (_name(start), _name(end)), target.numel() * target.element_size()
    fault = next((f.does for f in _faults if f.hits(*names, size, under_load=under_load)), None)
    log.append(Copy(source=names[0], target=names[1], size=size, under_load=under_load, fault=fault))
    if fault is None:
        target.copy_(source)
    elif fault == "zero":
        target.zero_()
    elif fault == "corrupt":
        wrong = source.to(target.dtype).clone(memory_format=torch.contiguous_format)
        raw = wrong.reshape(-1).view(torch.uint8)
        if raw.numel():
            raw[raw.numel() // 2] ^= 1
        target.copy_(wrong)
    elif fault == "delay":
        _late.append((*names, source.clone(), target))


def _name(index: int) -> str:
    return "cpu" if index < 0 else f"{NAME}:{_visible[index]}"
