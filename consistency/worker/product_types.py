"""Trace in which dtype each module multiplies: some are to compute in float32 in a model of a half type.

Routers cast what they get, and a class names modules that it keeps in float32 (`_keep_in_fp32_modules`). Where such a
module multiplies in the half type after all, its error may be below what rounding makes in its block, and a token goes
elsewhere. A trace sees it, however small the error is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.worker.decisions.track import Places
from consistency.worker.model import half_kernels
from consistency.worker.model.running import Activations, activations, base_of

_aten = torch.ops.aten

_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Products with a matrix, each with the position of its first factor. In which dtype a kernel computes attention's own,
which are `bmm`, is left to each device."""

_TOKENS = 4
"""Tokens of the traced pass: its results are not compared."""


class _ProductTypes(DispatchMode):
    """Note the narrowest dtype of the products of each module."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._places = places
        self.narrowest: dict[str, torch.dtype] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        position = _PRODUCTS.get(func)
        if position is not None and args[position].dtype in UNIT_ROUNDOFF:
            dtype, module = args[position].dtype, self._places.now
            known = self.narrowest.get(module)
            if known is None or UNIT_ROUNDOFF[dtype] > UNIT_ROUNDOFF[known]:
                self.narrowest[module] = dtype
        return func(*args, **(kwargs or {}))


def product_types(model: torch.nn.Module, inputs: Activations) -> dict[str, str]:
    """Return the narrowest dtype in which each module multiplies, by its name in the base.

    Empty for a model that has no half type, for other inputs than token ids, and for a model that is not on its device.
    """
    parameters = list(model.parameters())
    is_half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters)
    is_away = any(parameter.is_meta for parameter in parameters)
    is_text = "input_ids" in inputs and all(tensor.dim() == 2 for tensor in inputs.values())
    if not is_half or is_away or not is_text:
        return {}
    few = {name: tensor[:1, :_TOKENS] for name, tensor in inputs.items()}
    places = Places(model)
    trace = _ProductTypes(places)
    with half_kernels.computing(half_kernels.replacement(model, _TOKENS)), places, trace:
        activations(model, few)
    return {module: name_of(dtype) for module, dtype in trace.narrowest.items()}


def kept_wide(model: torch.nn.Module, modules: Sequence[str]) -> set[str]:
    """Return which of these modules the model's class keeps in float32 when it is loaded in its dtype."""
    base = base_of(model)
    patterns = set(getattr(base, "_keep_in_fp32_modules_strict", None) or ())
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        patterns.update(getattr(base, "_keep_in_fp32_modules", None) or ())
    kept = set()
    for module in modules:
        # the base's layer under an adapter's, which has factors of its own beside it
        name = module.removesuffix(".base_layer")
        if name.rpartition(".")[2] in patterns:
            kept.add(module)
    return kept
