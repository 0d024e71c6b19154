"""Compile the optional kernel when the package is built; without a compiler the package is built all the same.

A wheel that holds it is one for this platform, one without it for any (`CONSISTENCY_NO_KERNEL=1` builds that). The
library has nothing of Python's interface, so one serves every version; on Linux it needs nothing but a C library older
than every supported Python, so its wheel is one for `manylinux`, which an index takes. The wheel is for the processor
that the library is for: with `CC=aarch64-linux-gnu-gcc` for aarch64, wherever it is built. In an editable installation
the library lies beside its source, in the working tree.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "consistency/numerics/kernels"
SOURCE, LIBRARY, RECIPE = (f"{FOLDER}/{name}" for name in ("kernel.c", "_kernel.so", "build.py"))


class KernelHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is not there where types are checked
    """Put the kernel into the wheel where it can be compiled."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell the builder."""
        self._scratch = tempfile.TemporaryDirectory(prefix="consistency-kernel-")
        in_tree, built = Path(self.root, LIBRARY), Path(self._scratch.name, "_kernel.so")
        reason = _compile(Path(self.root), built)
        if version == "editable":
            in_tree.unlink(missing_ok=True)
            if reason is None:
                shutil.copyfile(built, in_tree)
        elif reason is None:
            build_data["force_include"][str(built)] = LIBRARY
        if reason is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform(built)}"
        else:
            self.app.display_warning(f"without the compiled kernel, NumPy does its work: {reason}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was compiled aside."""
        self._scratch.cleanup()


def _compile(root: Path, target: Path) -> str | None:
    """Compile by the package's own recipe; the package cannot be imported here, for its dependencies are not there."""
    spec = importlib.util.spec_from_file_location("kernel_build", root / RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    reason: str | None = recipe.compile_kernel(root / SOURCE, target)
    return reason


def _platform(library: Path) -> str:
    if sys.platform == "darwin":  # a Python for two architectures would name both, and the compiler serves one
        from packaging.tags import platform_tags

        return next(iter(platform_tags()))
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if sys.platform != "linux":
        return platform
    processor, oldest = _processor(library) or platform.removeprefix("linux_"), _oldest_glibc(library)
    return f"linux_{processor}" if oldest is None else f"manylinux_{oldest[0]}_{oldest[1]}_{processor}"


def _processor(library: Path) -> str | None:
    """Return the processor of a library in the words of a tag; None for one that is only built on itself."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        return {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(ELFFile(file)["e_machine"])


def _oldest_glibc(library: Path) -> tuple[int, int] | None:
    """Return the oldest glibc that loads a library (PEP 600); None where it needs anything beside glibc.

    Not below 2.17, the first that every architecture has a `manylinux` tag of.
    """
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        section = elf.get_section_by_name(".gnu.version_r")
        versions = [] if section is None else [one.name for _, names in section.iter_versions() for one in names]
    if not needed <= {"libc.so.6", "libm.so.6"} or not all(name.startswith("GLIBC_2.") for name in versions):
        return None  # another C library, such as musl
    return max([(2, 17), *((2, int(name.split(".")[1])) for name in versions)])
