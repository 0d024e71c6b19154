"""Let PEFT take the double for the machine's accelerator, as it takes CUDA.

`peft.infer_device` knows CUDA, MPS, MLU, XPU and, where the package `torch_npu` is installed, NPU. It answers `cpu` for
any other backend, so that adapters go straight from the host to their device. On a CUDA machine they go to device 0
first and are copied from there, which is the road on which copies between devices have failed; the double has to be
able to show it. PEFT's function is replaced as its module is imported, and nothing else of PEFT is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

_MODULE = "peft.utils.other"


def install(name: str) -> None:
    """Make `peft.infer_device` answer `name` from the moment that PEFT is imported."""
    sys.meta_path.insert(0, _Finder(name))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is not None and isinstance(found.loader, importlib.abc.Loader):
            found.loader = _Loader(found.loader, self._name)
        return found


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, name: str) -> None:
        self._real = real
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        module.infer_device = lambda: self._name  # type: ignore[attr-defined]
