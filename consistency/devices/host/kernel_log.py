"""Lines of the kernel's log that concern a GPU or the bus between devices."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

WORTH = re.compile(
    r"NVRM: Xid|IO_PAGE_FAULT|DMAR: .*\bfault\b|PCIe Bus Error|AER: .*\berror\b|\bGPU has fallen off the bus\b"
    r"|amdgpu.*(?:page fault|ring \S+ timeout|GPU reset begin|uncorrectable|device lost from bus)"
    r"|(?:i915|xe) .*(?:GPU HANG|Timedout job|Engine reset|wedged)",
    re.IGNORECASE,
)
"""The lines that are kept.

Xid is what NVIDIA's driver calls an error; then come the words of AMD's and Intel's IOMMU and of the bus, of AMD's
driver (amdgpu) and of Intel's (i915, xe)."""

LOGGED = "Xid, page faults or bus errors"
"""The subject of such lines, for messages."""

MOST_LINES = 50
"""Lines that are kept at most: the last ones."""

_TIMEOUT_S = 0.25  # of journalctl, whose journal may be large and on a slow disk: reading the host takes half a second
_RECORD = 8192  # the largest that /dev/kmsg gives at once (Linux, CONSOLE_EXT_LOG_MAX)

Run = Callable[[Sequence[str]], str | None]


def read_log(root: Path, run: Run | None = None) -> tuple[tuple[str, ...], str | None]:
    """Return the last lines worth reading since boot, and None; or no lines, and why the log cannot be read."""
    text = _read_kmsg(root / "dev/kmsg")
    if text is None:
        text = (run or _run)(["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=short-monotonic"])
    if text is None:
        return (), "the kernel's log is not readable without root"
    return tuple(line.strip() for line in text.splitlines() if _is_worth_reading(line))[-MOST_LINES:], None


@functools.lru_cache(maxsize=1 << 12)
def _is_worth_reading(line: str) -> bool:
    """Report whether a line concerns a GPU or the bus.

    Answers are kept, because the same log is read before and after every case of a suite.
    """
    return WORTH.search(line) is not None


def _read_kmsg(path: Path) -> str | None:
    """Read the kernel's ring buffer, one record per read, until it has no more; None where nothing can be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while True:
            try:
                record = os.read(file, _RECORD)
            except BrokenPipeError:  # overwritten while it was read: the next one is there
                continue
            except OSError:  # nothing more for now; or nothing for us at all
                break
            if not record:
                break
            lines += (_as_dmesg(text) for text in record.decode("utf-8", errors="replace").splitlines())
    finally:
        os.close(file)
    return "\n".join(lines) if lines else None


def _as_dmesg(record: str) -> str:
    """Write `6,339,5140900,-;text` as `[5.140900] text`, as dmesg does; the time distinguishes two equal lines."""
    prefix, separator, text = record.partition(";")
    fields = prefix.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdigit():
        return record
    return f"[{int(fields[2]) / 1e6:.6f}] {text}"


def _run(command: Sequence[str]) -> str | None:
    """Return what a command writes; None where it is absent, fails, takes too long or writes nothing."""
    try:
        process = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    # without the right to read it journalctl ends with 0 and writes nothing; a kernel always wrote something
    text = process.stdout.decode("utf-8", errors="replace")
    return text if process.returncode == 0 and text.strip() else None
