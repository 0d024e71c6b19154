"""Note which kernel of attention ran, and where it was not the one that was asked for.

Torch falls back to the formula, its kernel `math`, wherever a fused kernel does not take dtype, head size or mask, and
says nothing of it. Each fused kernel is an operation of its own: the one that runs inside of a call is what ran.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from consistency.devices.backend import FUSED_ATTENTION
from consistency.numerics.dispatch_mode import DispatchMode
from consistency.worker import determinism
from consistency.worker.model.structure import blocks_of

FORMULA = "math"
"""Torch's name of the kernel that computes attention by its formula."""

_PREFIX = "_scaled_dot_product_"
_OPERATIONS = {
    "attention_math": FORMULA,
    "flash_attention": "flash",
    "flash_attention_for_cpu": "flash",
    "efficient_attention": "mem_efficient",
    "cudnn_attention": "cudnn",
}


class AttentionKernels(TorchFunctionMode):
    """Note which kernels run, by the block of the model; outside of all blocks by an empty name."""

    def __init__(self) -> None:
        super().__init__()
        in_force = determinism.in_force()
        enabled = [kernel for kernel in FUSED_ATTENTION if in_force[f"sdpa_{kernel}"] is True]
        self._asked = enabled[0] if len(enabled) == 1 else ""
        """The fused kernel that this worker is for: the only one that is enabled; else empty."""
        self._ran: dict[str, dict[str, None]] = {}
        """Kernels that ran, in order, by name of the block."""
        self._block = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _Fused() as fused:
            result = func(*args, **(kwargs or {}))
        self._ran.setdefault(self._block, {})[fused.kernel] = None
        return result

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[Self]:
        """Note what runs in each block of a model."""

        def enter(name: str, *_: Any) -> None:
            self._block = name

        with ExitStack() as hooks:
            for name, block in blocks_of(model).items():
                enter_block, leave_block = functools.partial(enter, name), functools.partial(enter, "")
                hooks.callback(block.register_forward_pre_hook(enter_block).remove)
                hooks.callback(block.register_forward_hook(leave_block).remove)
            with self:
                yield self

    def evidence(self, layer: str = "") -> dict[str, str]:
        """Return the kernels that a row depends on as evidence; empty where no fused kernel ran."""
        ran = self._kernels_in(layer)
        return {"attention": ", ".join(ran)} if ran.keys() - {FORMULA} else {}

    def missed(self, layer: str = "") -> str:
        """Return why a row tells nothing of the kernel that was asked for; empty where that ran, or none was."""
        if not self._asked:
            return ""
        others = [kernel for kernel in self._kernels_in(layer) if kernel != self._asked]
        if not others:
            return ""
        names = ", ".join(others)
        return f"{names} ran: torch's {self._asked} attention does not take this device, dtype, size or mask"

    def never_called(self) -> str:
        """Return why no row of a model tells anything of the kernel that was asked for; empty where some may."""
        if self._ran or not self._asked:
            return ""
        return f"{self._asked} attention did not run: this model does not call scaled_dot_product_attention"

    def _kernels_in(self, layer: str) -> dict[str, None]:
        """Return the kernels that ran in the block of a layer, in order; for other layers those outside of blocks."""
        block = next((name for name in self._ran if name and f"{layer}.".startswith(f"{name}.")), "")
        return self._ran.get(block, {})


class _Fused(DispatchMode):
    """Note the fused kernel that runs; the formula is made of other operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self.kernel = FORMULA

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(_PREFIX):
            self.kernel = _OPERATIONS.get(name.removeprefix(_PREFIX), name)
        return func(*args, **(kwargs or {}))
