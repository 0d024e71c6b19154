"""How much memory of the host there is to share out, and which folders take memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from consistency.devices.host.pci import read_text

_IN_MEMORY = ("tmpfs", "ramfs")
_OCTAL = re.compile(r"\\([0-7]{3})")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process and its children can use without swapping; None where that is not reported.

    That is what the kernel counts as available, or less where a control group leaves less: a container's limit is in
    no field of `/proc/meminfo`.

    Parameters
    ----------
    root : Path
        Folder that holds `proc` and `sys`.
    """
    lines = (read_text(root / "proc/meminfo") or "").splitlines()
    kernel = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*kernel, *_left_in_groups(root)], default=None)


def is_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Report whether files of a folder take memory instead of room on a disk; False where the host does not tell."""
    longest_mount, file_system = "", ""
    path = folder.resolve()
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        # the kernel writes a space, a tab, a line feed and a backslash of a path as octal digits
        mount = _OCTAL.sub(lambda match: chr(int(match[1], 8)), before.split(" ")[4])
        # of two mounts at one place the later one covers the other
        if path.is_relative_to(mount) and len(mount) >= len(longest_mount):
            longest_mount, file_system = mount, after.split(" ")[0]
    return file_system in _IN_MEMORY


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group above this process leaves: its limit counts all processes below it."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # version 1
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # inside a container the group is mounted as the root, so its path from outside may not exist
        inner = mount.joinpath(*Path(path).parts[1:])
        for folder in (inner, *inner.parents):
            limit_text, used_text = read_text(folder / limit) or "", read_text(folder / used) or ""
            is_limited = limit_text.isdigit()  # else it is `max`, or not there
            if is_limited and used_text.isdigit():
                yield max(0, int(limit_text) - int(used_text) + _reclaimable_bytes(folder))
            if folder == mount:
                break


def _reclaimable_bytes(group: Path) -> int:
    """Return the bytes of a control group that hold files: they can be reclaimed, and do not count as used.

    They are `inactive_file`, as the kernel's own documentation of `memory.stat` has it.
    """
    rows = [row.split() for row in (read_text(group / "memory.stat") or "").splitlines()]
    return sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "total_inactive_file"))
