"""The operations in steps of `consistency.numerics.running_error`, which give the exact value and the allowed error.

The steps are those of the least accurate method that libraries use: a layer norm's variance may be one pass over
squares, an attention in bfloat16 may store its scores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from consistency.numerics.running_error import Tracked


def linear(x: Tracked, weight: Tracked, bias: Tracked) -> Tracked:
    """Multiply by the transposed weight, and add the bias."""
    return (x.matmul(weight.moved(np.transpose)).store() + bias).store()


def _windows(x: Tracked, kernel: tuple[int, ...], stride: int) -> Tracked:
    """Return the values that the kernel multiplies at each place, `(batch, *places, channels * kernel)`."""

    def move(values: np.ndarray) -> np.ndarray:
        axes = tuple(range(2, 2 + len(kernel)))
        windows = np.lib.stride_tricks.sliding_window_view(values, kernel, axis=axes)
        strides = [slice(None, None, stride)] * len(kernel)
        windows = windows[(slice(None), slice(None), *strides)]
        windows = np.moveaxis(windows, 1, 1 + len(kernel))  # channels behind the places
        return windows.reshape(*windows.shape[: 1 + len(kernel)], -1)

    return x.moved(move)


def conv(kernel: tuple[int, ...], stride: int) -> Callable[[Tracked, Tracked, Tracked], Tracked]:
    """Return the steps of a convolution in one or two dimensions."""

    def exact(x: Tracked, weight: Tracked, bias: Tracked) -> Tracked:
        factors = weight.moved(lambda w: w.reshape(w.shape[0], -1).T)
        result = (_windows(x, kernel, stride).matmul(factors).store() + bias).store()
        return result.moved(lambda y: np.moveaxis(y, -1, 1))

    return exact


def depthwise(x: Tracked, weight: Tracked) -> Tracked:
    """Convolve each channel with a kernel of its own, in one dimension."""
    length = weight.value.shape[-1]
    windows = x.moved(lambda v: np.lib.stride_tricks.sliding_window_view(v, length, axis=2))
    factors = weight.moved(lambda w: np.swapaxes(w, 1, 2))
    return windows.matmul(factors).moved(lambda y: y[..., 0]).store()


def softmax(x: Tracked) -> Tracked:
    """Return the softmax of the last dimension, from differences to its largest element."""
    powers = (x - x.max()).exp()
    return powers / powers.sum()


def log_softmax(x: Tracked) -> Tracked:
    """Return the logarithm of the softmax."""
    shifted = x - x.max()
    return shifted - shifted.exp().sum().store().log().store()  # torch's CPU kernel keeps both in the half type


def mean(x: Tracked) -> Tracked:
    """Return the mean of the last dimension."""
    return x.sum() / _number(x, x.value.shape[-1])


def _number(x: Tracked, value: float) -> Tracked:
    """Return a number that every dtype has, in the arithmetic of x."""
    return x.by.known(np.asarray(float(value)))


def _variance(x: Tracked) -> Tracked:
    """Return the variance with the larger error of two ways: of the differences from the mean, or of the squares.

    Updating a mean as one goes (Welford) is between the two (Chan, Golub, LeVeque, *Algorithms for computing the sample
    variance*, 1983, table 1).
    """
    middle = mean(x)
    difference = x - middle
    two_passes, one_pass = mean(difference * difference), mean(x * x) - middle * middle
    return Tracked(value=two_passes.value, error=np.maximum(two_passes.error, one_pass.error), by=x.by)


def layer_norm(x: Tracked, weight: Tracked, bias: Tracked) -> Tracked:
    """Normalize by mean and variance, with the epsilon 1e-5."""
    inverse = (_variance(x) + x.by.constant(1e-5)).rsqrt()
    return ((x * inverse - mean(x) * inverse) * weight + bias).store()


def rms_norm(x: Tracked, weight: Tracked) -> Tracked:
    """Normalize by the mean square, with the epsilon 1e-6."""
    inverse = (mean(x * x) + x.by.constant(1e-6)).rsqrt()
    return ((x * inverse).store() * weight).store()


def gelu(x: Tracked) -> Tracked:
    """Return the exact GELU."""
    root_of_half = x.by.constant(0.5**0.5)
    return x * _number(x, 0.5) * ((x * root_of_half).erf() + _number(x, 1))


def gelu_tanh(x: Tracked) -> Tracked:
    """Return the GELU by the hyperbolic tangent."""
    cube = x.by.constant(0.044715) * (x * x * x)
    inner = x.by.constant((2 / np.pi) ** 0.5) * (x + cube)
    return x * _number(x, 0.5) * (inner.tanh() + _number(x, 1))


def silu(x: Tracked) -> Tracked:
    """Return x times its logistic function."""
    return x / (_number(x, 1) + (-x).exp())


def rsqrt(x: Tracked) -> Tracked:
    """Return one over the root."""
    # some kernels store the root before they divide
    return _number(x, 1) / x.sqrt().store()


def embedding(table: Tracked, ids: np.ndarray) -> Tracked:
    """Return rows of a table. No error is allowed: half the smallest number is less than any difference."""
    value = table.moved(lambda t: t[ids]).value
    floor = table.by.stored_floor or table.by.floor
    return Tracked(value=value, error=np.full(value.shape, floor), by=table.by)


def of_targets(logits: Tracked, targets: np.ndarray) -> Tracked:
    """Return the cross entropy of each row of logits, `(rows, classes)`, with its target."""
    entropies = -log_softmax(logits).store()
    return entropies.moved(lambda y: np.take_along_axis(y, targets[:, None], -1)[:, 0])


def attention(q: Tracked, k: Tracked, v: Tracked) -> Tracked:
    """Attend causally, the root of the scale on either side as torch's plain kernel does it, scores and weights stored.

    That kernel keeps half types in float32 where reductions may not lose digits; others do not, and where they store
    the scores a bound is some tenths of the result in bfloat16, some hundredths in float16.
    """
    length = q.value.shape[-2]
    return _attention(q, k, v, np.tri(length, dtype=bool))


def attention_to_all(q: Tracked, k: Tracked, v: Tracked) -> Tracked:
    """Attend to all keys, in the steps of `attention`."""
    return _attention(q, k, v, np.ones((q.value.shape[-2], k.value.shape[-2]), dtype=bool))


def _attention(q: Tracked, k: Tracked, v: Tracked, is_attended: np.ndarray) -> Tracked:
    """Attend to the keys of a mask, `(queries, keys)`."""
    width = q.value.shape[-1]
    root = q.by.constant(width**-0.25)
    keys = (k * root).store().moved(lambda x: np.swapaxes(x, -1, -2))
    scores = (q * root).store().matmul(keys).store()

    def masked(tracked: Tracked) -> Tracked:
        return tracked.moved(lambda x: np.where(is_attended, x, 0.0))

    largest = Tracked(
        value=np.where(is_attended, scores.value, -np.inf).max(-1, keepdims=True),
        error=np.where(is_attended, scores.error, 0.0).max(-1, keepdims=True),
        by=q.by,
    )
    # masked before, so that no power overflows, and after, so that none of a later position counts
    powers = masked(masked(scores - largest).exp())
    return (powers / powers.sum()).store().matmul(v).store()


def rotate(x: Tracked, cosines: Tracked, sines: Tracked) -> Tracked:
    """Turn pairs of features, as rotary positions do."""
    half = x.value.shape[-1] // 2

    def turn(values: np.ndarray) -> np.ndarray:
        return np.concatenate([-values[..., half:], values[..., :half]], axis=-1)

    turned = x.moved(turn)
    turned = Tracked(value=turned.value, error=np.abs(turned.error), by=x.by)  # an error has no sign
    return ((x * cosines).store() + (turned * sines).store()).store()
