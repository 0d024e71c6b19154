"""Hotswap: `peft.utils.hotswap` writes one adapter's file into the place of another, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from consistency.capture.names import adapter_place, module_place
from consistency.capture.records import TensorRecord
from consistency.extras.peft_api.adapters.multi_adapter_model import STAGE, MultiAdapterModel
from consistency.numerics.diagnosis_moved import Known
from consistency.numerics.digest import digest
from consistency.numerics.rules import Rule


def hotswap(several: MultiAdapterModel) -> None:
    """Write the second adapter's file over the first one's parameters, check every tensor, and swap back."""
    from peft.utils.hotswap import hotswap_adapter

    first, second, *_ = several.names
    paths = {one.name: one.path for one in several.context.job.case.adapters}
    device = str(several.context.device)
    several.model.set_adapter(first)
    hotswap_adapter(several.model, paths[second], adapter_name=first, torch_device=device)
    step = f"hotswap({second} over {first})"
    as_loaded = _check_tensors(several, first, second)
    as_loaded = _check_scaling(several, step, first, second) and as_loaded
    several.check_bytes(step, several.names[1:])
    if as_loaded:
        several.check_result(step, second)
    hotswap_adapter(several.model, paths[first], adapter_name=first, torch_device=device)
    several.check_bytes(f"hotswap({first} back)")


def _check_tensors(several: MultiAdapterModel, first: str, second: str) -> bool:
    """Record every parameter of the first adapter against the second one's file; return whether shapes are the same.

    Where the second adapts less, or has a smaller rank, the rest has to be zero.
    """
    record, state = several.context.record, several.model.state_dict(keep_vars=True)
    incoming = {_under(name, second, first): tensor for name, (_, tensor) in several.expected[second].items()}
    old = {digest(tensor.to(state[name].dtype)).value: key for name, (key, tensor) in several.expected[first].items()}
    same = incoming.keys() == several.expected[first].keys()
    for name, (key, _) in several.expected[first].items():
        layer, part = adapter_place(key)
        if not record.wants(STAGE, layer):
            continue
        actual: torch.Tensor = state[name]
        new = incoming.get(name)
        wanted = torch.zeros(actual.shape, dtype=actual.dtype)
        if new is not None:
            same = same and new.shape == actual.shape
            wanted[tuple(slice(0, size) for size in new.shape)] = new.to(actual.dtype)
        record.moved(
            TensorRecord(STAGE, layer, f"hotswap.{part}", rule=Rule.BITWISE, status="equal"),
            actual=actual,
            expected=wanted,
            known=Known(stale=lambda tensor: _held_before(old, first, tensor)),
        )
    return same


def _held_before(old: Mapping[str, str], first: str, tensor: torch.Tensor) -> str | None:
    key = old.get(digest(tensor).value)
    return None if key is None else f"{key} of {first}"


def _check_scaling(several: MultiAdapterModel, step: str, first: str, second: str) -> bool:
    """Record whether every layer has the scaling of the adapter that is now in it; a number of Python's, on no device.

    Hotswap of PEFT 0.21 does not find layers in `rank_pattern` and `alpha_pattern`, and gives them that of all others.
    """
    wrong = []
    for name, module in several.model.named_modules():
        scaling: Any = getattr(module, "scaling", None)
        if isinstance(scaling, dict) and first in scaling and second in scaling:
            got, wanted = float(scaling[first]), float(scaling[second])
            if got != wanted:
                wrong.append(f"{module_place(name)} has {got:g} instead of {wanted:g}")
    if wrong:
        several.skipped(
            step,
            "scaling",
            f"PEFT gives {len(wrong)} layers another scaling than {second} has ({wrong[0]}), on any device: "
            f"the results are not those of {second}, and are not compared",
        )
        return False
    several.fact(step, "scaling")
    return True


def _under(name: str, adapter: str, other: str) -> str:
    """Return the name of a parameter as it is under another adapter's name, which is its last part of that name."""
    parts = name.split(".")
    parts[len(parts) - 1 - parts[::-1].index(adapter)] = other
    return ".".join(parts)
