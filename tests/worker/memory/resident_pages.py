"""What of a mapped file is in memory, by the kernel's own count."""

from __future__ import annotations

from pathlib import Path


def resident(path: Path) -> int:
    """Return how many bytes of a file are mapped into this process and resident."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            inside = len(head) == 6 and head[5] == str(path)
        elif inside and head[0] == "Rss:":
            found += int(head[1]) * 1024
    return found
