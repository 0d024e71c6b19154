"""Ways to write rollouts, healthy ones and wrong ones, as engines and their users have written them.

A wrong way is a change of the model while it computes a token, of the prompt that it is given, of what each token sees,
or of what is made of the logits. None is made by the code that looks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

Prompt = list[int]

OFF_FROM = 10
"""Token from which on the adapter is off, where an engine loses it."""

_WINDOW = 32
"""Tokens that each token sees, where an engine cuts its cache."""

_SINKS = 4
"""Tokens of the beginning that are dropped from the cache, where an engine makes room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to write rollouts.

    Attributes
    ----------
    wanted : str
        A part of what has to be said of them; empty for healthy ones.
    is_drawn : bool
        Tokens are drawn, and not the most likely ones.
    processors : sequence
        Change the logits that tokens are drawn from.
    is_raw : bool
        Log probabilities are the model's own, and not those after the processors.
    has_logprobs : bool
        Log probabilities are in the rollouts.
    masks_end : bool
        The end of the text is never written, and log probabilities are without it.
    change : callable
        What is wrong with the model while it computes the token of a place; 0 is the first, with the whole prompt.
    prompt : callable
        What the writer made of a prompt.
    seen : callable
        Which keys the token of a place sees, of those that it has to see: `(texts, keys)` each.
    sees_padding : bool
        Prompts are passed without a mask: their padding is read too.
    gap : int
        What is added to the positions of the text, and not to those of the prompt.
    draft_each : int
        Each token of such a number is the base's, a draft that the model with the adapter did not verify; 0 for none.
    given : callable
        The log probabilities that are written, of those that were computed: `(texts, tokens)` each.
    """

    wanted: str = ""
    is_drawn: bool = True
    processors: Sequence[Any] = ()
    is_raw: bool = True
    has_logprobs: bool = True
    masks_end: bool = False
    change: Callable[[Any, int], AbstractContextManager[Any]] = field(default=lambda _model, _place: nullcontext())
    prompt: Callable[[Prompt], Prompt] = list
    seen: Callable[[torch.Tensor, int], torch.Tensor] = field(default=lambda mask, _place: mask)
    sees_padding: bool = False
    gap: int = 0
    draft_each: int = 0
    given: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda logprobs: logprobs)


@contextmanager
def _scaled(model: Any, factor: float, part: str = "") -> Iterator[None]:
    """Apply the adapter with another scaling, in layers whose name has a part."""
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "scaling", None), dict) and part in name
    ]
    kept = [layer.scaling["default"] for layer in layers]
    for layer in layers:
        layer.scaling["default"] *= factor
    try:
        yield
    finally:
        for layer, scaling in zip(layers, kept, strict=True):
            layer.scaling["default"] = scaling


@contextmanager
def _other_rotary_base(model: Any) -> Iterator[None]:
    """Compute rotary positions of base 10,000, which engines take where a config's own is not read."""
    rotary = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    kept = [module.inv_freq for module in rotary]
    for module, frequencies in zip(rotary, kept, strict=True):
        size = 2 * frequencies.numel()
        module.inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, size, 2).float() / size)
    try:
        yield
    finally:
        for module, frequencies in zip(rotary, kept, strict=True):
            module.inv_freq = frequencies


@contextmanager
def _cache_in_eight_bits(model: Any) -> Iterator[None]:
    """Round keys and values to float8_e4m3fn as they leave their projections."""

    def rounded(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.float8_e4m3fn).to(output.dtype)

    # values are rounded here as they are kept; keys before their rotation, as an engine without a fused kernel does
    names = ("k_proj", "v_proj")
    handles = [module.register_forward_hook(rounded) for name, module in model.named_modules() if name.endswith(names)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _weights_in_eight_bits(model: Any) -> Iterator[None]:
    """Compute with base weights that are whole numbers of eight bits times a scale for each row."""
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if "layers" not in name or "lora" in name or parameter.dim() < 2:
                continue
            data = parameter.data
            stack.callback(setattr, parameter, "data", data)
            scale = data.abs().amax(1, keepdim=True) / 127
            parameter.data = (data / scale).round() * scale
        yield


@contextmanager
def _other_epsilon(model: Any) -> Iterator[None]:
    """Compute norms with the epsilon that engines take by default, 1e-6."""
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                stack.callback(setattr, module, "variance_epsilon", module.variance_epsilon)
                module.variance_epsilon = 1e-6
        yield


@contextmanager
def _of_step(model: Any, name: str) -> Iterator[None]:
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter("default")


@contextmanager
def _half_of_earlier_step(model: Any) -> Iterator[None]:
    """Compute the first half of the layers with the earlier step: weights were being sent when the text was begun."""
    count = model.config.num_hidden_layers
    early = [
        layer
        for name, layer in model.named_modules()
        if hasattr(layer, "set_adapter") and any(f"layers.{number}." in name for number in range(count // 2))
    ]
    for layer in early:
        layer.set_adapter("earlier")
    try:
        yield
    finally:
        for layer in early:
            layer.set_adapter("default")


def _without_adapter(model: Any, *, holds: bool) -> AbstractContextManager[Any]:
    return model.disable_adapter() if holds else nullcontext()


def _last_keys(mask: torch.Tensor, _place: int) -> torch.Tensor:
    mask = mask.clone()
    mask[:, :-_WINDOW] = 0
    return mask


def _without_first_keys(mask: torch.Tensor, place: int) -> torch.Tensor:
    if place < OFF_FROM:
        return mask
    first = mask.cumsum(-1) <= _SINKS
    return mask * ~first


def _one_late(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.cat([logprobs[:, :1], logprobs[:, :-1]], 1)


_QWEN = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8))

HEALTHY = {
    "greedy": Kind(is_drawn=False),
    "greedy, no log probabilities": Kind(is_drawn=False, has_logprobs=False),
    "temperature 1": Kind(),
    "temperature 0.7": Kind(processors=[TemperatureLogitsWarper(0.7)]),
    "top-p 0.9": Kind(processors=[TopPLogitsWarper(0.9)]),
}

WRONG = {
    "after temperature 0.7": Kind(
        processors=[TemperatureLogitsWarper(0.7)], is_raw=False, wanted="taken with temperature 0.7"
    ),
    "after top-k 20": Kind(processors=[TopKLogitsWarper(20)], is_raw=False, wanted="taken with top-k 20"),
    "after top-p 0.9": Kind(processors=[TopPLogitsWarper(0.9)], is_raw=False, wanted="taken with top-p 0.9"),
    "after min-p 0.05": Kind(processors=[MinPLogitsWarper(0.05)], is_raw=False, wanted="taken with min-p 0.05"),
    "after three of them": Kind(
        processors=_QWEN, is_raw=False, wanted="taken with temperature 0.7 and top-k 20 and top-p 0.8"
    ),
    "after a masked end": Kind(is_raw=False, masks_end=True, wanted="the end of the text masked"),
    "base alone": Kind(change=lambda model, _: model.disable_adapter(), wanted="as the base alone"),
    "adapter lost": Kind(
        change=lambda model, place: _without_adapter(model, holds=place >= OFF_FROM),
        wanted=f"as the base alone from token {OFF_FROM + 1} on",
    ),
    "earlier step": Kind(change=lambda model, _: _of_step(model, "earlier"), wanted="written by: earlier"),
    "other rotary base": Kind(change=lambda model, _: _other_rotary_base(model), wanted="rotary positions"),
    "scaling x 2": Kind(change=lambda model, _: _scaled(model, 2.0), wanted="twice"),
    "scaling x 1.1": Kind(change=lambda model, _: _scaled(model, 1.1), wanted="scal"),
    "cache in 8 bits": Kind(change=lambda model, _: _cache_in_eight_bits(model), wanted="float8"),
    "prompt cut": Kind(prompt=lambda prompt: prompt[-8:], wanted="a part of the prompt"),
    "begin token twice": Kind(prompt=lambda prompt: [prompt[0], *prompt], wanted="begin token"),
    "prefix of the base": Kind(
        change=lambda model, place: _without_adapter(model, holds=place == 0), wanted="those of the base alone"
    ),
    "prefix of an earlier step": Kind(
        change=lambda model, place: _of_step(model, "default" if place else "earlier"),
        wanted="those of the adapter earlier",
    ),
    "half of an earlier step": Kind(
        change=lambda model, _: _half_of_earlier_step(model), wanted="by the adapter earlier"
    ),
    "queries without adapter": Kind(
        change=lambda model, _: _scaled(model, 0.0, "q_proj"), wanted="as if q_proj had no adapter"
    ),
    "one layer without adapter": Kind(
        change=lambda model, _: _scaled(model, 0.0, "layers.7."), wanted="as if layer 7 had no adapter"
    ),
    "draft not verified": Kind(is_drawn=False, draft_each=9, wanted="single tokens"),
    "window of 32": Kind(seen=_last_keys, wanted="seeing the last 32 tokens"),
    "first keys lost": Kind(seen=_without_first_keys, wanted="all tokens but the first 4"),
    "padding is seen": Kind(sees_padding=True, wanted="padding"),
    "positions with a gap": Kind(gap=1, wanted="positions one further"),
    "weights in 8 bits": Kind(change=lambda model, _: _weights_in_eight_bits(model), wanted="int8 by row"),
    "other epsilon": Kind(change=lambda model, _: _other_epsilon(model), wanted="no name"),
    "repetition penalty": Kind(
        is_drawn=False,
        is_raw=False,
        processors=[RepetitionPenaltyLogitsProcessor(1.3)],
        wanted="repetition penalty 1.3",
    ),
    "log probabilities one late": Kind(given=_one_late, wanted="a delay of one token"),
    "log probabilities in bfloat16": Kind(
        given=lambda logprobs: logprobs.to(torch.bfloat16).float(), wanted="rounding to bfloat16"
    ),
    "log probabilities of base 10": Kind(given=lambda logprobs: logprobs / 2.302585092994046, wanted="base 10"),
}

KINDS = HEALTHY | WRONG
