"""Whether a build of torch has kernels for a device, by the list of architectures that it was built for. No torch here.

NVIDIA: a binary (`sm_86`) runs on devices of its major version and at least its minor one, PTX (`compute_86`) on every
later device; with `a` at its end on that very one alone, with `f` on its family (CUDA C++ Programming Guide, "Binary
Compatibility", "PTX Compatibility", "Family-Specific Features"). AMD: a binary runs on its own architecture, one for
`gfx11-generic` on all whose names begin so (LLVM, "User Guide for AMDGPU Backend", "Generic processor versioning").
"""

from __future__ import annotations

import re
from collections.abc import Iterable

KERNELS = "kernels"
"""The probe's argument for this list."""

_RENAMED = {(10, 1): (11, 0)}
"""Thor reports 11.0 from CUDA 13 on, and runs what was built for it as 10.1 (torch's own `DEVICE_REQUIREMENT`)."""

_ENTRY = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<only>[af]?)")


def missing_kernels(capability: str | None, built_for: Iterable[str]) -> str | None:
    """Return one sentence where none of the architectures runs on a device; None where one does, or it is not known.

    Parameters
    ----------
    capability : str or None
        As in `DeviceIdentity`: `8.6`, `gfx942:sramecc+:xnack-`.
    built_for : iterable of str
        As `torch.cuda.get_arch_list` has them.
    """
    entries = list(built_for)
    if capability is None or not entries:
        return None
    if capability.startswith("gfx"):
        name = capability.partition(":")[0]
        runs = any(_runs_on_amd(entry, name) for entry in entries)
    elif re.fullmatch(r"\d+\.\d", capability):
        major, minor = map(int, capability.split("."))
        name = f"sm_{major}{minor}"
        if not all(map(_ENTRY.fullmatch, entries)):
            return None  # a name of a later CUDA: what it runs on is not known
        runs = any(_runs_on_nvidia(entry, major, minor) for entry in entries)
    else:
        return None
    if runs:
        return None
    return f"this torch has kernels for {', '.join(entries)}, the device is {name}: install a build with {name}"


def _runs_on_nvidia(entry: str, major: int, minor: int) -> bool:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        return False
    built, device = (int(found["major"]), int(found["minor"])), (major, minor)
    built = device if _RENAMED.get(built) == device else built
    if found["only"] == "a":
        return built == device
    if found["kind"] == "compute" and not found["only"]:
        return built <= device
    return built[0] == major and built[1] <= minor


def _runs_on_amd(entry: str, name: str) -> bool:
    built, _, generic = entry.partition(":")[0].partition("-generic")
    is_generic = entry.partition(":")[0].endswith("-generic")
    # gfx9-generic is Vega alone, whose names begin with gfx90
    prefix = {"gfx9": "gfx90"}.get(built, built.replace("-", ""))
    return not generic and (name.startswith(prefix) if is_generic else name == built)
