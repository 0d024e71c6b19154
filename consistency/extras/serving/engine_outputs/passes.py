"""Passes in float64 of the model as an engine may have computed it: what would explain the engine's numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from consistency.extras.serving.inference.request import OUTPUT
from consistency.numerics.decisions import Watch
from consistency.numerics.dtype import name_of
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rules import UNIT_ROUNDOFF
from consistency.worker.decisions.replay import deciding
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import adapted_layers, in_merged, merged_into, restored
from consistency.worker.model.running import Activations, activations
from consistency.worker.quantized.exact import exact_layers

Change = AbstractContextManager[Any]
SEED = 2520

_WORDS = 1 << 12
"""Rows of embeddings that are widened at a time."""

_KEPT_BYTES = 1 << 28
"""Bytes of logits that are kept for other modes and engines: a 32nd of the 8 GB of the smallest host that is
supported."""


@dataclass(slots=True)
class Room:
    """Memory for logits that are kept, of one text or of several.

    Attributes
    ----------
    left : int
        Bytes that are not taken yet.
    """

    left: int = _KEPT_BYTES

    def take(self, size: int) -> bool:
        """Report whether there is room for so many bytes, and take it."""
        if size > self.left:
            return False
        self.left -= size
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Float64 passes of the model on the CPU over the inputs of some rows.

    Attributes
    ----------
    watch : callable
        Return what makes a pass decide as the right one did; None where each decides by itself.
    """

    model: Any
    inputs: Activations
    watch: Callable[[], Watch | None]
    step: Callable[[str], None]
    """Called with the name of a pass before it begins."""
    room: Room = field(default_factory=Room)
    change: Callable[[], Change] = nullcontext
    """A mistake that the model makes in passes with noise; by default it makes none."""
    _known: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, name: str, change: Callable[[], Change]) -> torch.Tensor:
        """Return the float64 logits of the model with a change; `name` tells passes apart."""
        if name in self._known:
            return self._known[name]
        self.step(name)
        same = deciding(self.watch(), gradient=False)
        with torch.no_grad(), exact_layers(self.model), change(), Float64Mode(), same:
            return self._keep(name, activations(self.model, self.inputs)[OUTPUT])

    def merged(self, merge: Rounded) -> torch.Tensor:
        """Return the float64 logits of the model with its adapter merged and rounded to a narrower dtype."""
        name = str(merge)
        if name in self._known:
            return self._known[name]
        self.step(name)
        same = deciding(self.watch(), gradient=False)
        with torch.no_grad(), merge.of_the_rest(self.model), Float64Mode() as mode, same:
            run = functools.partial(activations, self.model, self.inputs)
            results = in_merged(self.model, run, merge=functools.partial(merge.of_layer, mode))
        return self._keep(name, results[OUTPUT])

    def _keep(self, name: str, logits: torch.Tensor) -> torch.Tensor:
        """Return logits in float64, and keep them for the next question where there is room."""
        logits = logits.to(torch.float64)
        if self.room.take(logits.nbytes):
            self._known[name] = logits
        return logits

    def deciding_freely(self, *, decides: bool) -> Passes:
        """Return passes of which each decides by itself; what is known is known to them where nothing decides."""
        known = {} if decides else self._known
        return replace(self, watch=lambda: None, _known=known)

    def with_noise(self, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the float64 logits of a pass with noise, which are kept as their distance from the right ones."""
        right, key = self._known.get("right"), f"{name}, beside the right ones"
        if right is not None and key in self._known:
            return right + self._known[key]
        logits = compute().to(torch.float64)
        # float32 has more digits of a small distance than are of use
        if right is not None and self.room.take(logits.nbytes // 2):
            self._known[key] = (logits - right).to(torch.float32)
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """The roundings of a merge in a narrower dtype than the case has."""

    dtype: torch.dtype
    base_first: bool = False
    """The base is converted before the adapter is added, and not after it."""
    delta_first: bool = False
    """The delta is rounded before it is added."""
    whole: bool = False
    """All of the model is converted, and not the adapted layers alone."""
    shaken: bool = False
    """Add errors of float32 sums, which an engine makes in an order of its own: they move some sums across the middle
    between two numbers of the narrower dtype."""

    def __str__(self) -> str:
        """Return the name of a pass with this merge."""
        parts = [f"merged in {name_of(self.dtype)}"]
        for name, is_set in (
            ("base first", self.base_first),
            ("delta first", self.delta_first),
            ("whole", self.whole),
            ("other sums", self.shaken),
        ):
            if is_set:
                parts.append(name)
        return ", ".join(parts)

    @contextmanager
    def of_layer(self, mode: Float64Mode, layer: Any) -> Iterator[None]:
        """Merge one layer by PEFT in float64, and then round its sum as this merge does."""
        with ExitStack() as stack:
            with mode.paused():
                stack.enter_context(restored(layer))
                parameters = [p for p in merged_into(layer) if p.is_floating_point()]
                for parameter in parameters:
                    base = parameter.data
                    if self.base_first:
                        base = base.to(self.dtype)
                    parameter.data = base.to(torch.float64)
                bases = [parameter.data.clone() for parameter in parameters]
            layer.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])
            if not parameters:
                yield
                return
            with mode.paused():
                for parameter, base in zip(merged_into(layer), bases, strict=False):
                    parameter.data = self._sum(base, parameter.data - base)
            yield

    def _sum(self, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the merged weight in the narrower dtype, from base and delta in float64."""
        if self.shaken:
            delta = delta + _errors(delta, delta.abs())
        if self.delta_first:
            delta = delta.to(self.dtype).to(torch.float64)
        merged = base + delta
        if self.shaken:
            merged = merged + _errors(merged, base.abs() + delta.abs())
        return merged.to(self.dtype)

    @contextmanager
    def of_the_rest(self, model: torch.nn.Module) -> Iterator[None]:
        """Convert the parameters outside the adapted layers, where the whole model is converted."""
        rest: list[torch.nn.Parameter] = []
        if self.whole:
            adapted = set[int]()
            for _, layer in adapted_layers(model):
                adapted |= {id(p) for p in layer.parameters()}
            rest = [p for p in model.parameters() if id(p) not in adapted and p.is_floating_point()]
        kept = [(parameter, parameter.data) for parameter in rest]
        try:
            for parameter, data in kept:
                parameter.data = data.to(self.dtype)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data


def _errors(like: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the error that rounding to float32 twice may add, of either sign by chance."""
    signs = torch.randint(0, 2, like.shape, generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    return 2 * UNIT_ROUNDOFF["float32"] * magnitude * signs


@contextmanager
def scaled(scalings: Mapping[int, float], layers: Sequence[Any]) -> Iterator[None]:
    """Give layers other scalings, by their number in `layers`."""
    kept = [(layer.scaling, layer.scaling[ADAPTER_NAME]) for layer in layers]
    try:
        for number, (scaling, _) in enumerate(kept):
            scaling[ADAPTER_NAME] = scalings[number]
        yield
    finally:
        for scaling, value in kept:
            scaling[ADAPTER_NAME] = value


@contextmanager
def plain(layers: Sequence[Any]) -> Iterator[None]:
    """Let layers compute as LoRA alone, without a variant such as DoRA."""
    kept = [(layer.lora_variant, layer.lora_variant.pop(ADAPTER_NAME)) for layer in layers]
    try:
        yield
    finally:
        for variants, variant in kept:
            variants[ADAPTER_NAME] = variant


@contextmanager
def without(modules: Sequence[Any]) -> Iterator[None]:
    """Disable the adapter in some modules: adapted layers, or modules that it saves whole."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "_disable_adapters", True))
        yield


@contextmanager
def tied(head: torch.nn.Module, embeddings: Any) -> Iterator[None]:
    """Let the head multiply by the embeddings, with the delta that the adapter adds to these."""
    table = embeddings.get_base_layer() if hasattr(embeddings, "get_base_layer") else embeddings
    ids = torch.arange(table.weight.shape[0], device=table.weight.device).split(_WORDS)

    def multiplied(_: object, args: tuple[torch.Tensor, ...], __: object) -> torch.Tensor:
        # some embeddings scale what they look up, and no head does
        weights = (embeddings(piece) / getattr(table, "embed_scale", 1.0) for piece in ids)
        return torch.cat([torch.nn.functional.linear(args[0], weight) for weight in weights], -1)

    handle = head.register_forward_hook(multiplied)
    try:
        yield
    finally:
        handle.remove()


def scalable(model: torch.nn.Module) -> list[Any]:
    """Return the adapted layers that have a scaling."""
    return [layer for _, layer in adapted_layers(model) if _has_scaling(layer)]


def _has_scaling(layer: Any) -> bool:
    scalings = getattr(layer, "scaling", None)
    return isinstance(scalings, dict) and isinstance(scalings.get(ADAPTER_NAME), (int, float))


def saved_modules(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return name and wrapper of each module that the adapter saves whole."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]


def scalings_of(layers: Sequence[Any], config: Any) -> dict[str, dict[int, float]]:
    """Return wrong scalings of the layers by their number, for each mistake; mistakes that change nothing are left out.

    Several mistakes may come to the same scalings: with alpha = r, no rank-stabilization and no scaling at all.
    """
    right = {number: float(layer.scaling[ADAPTER_NAME]) for number, layer in enumerate(layers)}
    ranks = [float(getattr(layer, "r", {}).get(ADAPTER_NAME) or 0) for layer in layers]
    alphas = [float(getattr(layer, "lora_alpha", {}).get(ADAPTER_NAME) or 0) for layer in layers]
    wrong = {
        "one": dict.fromkeys(right, 1.0),
        "twice": {number: 2 * scaling for number, scaling in right.items()},
    }
    if all(ranks) and all(alphas) and hasattr(config, "lora_alpha"):
        pairs = list(zip(alphas, ranks, strict=True))
        if getattr(config, "use_rslora", False):
            wrong["rslora ignored"] = {number: alpha / rank for number, (alpha, rank) in enumerate(pairs)}
            scaling_of_all = config.lora_alpha / math.sqrt(config.r)
        else:
            wrong["rslora assumed"] = {number: alpha / math.sqrt(rank) for number, (alpha, rank) in enumerate(pairs)}
            scaling_of_all = config.lora_alpha / config.r
        wrong["patterns ignored"] = dict.fromkeys(right, scaling_of_all)
    return {name: scalings for name, scalings in wrong.items() if scalings != right}
