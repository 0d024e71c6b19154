"""Which kernel of attention ran, and where it was not the one that was asked for.

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
from torch.utils._python_dispatch import TorchDispatchMode

from consistency.devices.backend import FUSED_ATTENTION
from consistency.worker import determinism
from consistency.worker.model.structure import blocks_of

FORMULA = "math"

_PREFIX = "_scaled_dot_product_"
_OPERATIONS = {
    "attention_math": FORMULA,
    "flash_attention": "flash",
    "flash_attention_for_cpu": "flash",
    "efficient_attention": "mem_efficient",
    "cudnn_attention": "cudnn",
}


class AttentionKernels(TorchFunctionMode):
    """Notes which kernels run, by the block of the model; outside of all blocks by an empty name."""

    def __init__(self) -> None:
        super().__init__()
        now = determinism.in_force()
        on = [kernel for kernel in FUSED_ATTENTION if now[f"sdpa_{kernel}"] is True]
        self._asked = on[0] if len(on) == 1 else ""
        self._ran: dict[str, dict[str, None]] = {}
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
            found = func(*args, **(kwargs or {}))
        self._ran.setdefault(self._block, {})[fused.kernel] = None
        return found

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[Self]:
        """Note what runs in each block of a model."""

        def enter(name: str, *_: Any) -> None:
            self._block = name

        with ExitStack() as hooks:
            for name, block in blocks_of(model).items():
                here = functools.partial(enter, name)
                hooks.callback(block.register_forward_pre_hook(here).remove)
                hooks.callback(block.register_forward_hook(functools.partial(enter, "")).remove)
            with self:
                yield self

    def evidence(self, layer: str = "") -> dict[str, str]:
        """Return the kernels that a row depends on; nothing where attention was computed by the formula, or not."""
        ran = self._of(layer)
        return {"attention": ", ".join(ran)} if ran.keys() - {FORMULA} else {}

    def missed(self, layer: str = "") -> str:
        """Return why a row tells nothing of the kernel that was asked for; empty where that ran, or none was."""
        others = [kernel for kernel in self._of(layer) if self._asked and kernel != self._asked]
        if not others:
            return ""
        return (
            f"{', '.join(others)} ran: torch's {self._asked} attention does not take this device, dtype, size or mask"
        )

    def never_called(self) -> str:
        """Return why no row of a model tells anything of the kernel that was asked for; empty where some may."""
        if self._ran or not self._asked:
            return ""
        return f"{self._asked} attention did not run: this model does not call scaled_dot_product_attention"

    def _of(self, layer: str) -> dict[str, None]:
        block = next((name for name in self._ran if name and f"{layer}.".startswith(f"{name}.")), "")
        return self._ran.get(block, {})


class _Fused(TorchDispatchMode):
    """Notes the fused kernel that runs; the formula is made of other operations."""

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
