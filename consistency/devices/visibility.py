"""The variables that confine a process to one device, or hide all devices of a type from it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from consistency.devices.backends import backend_of
from consistency.devices.discovery import is_rocm


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """How a type of device is hidden from a process."""

    variable: str
    """The variable that lists the devices which a process may see."""
    others: tuple[str, ...] = ()
    """Further variables that mean the same where `variable` is empty."""
    hides_all: str | None
    """The list that shows no device; None where there is none."""
    is_ordered: bool = True
    """Whether the list numbers the devices in its own order. If not, it only selects from them."""

    def alone(self, index: int) -> str:
        """Return the list that shows one device, by its place among the devices that the user shows."""
        masks = [os.environ.get(name, "") for name in (self.variable, *self.others)]
        entries = _entries(next(filter(None, masks), ""))
        if not self.is_ordered:
            entries = _in_order(entries)
        return entries[index] if index < len(entries) else str(index)

    def applied(self, shown: str) -> dict[str, str | None]:
        """Return the changes to an environment that set the list; None removes a variable."""
        return {**dict.fromkeys(self.others), self.variable: shown}


ROCM = Visibility(variable="HIP_VISIBLE_DEVICES", others=("CUDA_VISIBLE_DEVICES",), hides_all="-1")
"""HIP reads the second variable where the first is empty, and shows every device where both are; an index that it does
not have ends the list (`Device::init` of ROCm's clr). `ROCR_VISIBLE_DEVICES` stays as it is: it selects before both."""


def visibility_of(kind: str) -> Visibility | None:
    """Return how devices of a type are hidden by the installed torch; None where they cannot be."""
    backend = backend_of(kind)
    if backend.visibility is None:
        return None
    if "hip" in backend.builds and is_rocm():
        return ROCM
    return Visibility(
        variable=backend.visibility,
        hides_all="" if backend.empty_hides_all else None,
        is_ordered=backend.mask_is_ordered,
    )


def _entries(mask: str) -> list[str]:
    """Return the entries of a list with commas."""
    return [entry.strip() for entry in mask.split(",") if entry.strip()]


def _in_order(entries: list[str]) -> list[str]:
    """Sort entries as the devices are numbered, with the tiles of one device, `0.0` and `0.1`, together."""
    is_numbered = all(number.isdigit() for entry in entries for number in entry.split("."))
    if not is_numbered:
        return entries
    by_device: dict[int, list[str]] = {}
    for entry in sorted(dict.fromkeys(entries), key=lambda entry: [int(number) for number in entry.split(".")]):
        by_device.setdefault(int(entry.split(".")[0]), []).append(entry)
    return [",".join(tiles) for tiles in by_device.values()]
