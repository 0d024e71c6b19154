"""The planted faults of the stage `merged`, in the delta and in the merge."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from consistency.worker.faults.planting import (
    Install,
    Undo,
    cut_to_tf32,
    instead,
    together,
)
from consistency.worker.model.merging import weight_name

_calls = itertools.count(1)

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the weight that a merge leaves; called with the weight before and after PEFT's."""


def _every_delta(act: Callable[..., torch.Tensor]) -> Install:
    """Replace `get_delta_weight` of LoRA's linear layers, on quantized bases too, by a function."""

    def install() -> Undo:
        from peft.import_utils import is_bnb_available

        names = ["layer:Linear"]
        if is_bnb_available():
            names += ["bnb:Linear8bitLt", "bnb:Linear4bit"]
        return together(*(instead(f"peft.tuners.lora.{name}.get_delta_weight")(act) for name in names))()

    return install


def _delta(change: Callable[[torch.Tensor], torch.Tensor]) -> Install:
    """Change the delta that PEFT computes."""

    def act(real: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        with torch.no_grad():
            return change(real(*args))

    return _every_delta(act)


def _every_merge(act: Callable[..., None], *, but: tuple[str, ...] = ()) -> Install:
    """Replace `merge` of the tuner layers of every method by a function, as `instead` does.

    Those named by `but` are left. A merge in float64 is not changed: a device's kernels of the tested dtype are wrong,
    and the reference is computed by others.
    """

    def install() -> Undo:
        inside: list[Any] = []  # a merge that calls that of the class above is one merge
        undos = []
        for owner in _classes_that_merge():
            real = vars(owner)["merge"]
            if f"{owner.__module__}:{owner.__qualname__}" in but:
                continue

            # `real` is a default, so that each class keeps its own merge
            def merge(layer: Any, *args: Any, real: Callable[..., None] = real, **kwargs: Any) -> None:
                weight = _weight(layer)
                if inside or weight is None or weight.dtype == torch.float64:
                    real(layer, *args, **kwargs)
                    return
                inside.append(layer)
                try:
                    with torch.no_grad():
                        act(real, layer, *args, **kwargs)
                finally:
                    inside.clear()

            owner.merge = merge
            undos.append(functools.partial(setattr, owner, "merge", real))

        def undo() -> None:
            for restore in undos:
                restore()

        return undo

    return install


def _classes_that_merge() -> Iterator[Any]:
    """Yield every class of tuner layers that has a `merge` of its own."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    remaining, visited = [BaseTunerLayer], set[Any]()
    while remaining:
        owner = remaining.pop()
        if owner in visited:  # a class that derives from two others comes twice
            continue
        visited.add(owner)
        remaining += owner.__subclasses__()
        if "merge" in vars(owner):
            yield owner


def _weight(layer: Any) -> torch.nn.Parameter | None:
    """Return the parameter that a merge changes; None where that is not one of floating-point numbers."""
    if hasattr(layer, "get_param"):
        weight = layer.get_param()
    else:
        weight = getattr(layer.get_base_layer(), weight_name(layer), None)
    is_floating = isinstance(weight, torch.nn.Parameter) and weight.is_floating_point()
    return weight if is_floating else None


def _after_merge(change: Change, *, but: tuple[str, ...] = ()) -> Install:
    """Change the weight that a merge leaves, but for the classes named by `but`."""

    def act(real: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
        weight = _weight(layer)
        before = None if weight is None else weight.detach().clone()
        real(layer, *args, **kwargs)
        weight = _weight(layer)  # a merge may replace the parameter
        if weight is None or before is None or weight.shape != before.shape:
            return
        changed = change(before, weight.detach().clone())
        if hasattr(layer, "get_param"):
            weight.data = changed
        else:  # the parameter itself may be the adapter's
            setattr(layer.get_base_layer(), weight_name(layer), torch.nn.Parameter(changed, requires_grad=False))

    return _every_merge(act, but=but)


def _one_bit(_before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Flip a high bit in the exponent of a float32 element."""
    matrix = after.reshape(-1, after.shape[-1]).view(torch.int32)
    row, column = min(3, matrix.shape[0] - 1), min(5, matrix.shape[1] - 1)
    matrix[row, column] ^= 1 << 27
    return after


one_bit_of_weight = _after_merge(_one_bit)


@_every_delta
def products_in_tf32(real: Callable[..., torch.Tensor], layer: Any, adapter: str) -> torch.Tensor:
    """Let the delta's product run as on a unit that cuts its operands to TF32."""
    factors = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
    originals = [factor.data for factor in factors]
    for factor in factors:
        factor.data = cut_to_tf32(factor.data)
    try:
        return real(layer, adapter)
    finally:
        for factor, data in zip(factors, originals, strict=True):
            factor.data = data


# the delta of LoRA on a linear layer is judged by itself; of all others, what a merge makes of the weight
_LINEAR = ("peft.tuners.lora.layer:Linear",)


def _off(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Make what a merge adds a thousandth too large."""
    wide = before.to(torch.float64)
    return (wide + 1.001 * (after.to(torch.float64) - wide)).to(after.dtype)


def _flaky(_before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Move the first element by one step in every other merge."""
    if after.dtype == torch.float32 and next(_calls) % 2:  # one step of a half type exceeds the tolerance
        first = after.reshape(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
    return after


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a kernel of this device failed")


def _flaky_delta(delta: torch.Tensor) -> torch.Tensor:
    """Make every other delta larger by one step of float32."""
    return delta * (1 + 2**-23 * (next(_calls) % 2))


zero_delta = together(_delta(torch.zeros_like), _after_merge(lambda before, _: before, but=_LINEAR))
delta_off = together(_delta(lambda delta: delta * 1.001), _after_merge(_off, but=_LINEAR))
flaky_delta = together(_delta(_flaky_delta), _after_merge(_flaky, but=_LINEAR))
kernel_fails = together(_delta(_fails), _every_merge(_fails, but=_LINEAR))
