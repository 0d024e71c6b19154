"""Hotswap: `peft.utils.hotswap` writes one adapter's file into the place of another, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from consistency.capture.names import adapter_place, module_place
from consistency.capture.records import TensorRecord
from consistency.extras.peft_api.adapters.multi_adapter_model import STAGE, MultiAdapterModel
from consistency.numerics.diagnosis_moved import OtherContents
from consistency.numerics.digest import digest
from consistency.numerics.rules import Rule


def hotswap(multi_model: MultiAdapterModel) -> None:
    """Write the second adapter's file over the first one's parameters, check every tensor, and swap back."""
    from peft.utils.hotswap import hotswap_adapter

    first, second, *_ = multi_model.names
    paths = {adapter.name: adapter.path for adapter in multi_model.context.job.case.adapters}
    device = str(multi_model.context.device)
    multi_model.model.set_adapter(first)
    hotswap_adapter(multi_model.model, paths[second], adapter_name=first, torch_device=device)
    step = f"hotswap({second} over {first})"
    as_loaded = _check_tensors(multi_model, first, second)
    as_loaded = _check_scaling(multi_model, step, first, second) and as_loaded
    multi_model.check_bytes(step, multi_model.names[1:])
    if as_loaded:
        multi_model.check_result(step, second)
    hotswap_adapter(multi_model.model, paths[first], adapter_name=first, torch_device=device)
    multi_model.check_bytes(f"hotswap({first} back)")


def _check_tensors(multi_model: MultiAdapterModel, first: str, second: str) -> bool:
    """Record every parameter of the first adapter against the second one's file; return whether shapes are the same.

    Where the second adapts less, or has a smaller rank, the rest has to be zero.
    """
    record, state = multi_model.context.record, multi_model.model.state_dict(keep_vars=True)
    incoming = {_under(name, second, first): tensor for name, (_, tensor) in multi_model.expected[second].items()}
    old_keys = {}
    for name, (key, tensor) in multi_model.expected[first].items():
        old_keys[digest(tensor.to(state[name].dtype)).value] = key
    is_same = incoming.keys() == multi_model.expected[first].keys()
    for name, (key, _) in multi_model.expected[first].items():
        layer, part = adapter_place(key)
        if not record.wants(STAGE, layer):
            continue
        actual: torch.Tensor = state[name]
        swapped_in = incoming.get(name)
        wanted = torch.zeros(actual.shape, dtype=actual.dtype)
        if swapped_in is not None:
            is_same = is_same and swapped_in.shape == actual.shape
            wanted[tuple(slice(0, size) for size in swapped_in.shape)] = swapped_in.to(actual.dtype)
        record.moved(
            TensorRecord(STAGE, layer, f"hotswap.{part}", rule=Rule.BITWISE, status="equal"),
            actual=actual,
            expected=wanted,
            other_contents=OtherContents(stale=lambda tensor: _held_before(old_keys, first, tensor)),
        )
    return is_same


def _held_before(old_keys: Mapping[str, str], first: str, tensor: torch.Tensor) -> str | None:
    """Return the tensor of the first adapter's file that has the bytes of a tensor; None where none has."""
    key = old_keys.get(digest(tensor).value)
    return None if key is None else f"{key} of {first}"


def _check_scaling(multi_model: MultiAdapterModel, step: str, first: str, second: str) -> bool:
    """Record whether every layer has the scaling of the adapter that is now in it, and return whether it has.

    A scaling is a number of Python's, on no device. Hotswap of PEFT 0.21 does not find layers in `rank_pattern` and
    `alpha_pattern`, and gives them the scaling of all others.
    """
    wrong = []
    for name, module in multi_model.model.named_modules():
        scaling: Any = getattr(module, "scaling", None)
        if isinstance(scaling, dict) and first in scaling and second in scaling:
            got, wanted = float(scaling[first]), float(scaling[second])
            if got != wanted:
                wrong.append(f"{module_place(name)} has {got:g} instead of {wanted:g}")
    if wrong:
        multi_model.skipped(
            step,
            "scaling",
            f"PEFT gives {len(wrong)} layers another scaling than {second} has ({wrong[0]}), on any device: "
            f"the results are not those of {second}, and are not compared",
        )
        return False
    multi_model.fact(step, "scaling")
    return True


def _under(name: str, adapter: str, other: str) -> str:
    """Return the name of a parameter as it is under another adapter's name, which is its last part of that name."""
    parts = name.split(".")
    parts[len(parts) - 1 - parts[::-1].index(adapter)] = other
    return ".".join(parts)
