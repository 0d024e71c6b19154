"""Functions that people test, small, each with inputs and what it may be computed wrongly as."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as f

Function = Callable[..., Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal deviates, the same for each seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read_in_order(x: Tensor, *, offset: int | None = None) -> Tensor:
    """Return a tensor's elements as a kernel reads them that assumes it to be contiguous."""
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, offset)


def twice(x: Tensor) -> Tensor:
    return x * 2


def halves_in_one_accumulator(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply matrices with every partial sum rounded to the operands' dtype."""
    total = torch.zeros(*x.shape[:-1], weight.shape[-1], dtype=x.dtype)
    for k in range(x.shape[-1]):
        total = total + x[..., k : k + 1] * weight[..., k : k + 1, :]
    return total


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function, and what tests do to it.

    Attributes
    ----------
    terms : int
        How many each element of the result adds up: K.
    wrong : dict
        Ways to compute it wrongly, by the name of the fault.
    """

    function: Function
    shapes: tuple[tuple[int, ...], ...]
    terms: int = 1
    wrong: dict[str, Function] = field(default_factory=dict)
    whole: tuple[int, ...] = ()

    def inputs(self, seed: int = 0) -> list[Tensor]:
        """Draw the inputs; `whole` ones are indices below the number that stands there."""
        generator = torch.Generator().manual_seed(seed)
        found = [torch.randn(shape, generator=generator) for shape in self.shapes]
        if self.whole:
            found.append(torch.randint(0, self.whole[0], self.whole[1:], generator=generator))
        return found


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def rotated(x: Tensor, first: int = 0) -> Tensor:
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(first, first + x.shape[-2], dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float = 2.0) -> Tensor:
    return x @ weight.T + scale * ((x @ a.T) @ b.T)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return f.silu(x @ gate) * (x @ up)


def without_last(function: Function) -> Function:
    """Return a function that leaves out its last input, a bias."""
    return lambda *inputs: function(*inputs[:-1], torch.zeros_like(inputs[-1]))


def transposed(function: Function, place: int) -> Function:
    """Return a function that takes one square input transposed."""

    def wrong(*inputs: Tensor) -> Tensor:
        return function(*(one.transpose(-1, -2) if i == place else one for i, one in enumerate(inputs)))

    return wrong


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return f.linear(x, weight, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return f.layer_norm(x, x.shape[-1:], weight, bias, eps)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return f.group_norm(x, 4, weight, bias, eps)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return f.batch_norm(x, None, None, weight, bias, True, 0.1, eps)


def normalized(x: Tensor) -> Tensor:
    return f.normalize(x, dim=-1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v, is_causal=True)


def both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return f.scaled_dot_product_attention(q, k, v)


_M = ((24, 64), (64, 64))
_Q = ((2, 24, 16),) * 3

CASES: dict[str, Case] = {
    "matmul": Case(function=torch.matmul, shapes=_M, terms=64, wrong={
        "transposed": transposed(torch.matmul, 1), "rounded products": halves_in_one_accumulator}),
    "linear": Case(function=linear, shapes=(*_M, (64,)), terms=64, wrong={
        "transposed": transposed(linear, 1), "no bias": without_last(linear)}),
    "bmm": Case(function=torch.bmm, shapes=((3, 8, 32), (3, 32, 32)), terms=32, wrong={
        "transposed": transposed(torch.bmm, 1), "rounded products": halves_in_one_accumulator}),
    "einsum": Case(function=lambda a, b: torch.einsum("bik,bjk->bij", a, b), shapes=((2, 12, 48), (2, 12, 48)),
                   terms=48),
    "mlp": Case(function=lambda x, a, b: f.gelu(x @ a) @ b, shapes=((16, 32), (32, 32), (32, 32)), terms=32, wrong={
        "transposed": transposed(lambda x, a, b: f.gelu(x @ a) @ b, 1)}),
    "swiglu": Case(function=swiglu, shapes=((16, 32), (32, 48), (32, 48)), terms=32),
    "lora": Case(function=lora, shapes=((16, 48), (48, 48), (4, 48), (48, 4)), terms=48, wrong={
        "transposed": transposed(lora, 1), "no scale": lambda x, w, a, b: lora(x, w, a, b, 1.0)}),
    "softmax": Case(function=lambda x: torch.softmax(x, -1), shapes=((24, 64),), terms=64),
    "log softmax": Case(function=lambda x: torch.log_softmax(x, -1), shapes=((24, 64),), terms=64),
    "logsumexp": Case(function=lambda x: torch.logsumexp(x, -1), shapes=((96, 32),), terms=32),
    "rms norm": Case(function=rms_norm, shapes=((24, 64), (64,)), terms=64, wrong={
        "epsilon": lambda x, w: rms_norm(x, w, 1e-3)}),
    "layer norm": Case(function=layer_norm, shapes=((24, 64), (64,), (64,)), terms=64, wrong={
        "no bias": without_last(layer_norm), "epsilon": lambda x, w, b: layer_norm(x, w, b, 1e-3)}),
    "group norm": Case(function=group_norm, shapes=((2, 8, 32), (8,), (8,)), terms=64, wrong={
        "no bias": without_last(group_norm), "epsilon": lambda x, w, b: group_norm(x, w, b, 1e-3)}),
    "batch norm": Case(function=batch_norm, shapes=((32, 12), (12,), (12,)), terms=32, wrong={
        "no bias": without_last(batch_norm), "epsilon": lambda x, w, b: batch_norm(x, w, b, 1e-3)}),
    "normalize": Case(function=normalized, shapes=((24, 64),), terms=64),
    "gelu": Case(function=f.gelu, shapes=((24, 64),)),
    "silu": Case(function=f.silu, shapes=((24, 64),)),
    "tanh": Case(function=torch.tanh, shapes=((24, 64),)),
    "softplus": Case(function=f.softplus, shapes=((24, 64),)),
    "attention": Case(function=attention, shapes=_Q, terms=24, wrong={
        "no scale": lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v}),
    "fused attention": Case(function=causal, shapes=_Q, terms=24, wrong={"no mask": both_ways}),
    "conv1d": Case(function=lambda x, w, b: f.conv1d(x, w, b), shapes=((2, 8, 24), (8, 8, 3), (8,)), terms=24, wrong={
        "no bias": without_last(lambda x, w, b: f.conv1d(x, w, b))}),
    "conv2d": Case(function=lambda x, w, b: f.conv2d(x, w, b), shapes=((2, 4, 10, 10), (6, 4, 3, 3), (6,)), terms=36,
                   wrong={"no bias": without_last(lambda x, w, b: f.conv2d(x, w, b)),
                          "transposed": transposed(lambda x, w, b: f.conv2d(x, w, b), 1)}),
    "cross entropy": Case(function=lambda x, y: f.cross_entropy(x, y, reduction="none"), shapes=((96, 24),),
                          whole=(24, 96), terms=24),
    "squared error": Case(function=lambda x, y: (x - y).square().mean(-1), shapes=((64, 48), (64, 48)), terms=48),
    "cumsum": Case(function=lambda x: x.abs().cumsum(-1), shapes=((16, 64),), terms=64),
    "variance": Case(function=lambda x: x.var(-1), shapes=((96, 48),), terms=48),
    "rotary": Case(function=rotated, shapes=((2, 24, 16),), wrong={"off by one": lambda x: rotated(x, 1)}),
    "embedding": Case(function=lambda table, ids: f.embedding(ids, table) * 3.0, shapes=((32, 24),), whole=(32, 40)),
    "similarity": Case(function=lambda a, b: f.cosine_similarity(a, b, dim=-1), shapes=((96, 48), (96, 48)), terms=48),
    "spectrum": Case(function=lambda x: torch.fft.rfft(x.float()).abs().to(x.dtype), shapes=((16, 64),), terms=64),
    "index add": Case(function=lambda x, y, ids: x.index_add(0, ids, y), shapes=((8, 24), (64, 24)), whole=(8, 64),
                      terms=9),
}  # fmt: skip
