"""Builds of the kernel that run in a process of their own: for another processor, and with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from consistency.numerics.kernels import compiled
from consistency.numerics.kernels.build import compile_kernel
from tests.numerics.kernels.kernel_process import KernelProcess, kernel_of

_CALLER = Path(__file__).with_name("kernel_process.c")
_ARM_LIBRARIES = "/usr/aarch64-linux-gnu"
"""Where Debian's libc6-arm64-cross has the C library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How a kernel is compiled and run; `threads` make each call at once. `mark` is the mark of its tests."""

    mark: str
    compiler: tuple[str, ...]
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()
    threads: int = 1

    @property
    def missing(self) -> str | None:
        """What this machine lacks for it."""
        absent = [name for name in (self.compiler[0], *self.runner[:1]) if shutil.which(name) is None]
        if self.runner and not Path(_ARM_LIBRARIES, "lib").exists():
            absent.append(_ARM_LIBRARIES)
        return f"not here: {', '.join(absent)}" if absent else None


def _sanitized(compiler: str, *names: str, threads: int = 1) -> Build:
    flags = (f"-fsanitize={','.join(names)}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
    return Build(mark="sanitizers", compiler=(compiler,), flags=flags, threads=threads)


_EMULATOR = ("qemu-aarch64", "-L", _ARM_LIBRARIES)

BUILDS = {
    "aarch64-gcc": Build(mark="aarch64", compiler=("aarch64-linux-gnu-gcc",), runner=_EMULATOR),
    "aarch64-clang": Build(mark="aarch64", compiler=("clang", "--target=aarch64-linux-gnu"), runner=_EMULATOR),
    "address-gcc": _sanitized("gcc", "address", "undefined"),
    "address-clang": _sanitized("clang", "address", "undefined"),
    "memory-clang": _sanitized("clang", "memory"),
    "thread-gcc": _sanitized("gcc", "thread", threads=3),
    "thread-clang": _sanitized("clang", "thread", threads=3),
}

_OPTIONS = {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "TSAN_OPTIONS": "halt_on_error=1"}


def compile_build(build: Build, folder: Path, *flags: str) -> Path:
    """Compile the kernel of `compiled.SOURCE` by the package's own recipe, and beside it the program that calls it."""
    library = folder / "_kernel.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", " ".join(build.compiler))
        patch.delenv(compiled.PLAIN_VARIABLE, raising=False)
        reason = compile_kernel(compiled.SOURCE, library, *build.flags, *flags)
    assert reason is None, reason
    caller = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", str(_CALLER), "-pthread", "-ldl")
    target = str(folder / "kernel_process")
    subprocess.run([*build.compiler, *build.flags, *caller, "-o", target], check=True)
    return library


@contextmanager
def running(build: Build, library: Path) -> Iterator[list[compiled.Kernel]]:
    """Yield every variant of a compiled build that the processor runs; that the process ended well is checked."""
    command = [*build.runner, str(library.with_name("kernel_process")), str(library), str(build.threads)]
    process = KernelProcess(command, {**os.environ, **_OPTIONS})
    try:
        variants = kernel_of(process, library).variants
        yield [kernel_of(process, library, variant=i) for i in range(variants)]
    except BaseException:
        process.kill()
        raise
    process.close()
