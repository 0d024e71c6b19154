"""Build the double with the system's compiler, once for all processes that ask."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
NATIVE = HERE / "native"
PACKAGE = HERE / "software_accelerator"

ENTRY_POINTS = f"[torch.backends]\n{PACKAGE.name} = {PACKAGE.name}:autoload\n"
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE.name}\nVersion: 0\n"

BUILD_LIMIT_S = 300.0  # 12 s of processor time where it was written; a shared machine may take its time

_WANTING = re.compile(r"fatal error: .*(No such file|not found)|cannot find -l|unrecognized .*-std=c\+\+20")


class NotBuiltError(Exception):
    """The double cannot be built here, and why."""


def build(cache: Path) -> Path:
    """Return a folder that makes the double a backend of torch when it is on `PYTHONPATH`.

    Parameters
    ----------
    cache : Path
        Where builds are kept, one folder each.

    Raises
    ------
    NotBuiltError
        There is no compiler, or it lacks headers or libraries.
    RuntimeError
        The source does not compile, which is no reason to skip anything.
    """
    compiler = _compiler()
    folder = cache / _key(compiler)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = _make(compiler, Path(scratch) / "made")
                os.replace(made, folder)
    return folder


def _compiler() -> str:
    if sys.platform != "linux":
        raise NotBuiltError(f"the software accelerator is built on Linux alone, and this is {sys.platform}")
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise NotBuiltError("no C++ compiler: none of g++, c++ and clang++ is here, and CXX names none")


def _key(compiler: str) -> str:
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join([importlib.metadata.version("torch"), sys.version, told]).encode())
    for file in sorted([Path(__file__), *NATIVE.iterdir(), *PACKAGE.glob("*.py")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _make(compiler: str, folder: Path) -> Path:
    package = folder / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    told = folder / f"{PACKAGE.name}-0.dist-info"
    told.mkdir()
    (told / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    (told / "METADATA").write_text(METADATA, encoding="utf-8")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = [compiler, *_arguments(), str(NATIVE / "module.cpp"), "-o", str(package / f"_native{suffix}"), *_link()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{compiler} took longer than {BUILD_LIMIT_S:g} s") from None
    if done.returncode != 0:
        missing = [line for line in done.stderr.splitlines() if _WANTING.search(line)]
        if missing:
            raise NotBuiltError(f"{compiler} lacks what it needs: {missing[0].strip()}")
        raise RuntimeError(f"the software accelerator does not compile: {done.stderr[:4000]}")
    return folder


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _arguments() -> list[str]:
    torch = _torch()
    # not optimised: the work is done in torch's own kernels, and compiling takes half the time
    return [
        "-std=c++20", "-O0", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_native",
        f"-isystem{torch / 'include'}", f"-isystem{torch / 'include/torch/csrc/api/include'}",
        f"-isystem{sysconfig.get_paths()['include']}",
    ]  # fmt: skip


def _link() -> list[str]:
    return [f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
