"""How much memory there is to share out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from consistency.devices.host.pci import read_text

_IN_MEMORY = ("tmpfs", "ramfs")
_OCTAL = re.compile(r"\\([0-7]{3})")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process and its children can use without swapping; None where the host does not report it.

    That is what the kernel counts as available, or less where a control group leaves less: a container's limit is in
    no field of `/proc/meminfo`.

    Parameters
    ----------
    root : Path
        Folder that holds `proc` and `sys`.
    """
    lines = (read_text(root / "proc/meminfo") or "").splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_left_in_groups(root)], default=None)


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Report whether files of a folder take memory instead of room on a disk; False where the host does not tell."""
    found = ("", "")
    place = folder.resolve()
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        # the kernel writes a space, a tab, a line feed and a backslash of a path as octal digits
        mount = _OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split(" ")[4])
        if place.is_relative_to(mount) and len(mount) >= len(found[0]):  # of two at one place the later one covers
            found = (mount, after.split(" ")[0])
    return found[1] in _IN_MEMORY


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what the control groups above this process leave: the limit of each counts all below it.

    Memory that holds files can be reclaimed, and is not counted as used (`inactive_file`, as the kernel's own
    documentation of `memory.stat` has it).
    """
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # inside a container the group is mounted as the root, so its path from outside may not exist
        inner = mount.joinpath(*Path(path).parts[1:])
        for folder in (inner, *inner.parents):
            most, now = read_text(folder / limit), read_text(folder / used)
            if most is not None and most.isdigit() and now is not None and now.isdigit():
                files = [row.split() for row in (read_text(folder / "memory.stat") or "").splitlines()]
                reclaimable = sum(int(row[1]) for row in files if row[0] in ("inactive_file", "total_inactive_file"))
                yield max(0, int(most) - int(now) + reclaimable)
            if folder == mount:
                break
