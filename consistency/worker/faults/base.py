"""Faults in the base, after transformers has loaded it."""

from __future__ import annotations

from typing import Any

import torch

from consistency.worker.faults.planting import changing

_in_base = changing("consistency.worker.model.loading:_from_folder")


@_in_base
def through_bfloat16(loaded: tuple[torch.nn.Module, Any]) -> None:
    for parameter in loaded[0].parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


@_in_base
def one_bit(loaded: tuple[torch.nn.Module, Any]) -> None:
    weight = max(loaded[0].parameters(), key=lambda p: p.numel())
    weight.reshape(-1)[7:8].view(torch.uint8)[0] ^= 1
