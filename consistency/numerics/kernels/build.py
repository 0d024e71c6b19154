"""Compile the kernel: when the package is built (`hatch_build.py` loads this file alone), or by hand in a working tree.

python -m consistency.numerics.kernels.build
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    # see kernel.c: the same bits from every variant, and vectorised loops
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-Wno-psabi",  # about passing vectors to functions: none is passed, all are inlined
)


def compile_kernel(source: Path, target: Path, *flags: str) -> str | None:
    """Compile the kernel; return the reason if that is not possible.

    `CFLAGS` are ignored: flags that suit other programs (`-ffast-math`) break this one.
    """
    if os.environ.get("CONSISTENCY_NO_KERNEL"):
        return "CONSISTENCY_NO_KERNEL is set"
    if sys.platform not in ("linux", "darwin"):
        return f"{sys.platform} is not supported"
    chosen_compiler = os.environ.get("CC")
    if chosen_compiler:
        compiler = chosen_compiler.split()
    else:
        compiler = [next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")]
    checksum = f"-DSOURCE={zlib.crc32(source.read_bytes())}u"
    command = [*compiler, *FLAGS, checksum, *flags, str(source), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode:
        error_lines = (line for line in done.stderr.splitlines() if "error" in line)
        return next(error_lines, f"{compiler[0]} failed")
    return None if target.exists() else f"{compiler[0]} produced no library"


if __name__ == "__main__":
    folder = Path(__file__).parent
    sys.exit(compile_kernel(folder / "kernel.c", folder / "_kernel.so"))
