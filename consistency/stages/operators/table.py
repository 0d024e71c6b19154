"""The fixed list of small operations of the stage `operators`, each with its exact value and derived bound.

Each computation is written twice: in torch, as a model calls it, and in the steps of `exact_forms`. Inputs come from
NumPy's generators, because torch's own differ between kernels, and are exact in the tested dtype.

Long inner products take values of one sign: there a bound that grows with the length stays small compared with the
result, and an operand that is cut to TF32 moves all terms the same way. Convolutions have strides or one channel per
group, as in transformers: libraries have no transform (Winograd, FFT) for these, whose error is spread over a tile.

Largest ratio of error to bound of healthy kernels, over the native kernels, `baseline` and `avx2` of an x86
processor with AVX-512 (torch 2.13, one thread), at the level `thorough`:

=============  =======  ========  =======  =======
operation      float32  bfloat16  float16  float64
=============  =======  ========  =======  =======
matmul            0.10      0.99     0.98     0.03
linear            0.03      0.64     0.52     0.02
bmm               0.11      0.97     0.95     0.04
conv1d            0.51      0.96     0.96        –
conv2d            0.02      0.48     0.45        –
embedding         0.00      0.00     0.00        –
softmax           0.07      0.98     1.00        –
log_softmax       0.10      0.88     0.93        –
layer_norm        0.22      0.98     0.96        –
rms_norm          0.03      0.49     0.49        –
gelu              0.23      0.97     0.94        –
gelu_tanh         0.33      0.99     0.96        –
silu              0.29      0.94     0.97        –
exp               0.16      0.98     0.99        –
tanh              0.09      0.95     0.99        –
rsqrt             0.13      0.74     0.75        –
sin               0.12      0.97     0.95        –
cos               0.13      0.92     0.97        –
sum               0.00      0.66     0.50        –
mean              0.00      0.91     0.66        –
cumsum            0.00         –        –        –
cross_entropy     0.07      0.65     0.69        –
attention         0.01      0.02     0.02        –
rotary            0.89      0.81     0.79        –
adamw             0.67         –        –        –
=============  =======  ========  =======  =======

One rounding to a half type uses its whole bound, so those columns end near 1.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as nn

from consistency.case.stage import Level
from consistency.numerics.running_error import Tracked
from consistency.stages.operators import exact_forms
from consistency.worker.training import adamw

SEED = 2521

ALL: tuple[str, ...] = ("float32", "bfloat16", "float16")
WITH_FLOAT64: tuple[str, ...] = (*ALL, "float64")
FLOAT32: tuple[str, ...] = ("float32",)

Arrays = tuple[np.ndarray, ...]
Draw = Callable[[np.random.Generator], Arrays]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on inputs of a fixed size."""

    name: str
    """`matmul`."""
    size: str
    """Short and fixed: it identifies records across runs."""
    draw: Draw
    """Makes the inputs: float64, which are rounded to the tested dtype, or integers."""
    compute: Callable[..., torch.Tensor]
    """Computes the result from the inputs as tensors on the device."""
    exact: Callable[..., Tracked]
    """Computes the exact result and its bound from the inputs as `Tracked`, integers unchanged."""
    _: KW_ONLY
    dtypes: tuple[str, ...] = ALL
    level: Level = Level.STANDARD
    """The lowest level at which the operation is tried."""
    multiplies: bool = False
    """Whether it consists of products, which a unit could compute in TF32."""
    kernel: str | None = None
    """Kernel that a backend needs for the bound of half types to hold: without it torch composes the operation of
    others, and stores the values in between in the half type."""

    def row(self, dtype: str) -> str:
        """Return the name of the operation's row in reports."""
        return f"{dtype} {self.size}"

    def inputs(self) -> Arrays:
        """Return the inputs, which do not depend on the other operations."""
        own_seed = zlib.crc32(f"{self.name} {self.size}".encode())
        return self.draw(np.random.Generator(np.random.PCG64([SEED, own_seed])))


def operations(level: Level) -> tuple[Operation, ...]:
    """Return the operations of a level."""
    order = list(Level)
    return tuple(operation for operation in _OPERATIONS if order.index(operation.level) <= order.index(level))


def _normal(*shapes: tuple[int, ...], scale: float = 1.0) -> Draw:
    return lambda g: tuple(scale * g.standard_normal(shape) for shape in shapes)


def _between(low: float, high: float, *shapes: tuple[int, ...]) -> Draw:
    return lambda g: tuple(g.uniform(low, high, shape) for shape in shapes)


def _matmul(rows: int, terms: int, columns: int, *, positive: bool = False, **options: Any) -> Operation:
    draw = _normal((rows, terms), (terms, columns))
    if positive:  # long products: see the docstring of this module
        draw = _between(0.25, 1, (rows, terms), (terms, columns))
    return Operation(
        "matmul",
        f"{rows}x{terms}x{columns}",
        draw,
        torch.matmul,
        lambda a, b: a.matmul(b).store(),
        dtypes=WITH_FLOAT64,
        multiplies=True,
        **options,
    )


def attention(
    batch: int, heads: int, queries: int, width: int, *, keys: int | None = None, **options: Any
) -> Operation:
    """Return causal attention, or with `keys` that of queries which see them all, as a decoding step does.

    Values are of one sign: there a bound is small compared with the result, however many keys there are.
    """
    own = (batch, heads, queries, width)
    others = own if keys is None else (batch, heads, keys, width)

    def draw(generator: np.random.Generator) -> Arrays:
        values = generator.uniform(0.25, 1, others)
        return generator.standard_normal(own), generator.standard_normal(others), values

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.scaled_dot_product_attention(q, k, v, is_causal=keys is None)

    exact = exact_forms.attention if keys is None else exact_forms.attention_to_all
    size = "x".join(map(str, own)) + (" causal" if keys is None else f" with {keys} keys")
    return Operation("attention", size, draw, compute, exact, multiplies=True, **options)


def _elementwise(
    name: str,
    compute: Callable[..., torch.Tensor],
    exact: Callable[[Tracked], Tracked],
    low: float,
    high: float,
    level: Level = Level.STANDARD,
) -> Operation:
    draw = _between(low, high, (2048,))
    return Operation(name, "2048", draw, compute, lambda x: exact(x).store(), level=level)


def _rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


def _draw_rotary(g: np.random.Generator) -> Arrays:
    angles = np.arange(32)[:, None] * 10000.0 ** -(np.arange(0, 32, 2) / 32)
    angles = np.concatenate([angles, angles], axis=-1)
    return g.standard_normal((2, 32, 32)), np.cos(angles), np.sin(angles)


def _draw_adamw(g: np.random.Generator) -> Arrays:
    parameter, gradient, first = g.standard_normal((3, 1024)) * np.array([[0.1], [1.0], [0.3]])
    return parameter, gradient, first, g.uniform(0.1, 1, 1024)


_STEPS = 9  # far enough from the first step, whose moments are zero


def _adamw(p: torch.Tensor, g: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return adamw.step(p, g, adamw.Moments(first=first, second=second, steps=_STEPS))


def _ids(g: np.random.Generator) -> Arrays:
    return g.standard_normal((97, 48)), g.integers(0, 97, (4, 16))


def _logits(g: np.random.Generator) -> Arrays:
    return 3 * g.standard_normal((32, 211)), g.integers(0, 211, 32)


def _every_second(values: np.ndarray) -> np.ndarray:
    return values[:, ::2]


_OPERATIONS: tuple[Operation, ...] = (
    _matmul(64, 64, 64, level=Level.QUICK),
    _matmul(17, 33, 29),
    _matmul(256, 32, 8),
    _matmul(4, 1024, 64, positive=True, level=Level.QUICK),
    _matmul(1, 4096, 16, positive=True),
    _matmul(512, 512, 512, level=Level.THOROUGH),
    _matmul(128, 8192, 96, positive=True, level=Level.THOROUGH),
    Operation(
        "linear", "32x96x80", _normal((32, 96), (80, 96), (80,)), nn.linear, exact_forms.linear,
        dtypes=WITH_FLOAT64, multiplies=True, level=Level.QUICK,
    ),
    Operation(
        "bmm", "6x16x32x24", _normal((6, 16, 32), (6, 32, 24)), torch.bmm, lambda a, b: a.matmul(b).store(),
        dtypes=WITH_FLOAT64, multiplies=True,
    ),
    Operation(
        "conv1d", "2x24x33 kernel 3 stride 2", _normal((2, 24, 33), (16, 24, 3), (16,)),
        functools.partial(nn.conv1d, stride=2), exact_forms.conv((3,), 2), multiplies=True,
    ),
    Operation(
        "conv1d", "2x32x29 kernel 4 depthwise", _normal((2, 32, 29), (32, 1, 4)),
        functools.partial(nn.conv1d, groups=32), exact_forms.depthwise, multiplies=True,
    ),
    Operation(
        "conv2d", "2x3x32x32 kernel 8 stride 8", _normal((2, 3, 32, 32), (24, 3, 8, 8), (24,)),
        functools.partial(nn.conv2d, stride=8), exact_forms.conv((8, 8), 8), multiplies=True,
    ),
    Operation("embedding", "97x48 4x16", _ids, lambda table, ids: nn.embedding(ids, table), exact_forms.embedding),
    Operation(
        "softmax", "16x257", _normal((16, 257), scale=3), functools.partial(nn.softmax, dim=-1),
        lambda x: exact_forms.softmax(x).store(), level=Level.QUICK,
    ),
    Operation(
        "log_softmax", "16x257", _normal((16, 257), scale=3), functools.partial(nn.log_softmax, dim=-1),
        lambda x: exact_forms.log_softmax(x).store(),
    ),
    Operation(
        "layer_norm", "16x192", _normal((16, 192), (192,), (192,)),
        lambda x, weight, bias: nn.layer_norm(x, (192,), weight, bias, 1e-5), exact_forms.layer_norm,
        level=Level.QUICK, kernel="aten::native_layer_norm",
    ),
    Operation(
        "rms_norm", "16x192", _normal((16, 192), (192,)), lambda x, weight: nn.rms_norm(x, (192,), weight, 1e-6),
        exact_forms.rms_norm,
    ),
    _elementwise("gelu", nn.gelu, exact_forms.gelu, -5, 5),
    _elementwise("gelu_tanh", functools.partial(nn.gelu, approximate="tanh"), exact_forms.gelu_tanh, -5, 5),
    _elementwise("silu", nn.silu, exact_forms.silu, -10, 10),
    _elementwise("exp", torch.exp, Tracked.exp, -9, 9, level=Level.QUICK),
    _elementwise("tanh", torch.tanh, Tracked.tanh, -4, 4),
    _elementwise("rsqrt", torch.rsqrt, exact_forms.rsqrt, 1e-3, 9),
    _elementwise("sin", torch.sin, Tracked.sin, -64, 64),
    _elementwise("cos", torch.cos, Tracked.cos, -64, 64),
    Operation("sum", "8x256", _normal((8, 256)), lambda x: x.sum(-1, keepdim=True), lambda x: x.sum().store()),
    Operation(
        "mean", "8x2048", _between(0, 1, (8, 2048)), lambda x: x.mean(-1, keepdim=True),
        lambda x: exact_forms.mean(x).store(),
    ),
    # in which dtype a scan or this mean adds up half types is left to the backend
    Operation(
        "cumsum", "8x256", _normal((8, 256)), functools.partial(torch.cumsum, dim=-1), Tracked.cumsum, dtypes=FLOAT32
    ),
    Operation(
        "cross_entropy", "32x211 mean", _logits, lambda x, ids: nn.cross_entropy(x, ids)[None],
        lambda x, ids: exact_forms.mean(exact_forms.of_targets(x, ids)), dtypes=FLOAT32,
    ),
    Operation(
        "cross_entropy", "32x211", _logits, functools.partial(nn.cross_entropy, reduction="none"),
        exact_forms.of_targets,
    ),
    Operation(
        # fused kernels want a head size that 8 divides (torch's sdp_utils.cpp), and models have 64 or 128
        "attention", "2x4x24x64 causal", _normal(*[(2, 4, 24, 64)] * 3),
        functools.partial(nn.scaled_dot_product_attention, is_causal=True), exact_forms.attention, multiplies=True,
    ),
    # operands that are not contiguous: kernels read these by strides, or copy them first
    Operation(
        "matmul", "17x33x29 transposed", _normal((33, 17), (29, 33)), lambda a, b: torch.matmul(a.T, b.T),
        lambda a, b: a.moved(np.transpose).matmul(b.moved(np.transpose)).store(), dtypes=WITH_FLOAT64, multiplies=True,
    ),
    Operation(
        "linear", "32x96x80 strided", _normal((32, 192), (80, 192), (80,)),
        lambda x, weight, bias: nn.linear(x[:, ::2], weight[:, ::2], bias),
        lambda x, weight, bias: exact_forms.linear(x.moved(_every_second), weight.moved(_every_second), bias),
        multiplies=True,
    ),
    Operation(
        "softmax", "16x257 transposed", _normal((257, 16), scale=3), lambda x: nn.softmax(x.T, dim=-1),
        lambda x: exact_forms.softmax(x.moved(np.transpose)).store(),
    ),
    Operation(
        "exp", "64x32 strided", _between(-9, 9, (64, 64)), lambda x: torch.exp(x[:, ::2]),
        lambda x: x.moved(_every_second).exp().store(),
    ),
    attention(1, 4, 1, 64, keys=515),
    attention(9, 2, 7, 128),
    Operation("rotary", "2x32x32", _draw_rotary, _rotary, exact_forms.rotate),
    Operation(
        "adamw", "1024", _draw_adamw, _adamw, functools.partial(adamw.exact_step, steps=_STEPS), dtypes=FLOAT32
    ),
)  # fmt: skip
