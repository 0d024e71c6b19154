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
"""The argument by which the probe is asked for this list."""

_RENAMED = {(10, 1): (11, 0)}
"""Thor reports 11.0 from CUDA 13 on, and runs what was built for it as 10.1 (torch's own `DEVICE_REQUIREMENT`)."""

_ENTRY = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<only>[af]?)")


def missing_kernels(capability: str | None, built_for: Iterable[str]) -> str | None:
    """Return one sentence where none of the architectures runs on a device; None where one does, or it is not known.

    Parameters
    ----------
    capability : str or None
        The device's, as in `DeviceIdentity`: `8.6`, `gfx942:sramecc+:xnack-`.
    built_for : iterable of str
        The architectures of the build, as `torch.cuda.get_arch_list` returns them.
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
    """Return whether an entry of the list, such as `sm_86`, runs on a device of this compute capability."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return False
    built, device = (int(match["major"]), int(match["minor"])), (major, minor)
    if _RENAMED.get(built) == device:
        built = device
    if match["only"] == "a":
        return built == device
    if match["kind"] == "compute" and not match["only"]:
        return built <= device
    return built[0] == major and built[1] <= minor


def _runs_on_amd(entry: str, name: str) -> bool:
    """Return whether an entry of the list, `gfx90a` or `gfx11-generic`, runs on the architecture of a name."""
    target = entry.partition(":")[0]
    # a generic target with a version behind it, `gfx9-generic-v1`, is not known here
    built, _, generic_version = target.partition("-generic")
    if generic_version:
        return False
    if not target.endswith("-generic"):
        return name == built
    # gfx9-generic is Vega alone, whose names begin with gfx90
    prefix = {"gfx9": "gfx90"}.get(built, built.replace("-", ""))
    return name.startswith(prefix)
