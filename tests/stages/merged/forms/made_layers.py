"""Adapted layers of every kind, with the forms that judge them, and what PEFT makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import peft
import torch
from transformers.pytorch_utils import Conv1D

from consistency.numerics.measure import Measure
from consistency.stages.merged.forms.form import Form, Judged
from consistency.stages.merged.forms.registry import maker_of
from consistency.stages.merged.forms.source import Source
from consistency.worker.environment import release
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import adapted_layers, merged, weight_of

DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
)
"""Of weight and adapter: PEFT widens half types of an adapter unless it is asked not to."""

CONVOLUTIONS_IN_GROUPS = ("grouped",) if release("peft") >= (0, 20) else ()
"""Before version 0.20 PEFT makes no LoHa or LoKr for one, and does not merge an IA³ of its inputs."""

_SCALES = ("ia3_l", "magnitude")
"""Tensors that scale the weight: near one."""


class Parameters(torch.nn.Module):
    """Parameters that are no layer's weight: of experts, and of one matrix."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.stack = torch.nn.Parameter(torch.empty(3, 24, 32))
        self.matrix = torch.nn.Parameter(torch.empty(24, 32))


class Layers(torch.nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(40, 48)
        self.transposed = Conv1D(40, 32)
        self.embedding = torch.nn.Embedding(90, 24)
        self.conv1d = torch.nn.Conv1d(24, 32, 3)
        self.conv2d = torch.nn.Conv2d(24, 32, 3)
        self.conv3d = torch.nn.Conv3d(8, 12, (2, 3, 3))
        self.point = torch.nn.Conv2d(24, 32, 1)
        self.grouped = torch.nn.Conv2d(24, 32, 3, groups=4)
        self.experts = Parameters(transposed=False)
        self.other_way = Parameters(transposed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A layer with its form; `files` is what that is made from, which the layer may then depart from."""

    name: str
    layer: Any
    form: Form | None
    files: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, Judged]:
        """Return what PEFT computes: the delta, where there is one, and the weight, merged both ways."""
        found: dict[str, Judged] = {}
        with torch.no_grad():
            if self.form is None or self.form.has_delta:
                found["delta"] = Judged(actual=self.layer.get_delta_weight(ADAPTER_NAME), safe=None)
            for safe in (False, True):
                with merged(self.layer, safe=safe) as weight:
                    found["safe" if safe else "plain"] = Judged(actual=weight.clone(), safe=safe)
        return found

    def shares(self, tensors: dict[str, Judged] | None = None) -> dict[str, float]:
        """Return the largest share of the bound in each tensor: those that PEFT computes now, or others."""
        assert self.form is not None
        tensors = self.tensors() if tensors is None else tensors
        return dict(zip(tensors, map(_share, self.form.measure(list(tensors.values()))), strict=True))

    def worst(self, tested: Judged) -> tuple[float, tuple[int, ...] | None]:
        """Return the largest share of the bound in a tensor, and its place."""
        assert self.form is not None
        (found,) = self.form.measure([tested])
        return _share(found), found.worst_index


def _share(found: Measure) -> float:
    assert found.ratio is not None
    return float(found.ratio)


def adapted(
    config: Any, weight: torch.dtype = torch.float32, adapter: torch.dtype = torch.float32, *, seed: int = 0
) -> Iterator[Adapted]:
    """Yield the layers that an adapter changes, with NumPy's random values in base and adapter."""
    stream = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of layers of its own accord
        base = Layers()
        for parameter in base.parameters():
            parameter.data = _values(stream, parameter, 0.05).to(weight)
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        for _, layer in adapted_layers(model):
            for part, parameter in layer.named_parameters():
                if "base_layer" not in part:
                    near_one = any(word in part for word in _SCALES)
                    values = _values(stream, parameter, 0.3 if near_one else 0.1) + (1.0 if near_one else 0.0)
                    parameter.data = values.to(adapter)
        for name, layer in adapted_layers(model):
            files = {part: parameter.detach().clone() for part, parameter in layer.named_parameters()}
            make = maker_of(layer)
            source = Source(layer=layer, weight=weight_of(layer).clone(), files=files)
            form = None if make is None else make(source)
            yield Adapted(name=name.removeprefix("base_model.model."), layer=layer, form=form, files=files)


def _values(stream: np.random.Generator, like: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.from_numpy(stream.standard_normal(tuple(like.shape)) * scale)


def dora(*targets: str, **changes: Any) -> Any:
    """Configure a DoRA of these layers."""
    return peft.LoraConfig(r=4, lora_alpha=6.2, use_dora=True, target_modules=list(targets), **changes)


def largest(tested: Judged) -> tuple[int, ...]:
    """Return the index of the largest element, which is no small difference of large terms."""
    return tuple(int(i) for i in np.unravel_index(int(tested.actual.abs().argmax()), tested.actual.shape))


def moved(tested: Judged, place: tuple[int, ...], steps: int) -> Judged:
    """Return a tensor with one element some numbers of its dtype further away from zero."""
    actual = tested.actual.clone()
    for _ in range(steps):
        actual[place] = torch.nextafter(actual[place], actual[place] * 2)
    return Judged(actual=actual, safe=tested.safe)
