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
Install = Callable[[], Undo]


def instead(target: str) -> Callable[[Callable[..., Any]], Install]:
    """Let the decorated function take the place of the target; it gets the real one before the arguments."""

    def decorate(act: Callable[..., Any]) -> Install:
        def install() -> Undo:
            owner, _, name = target.replace(":", ".").rpartition(".")
            place, real = pkgutil.resolve_name(owner), pkgutil.resolve_name(target)
            kept = vars(place)[name]
            setattr(place, name, lambda *args, **kwargs: act(real, *args, **kwargs))
            return lambda: setattr(place, name, kept)

        return install

    return decorate


def changing(target: str) -> Callable[[Callable[[Any], Any]], Install]:
    """Let the decorated function change the target's result: in place, or by what it returns."""

    def decorate(change: Callable[[Any], Any]) -> Install:
        def act(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            with torch.no_grad():
                changed = change(found)
            return found if changed is None else changed

        return instead(target)(act)

    return decorate


def together(*installs: Install) -> Install:
    """Return the installer of several replacements."""

    def install() -> Undo:
        undos = [one() for one in installs]

        def undo() -> None:
            for one in reversed(undos):
                one()

        return undo

    return install


def cut_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Cut float32 values as a unit that takes its operands in TF32 does."""
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 10 of 23 mantissa bits stay


def factor_beyond_rounding(dtype: torch.dtype, least: float, roundings: int = 16) -> float:
    """Return a factor of a wrong scale: 1 + `least`, or some roundings of a half type."""
    return 1 + max(least, roundings * UNIT_ROUNDOFF.get(dtype, 0.0))
