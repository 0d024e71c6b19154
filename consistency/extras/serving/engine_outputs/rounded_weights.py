"""Weights in 8 or 4 bits, as engines round them when they load a model.

A format is a set of levels, and which values share a scale. A weight is rounded by dividing each value by the scale,
taking the nearest level, and multiplying again: what an engine computes with, whether it multiplies the codes or
dequantizes them before. The output head, embeddings, norms and an adapter that is not merged are not rounded: engines
leave them as they are.

Some engines round the inputs of each product too. No pass here has their errors: one input whose last bits take it to
another level moves what follows, and with it more inputs to other levels, until after a few layers all are others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from consistency.extras.serving.engine_outputs.passes import Rounded
from consistency.numerics.quantized import FP4, NF4
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.running import base_of
from consistency.worker.quantized.held import is_quantized

_SMALLEST = 1e-30
"""Scale of values that are all zero, so that none is divided by zero."""

ToLevels = Callable[[torch.Tensor], torch.Tensor]
"""Rounds values to levels, each by the scale of its last dimension."""


def _to_int8(values: torch.Tensor, steps: float = 127.0, scale_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return values as whole numbers of a scale.

    Parameters
    ----------
    steps : float
        Number that the largest value is divided by: 127, or half of 255, where -128 is used too.
    scale_dtype : torch.dtype, optional
        Dtype in which the scale is kept for the product; the codes are made with the exact one.
    """
    scale = values.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST) / steps
    # by the inverse, as the libraries do: it decides on which side of a middle the largest value is
    codes = (values * (1 / scale)).round().clamp(-128, 127)
    return codes * (scale if scale_dtype is None else scale.to(scale_dtype).to(values.dtype))


def _to_float8(values: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = values.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST) / largest
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def _to_nf4(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    return _lower_at_ties(values / scale, NF4) * scale


def _to_fp4(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    return _lower_at_ties(values.abs() / scale, FP4) * values.sign() * scale


def _lower_at_ties(values: torch.Tensor, levels: Sequence[float]) -> torch.Tensor:
    """Return the nearest level of each value, in the middle of two the lower one, as bitsandbytes does."""
    table = torch.tensor(levels, dtype=values.dtype)
    return table[torch.bucketize(values, (table[1:] + table[:-1]) / 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format of weights in few bits.

    Attributes
    ----------
    name : str
        What users call it.
    to_levels : callable
        Rounds values to the levels of the format.
    block : tuple of int
        Rows and columns of a weight that share a scale; 0 for all of them.
    """

    name: str
    to_levels: ToLevels
    block: tuple[int, int]

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight `(rows, columns)` in this format, in its own dtype; a smaller block at an edge is one too."""
        rows, columns = (size or of_all for size, of_all in zip(self.block, weight.shape, strict=True))
        blocks = _padded(weight.to(torch.float32), rows, columns)
        high, wide = blocks.shape[0] // rows, blocks.shape[1] // columns
        in_blocks = blocks.reshape(high, rows, wide, columns).transpose(1, 2).reshape(high, wide, rows * columns)
        levels = self.to_levels(in_blocks).reshape(high, wide, rows, columns).transpose(1, 2)
        return levels.reshape(blocks.shape)[: weight.shape[0], : weight.shape[1]].to(weight.dtype)


def _padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return values with zeros at their ends, so that they are whole blocks: zeros change no scale."""
    missing = -values.shape[0] % rows, -values.shape[1] % columns
    return torch.nn.functional.pad(values, (0, missing[1], 0, missing[0])) if any(missing) else values


FORMATS = (
    WeightFormat(name="int8 by row", to_levels=_to_int8, block=(1, 0)),
    WeightFormat(name="int8 by row, from -128 on", to_levels=functools.partial(_to_int8, steps=127.5), block=(1, 0)),
    WeightFormat(name="float8_e4m3fn by tensor", to_levels=_to_float8, block=(0, 0)),
    WeightFormat(name="float8_e4m3fn by row", to_levels=_to_float8, block=(1, 0)),
    WeightFormat(name="float8_e4m3fn in blocks of 128 × 128", to_levels=_to_float8, block=(128, 128)),
    WeightFormat(
        name="int8 in blocks of 32", to_levels=functools.partial(_to_int8, scale_dtype=torch.float16), block=(1, 32)
    ),
    WeightFormat(name="nf4 in blocks of 64", to_levels=_to_nf4, block=(1, 64)),
    WeightFormat(name="fp4 in blocks of 64", to_levels=_to_fp4, block=(1, 64)),
)
"""What engines load models in, in this order: bitsandbytes (LLM.int8); torchao and compressed-tensors; vLLM's
quantization="fp8"; torchao and compressed-tensors (FP8_DYNAMIC); DeepSeek's, which trainers take for rollouts; GGUF's
Q8_0; and the two of bitsandbytes."""


FINEST = next(weights for weights in FORMATS if weights.name == "int8 in blocks of 32")
"""The format that moves weights least."""


@contextmanager
def rounded(model: torch.nn.Module, weights: WeightFormat) -> Iterator[None]:
    """Round the weights of a model's layers to a format, each for the time that it runs."""
    with ExitStack() as stack:
        for layer in rounded_layers(model):
            stack.enter_context(_rounded_while_it_runs(layer, weights))
        yield


@contextmanager
def _rounded_while_it_runs(layer: Any, weights: WeightFormat) -> Iterator[None]:
    own: list[torch.Tensor] = []

    def begin(layer: Any, _inputs: object) -> None:
        own.append(layer.weight.data)
        # how a weight is rounded is part of the model, and no operation of the pass
        with _disable_current_modes():
            layer.weight.data = _weight(layer, weights)

    def end(*_: object) -> None:
        if own:
            layer.weight.data = own.pop()

    with ExitStack() as stack:
        stack.callback(layer.register_forward_pre_hook(begin).remove)
        stack.callback(layer.register_forward_hook(end, always_call=True).remove)
        yield


def _weight(layer: Any, weights: WeightFormat) -> torch.Tensor:
    """Return a layer's weight rounded; one row has the weights of one output, which GPT-2's layers hold as columns."""
    weight: torch.Tensor = layer.weight.data
    return weights.rounded(weight.T).T if type(layer).__name__ == "Conv1D" else weights.rounded(weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedAndRounded(Rounded):
    """A merge in a dtype whose sums, and all other weights, are then rounded to a format."""

    weights: WeightFormat

    def __str__(self) -> str:
        """Return the name of a pass with this merge."""
        return f"{Rounded.__str__(self)}, then {self.weights.name}"

    @contextmanager
    def of_the_rest(self, model: torch.nn.Module) -> Iterator[None]:
        """Round the weights of all layers as they run, after a layer's adapter is merged into it."""
        with rounded(model, self.weights):
            yield


def rounded_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers of a model whose weights engines round; none where some are quantized already."""
    base = base_of(model)
    of_adapter = {id(each) for _, layer in adapted_layers(model) for each in layer.modules() if each is not layer}
    of_bases = {id(layer.get_base_layer()) for _, layer in adapted_layers(model)}
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    # an adapter may be on the head, or save it whole
    of_head = set() if head is None else {id(module) for module in head.modules()}
    layers = []
    for module in base.modules():
        is_linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        is_of_the_base = id(module) not in of_adapter or id(module) in of_bases
        if not is_linear or not is_of_the_base or id(module) in of_head:
            continue
        if is_quantized(module.weight):
            return []
        layers.append(module)
    return layers
