"""Plant a fault in a process: replace a function that is going to be called.

`instead` and `changing` make the functions that `catalogue` names. A target is `module:function` or
`module:Class.method`, imported when the fault is planted.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from consistency.numerics.dtype import UNIT_ROUNDOFF

Undo = Callable[[], None]
"""Removes a fault."""

Install = Callable[[], Undo]
"""Plants a fault."""


def instead(target: str) -> Callable[[Callable[..., Any]], Install]:
    """Let the decorated function take the place of the target; it gets the real one before the arguments."""

    def decorate(act: Callable[..., Any]) -> Install:
        def install() -> Undo:
            owner_name, _, name = target.replace(":", ".").rpartition(".")
            owner, real = pkgutil.resolve_name(owner_name), pkgutil.resolve_name(target)
            attribute = vars(owner)[name]  # of a class, this may be a classmethod object, where `real` is bound
            setattr(owner, name, lambda *args, **kwargs: act(real, *args, **kwargs))
            return lambda: setattr(owner, name, attribute)

        return install

    return decorate


def changing(target: str) -> Callable[[Callable[[Any], Any]], Install]:
    """Let the decorated function change the target's result: in place, or by what it returns."""

    def decorate(change: Callable[[Any], Any]) -> Install:
        def act(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            with torch.no_grad():
                changed = change(result)
            return result if changed is None else changed

        return instead(target)(act)

    return decorate


def together(*installs: Install) -> Install:
    """Return the installer of several replacements."""

    def install() -> Undo:
        undos = [plant() for plant in installs]

        def undo_all() -> None:
            for undo in reversed(undos):
                undo()

        return undo_all

    return install


def cut_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Cut float32 values as a unit that takes its operands in TF32 does."""
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 10 of 23 mantissa bits stay


def factor_beyond_rounding(dtype: torch.dtype, least: float, roundings: int = 16) -> float:
    """Return a factor of a wrong scale: 1 + `least`, or some roundings of a half type."""
    return 1 + max(least, roundings * UNIT_ROUNDOFF.get(dtype, 0.0))
