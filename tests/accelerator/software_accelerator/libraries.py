"""Let PEFT and accelerate take the double for the machine's accelerator, as they take CUDA.

Both know backends by a list of names, and NPU only where the package `torch_npu` is installed. Of any other backend
`peft.infer_device` says `cpu`, so adapters go straight from the host to their device; on a CUDA machine they go to
device 0 first and are copied from there, which is the load path on which copies between devices have failed.
`accelerate.utils.get_max_memory` leaves its devices out, so `device_map="auto"` and `"balanced"` put everything on the
CPU. The double has to be able to show both. The two functions are replaced as their modules are imported, and nothing
else of either library is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from . import NAME, device_module

Change = Callable[[Any], None]


_known = False


def install() -> None:
    """Change both libraries from the moment that they are imported; they know no device before `know_devices`."""
    sys.meta_path.insert(0, _Finder())


def know_devices(*, known: bool) -> None:
    """Let both libraries see the devices, or not."""
    global _known
    _known = known


def _default_device(module: Any) -> None:
    real = module.infer_device
    module.infer_device = lambda: NAME if _known else real()


def _memory(module: Any) -> None:
    real = module.get_max_memory

    def get_max_memory(max_memory: dict[int | str, Any] | None = None) -> dict[int | str, Any]:
        found: dict[int | str, Any] = real(max_memory)
        if max_memory is not None or not _known:
            return found
        devices = range(device_module.device_count())
        return {**{index: device_module.mem_get_info(index)[0] for index in devices}, **found}

    module.get_max_memory = get_max_memory


_CHANGES: dict[str, Change] = {"peft.utils.other": _default_device, "accelerate.utils.modeling": _memory}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Loader(found.loader, change)
        return found


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, change: Change) -> None:
        self._real = real
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        self._change(module)
