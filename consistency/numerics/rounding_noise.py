r"""Compute as any healthy device may: the same operations, with other rounding errors in each pass.

What a device may be off by depends on the order in which it adds, which no two libraries share. MKL adds in blocks, the
float32 products of a GPU in one accumulator per element: 4 times the error at 1024 terms, 10 times at 14 336. So the
CPU's own error says what its library does, and sometimes is 0 by luck. `RoundingNoise` puts errors in at random, of the
size that one accumulator makes, and the spread of the results is what rounding may do (Parker, *Monte Carlo
Arithmetic*, 1997; Denis et al., "Verificarlo", 2016).

**A sum of K terms** :math:`t_k` in one accumulator rounds each partial sum :math:`S_k`, by errors that are independent
and uniform in :math:`\pm u |S_k|`, of variance :math:`u^2 S_k^2 / 3` (Higham and Mary, SIAM J. Sci. Comput. 41, 2019,
A2815; Ipsen and Zhou, arXiv 1906.10465). For terms in random order that add up to r, :math:`S_k` is a random walk from
0 to r, a bridge: :math:`E S_k^2 = (k/K)^2 r^2 + (k (K - k) / K^2) \sum t^2`. Summed over k, and with the last store,

.. math:: \sigma^2 = u^2 \left( \frac{K}{18} \sum t_k^2 + \left( \frac{K}{9} + \frac 1 3 \right) r^2 \right).

The first part is that of factors :math:`1 + u \sqrt{K/18}\, z` on one operand, z normal, so that no sum of squares has
to be computed; the second is such a factor on the result. Terms of one sign are covered as those of both are.

Where partial sums are cut (`toward_zero`), each is off by u of itself in the mean, always to the same side. Term j is
in :math:`K - j + 1` of them, so it is off by :math:`u (K/2 + z K / \sqrt{12})` of itself, and the sum by K units, not
their root (AMD's CDNA3 adds so in matrix units: torch's issue 180926).

A **Fourier transform** of K elements rounds each in :math:`\log_2 K` stages. By Parseval's theorem that is as much
noise on its operand. A **factorization** is that of a matrix which is off by as much as products of its size are
(Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, chapters 9 and 10), so its operand has their noise.

**Every other result** is moved to a neighbour, 1 ± 2u, with a probability that gives the variance :math:`u^2 / 3` of
one rounding; of a library function four times that, for errors of up to an ULP. Operations that only move, choose or
compare values round nothing. What torch has as one operation and a device computes in steps (norms, softmax) is taken
apart by torch's own decompositions.

**Norms in a half type** compute in float32 and store once on the CPU and CUDA. Torch's own code for a device without
such a kernel (`math_native_layer_norm`) stores what is normalized, its product with the weight, and the sum with the
bias: three roundings. Torch's kernels for the CPU add up the gradients of a norm's weight and bias in the half type,
normalize a batch by statistics that are stored in it, and store the sum whose logarithm `log_softmax` takes. Every
other seed does all that.

**In a half type** products are exact in float32 and a store decides the error, which all devices make alike: 1.00 to
1.01 times the CPU's on emulated tensor cores of three generations. So the CPU's own rounding is enough, and what a pass
needs is other errors than the last one: a result is moved to a neighbour with a probability of 1/128, and all that
follows is rounded anew. Where a device may store partial sums of products in the half type, as cuBLAS does by default,
each of m rounds as a term in one accumulator does: the formula above with m for K and the type's own u.

The pass is computed in the tested dtype, so its own errors add to the noise. Root mean square of the error, in units of
the CPU's own, float32, 128 rows (`python -m benchmarks.rounding`): hidden size 128: one accumulator 1.0, noise 1.8;
512: 1.7 and 2.7; 2048: 3.3 and 5.0; gradients alike. bfloat16 and float16: noise 1.1 at every width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch._decomp import decomposition_table

from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.noise_pools import KEPT_SEEDS, LENGTH, STRIDE, Pools, kept_pools
from consistency.numerics.precision import partial_sums
from consistency.numerics.reduced_products import MATRIX_PRODUCTS
from consistency.numerics.rounding_operations import (
    REDUCING,
    RUNNING,
    RoundingKind,
    RoundingOperation,
    check_together,
    operation_of,
)

_aten = torch.ops.aten

_SCALED_NORMS = {_aten.native_layer_norm.default: (2, 3), _aten.native_group_norm.default: (1, 2)}
"""Norms, and where their weight and bias are among the arguments."""

HalfSums = Mapping[Any, Callable[[tuple[Any, ...]], int]]

NORM_GRADIENTS: HalfSums = {
    _aten.native_layer_norm_backward.default: lambda args: math.prod(args[1].shape) // math.prod(args[2]),
    _aten.native_group_norm_backward.default: lambda args: args[5] * args[7],
}
"""Backward passes of norms, each with a function of its arguments: how many rows the gradients of weight and bias
add up."""

_BATCH_NORMS = frozenset({_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default})

_HALF = frozenset({torch.float16, torch.bfloat16})

_SOURCES = {"embedding_dense_backward": 0, "index_put": 2}
"""Place of the added values among the arguments; 3 in all other accumulating operations."""

_CHOOSING = frozenset({"amax", "amin"})
"""Reductions of some of these operations that choose instead of adding: their gradient goes where the result is equal
to an element, so the result must stay one."""

_WITH_FLAGS = frozenset({"multilabel_margin_loss_forward"})
"""Operations whose further results are flags, stored as floating-point numbers."""

_TESTED = frozenset({torch.float32, torch.float16, torch.bfloat16})

_IN_FLOAT32 = frozenset({torch.float32, torch.complex64})

_SMALLEST = {dtype: torch.finfo(dtype).min for dtype in _TESTED}


@functools.cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _norm_with_stores(steps: Any, args: tuple[Any, ...], weight: int, bias: int) -> Any:
    """Compute a norm with two more stores: of the normalized values, and of their product with the weight.

    Parameters
    ----------
    steps : callable
        Torch's decomposition of the norm.
    args : tuple
        Its arguments.
    weight, bias : int
        Where weight and bias are among the arguments.
    """
    bare_args = list(args)
    bare_args[weight] = bare_args[bias] = None
    normalized, *statistics = steps(*bare_args)
    # along the last dimensions of a layer, along the channels of groups
    shape = args[1] if weight == 2 else (1, -1, *[1] * (args[0].dim() - 2))
    if args[weight] is not None:
        normalized = normalized * args[weight].reshape(shape)
    if args[bias] is not None:
        normalized = normalized + args[bias].reshape(shape)
    return (normalized, *statistics)


def _batch_norm_by_stored_statistics(steps: Any, args: tuple[Any, ...]) -> Any:
    """Normalize a batch by its mean and inverse deviation as they are stored in the half type.

    The running mean and variance, where there are any, are updated by statistics that are stored so too.
    """
    x, weight, bias, *running, _, momentum, _ = args
    _, *statistics = steps(x, weight, bias, None, None, *args[5:])
    channels = [dimension for dimension in range(x.dim()) if dimension != 1]
    wide = x.to(torch.float32)
    for average, statistic in zip(running, (wide.mean(channels), wide.var(channels)), strict=True):
        if average is not None:
            average.copy_(momentum * statistic.to(x.dtype) + (1 - momentum) * average)
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean, inverse = (statistic.to(x.dtype).to(torch.float32).reshape(shape) for statistic in statistics)
    result = (wide - mean) * inverse
    if weight is not None:
        result = result * weight.reshape(shape).to(torch.float32)
    if bias is not None:
        result = result + bias.reshape(shape).to(torch.float32)
    return (result.to(x.dtype), *statistics)


def _log_softmax_with_stored_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute the logarithm of softmax with a store of the sum whose logarithm is taken."""
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


class RoundingNoise(DispatchMode):
    """Add rounding errors to every floating-point result on the CPU while the mode is active.

    Attention has to be computed in steps (`sdpa_math`, or `FusedAttention`): those of a kernel cannot be reached.

    Parameters
    ----------
    seed : int
        Passes with other seeds have other errors; with one seed, equal passes have equal ones.
    partial_terms : mapping of torch.dtype to int, optional
        Half types in which partial sums of products may be stored, and the terms of each.
    toward_zero : bool, optional
        Each partial sum of float32 is cut instead of rounded.
    is_kept : bool, optional
        Keep the seed's pools for the next pass with it, 9 MB.
    half_sums : mapping, optional
        Backward passes of norms that may add up the gradients of parameters in the half type, as torch's kernels for
        the CPU do, each with a function of its arguments: how many rows they add up.
    together : bool, optional
        Refuse what may not be computed for several passes together, by a `NotTogetherError`.
    """

    _active: ClassVar[list[RoundingNoise]] = []

    def __init__(
        self,
        seed: int,
        *,
        partial_terms: Mapping[torch.dtype, int] | None = None,
        toward_zero: bool = False,
        is_kept: bool = False,
        half_sums: HalfSums = NORM_GRADIENTS,
        together: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        self._toward_zero = toward_zero
        self._half_sums = half_sums
        self._partial_terms = partial_terms or {}
        keeps_pools = is_kept or seed < KEPT_SEEDS
        self._pools = kept_pools(seed) if keeps_pools else Pools(seed)
        self._operations = 0
        self._together = together
        self._stores_steps = seed % 2 == 1  # every other seed, see "Norms in a half type" above

    def __enter__(self) -> RoundingNoise:
        RoundingNoise._active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        RoundingNoise._active.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    @contextmanager
    def repeating(cls, first: list[int]) -> Iterator[None]:
        """Compute a part of the active pass, if there is one; with the same list, again with the same errors.

        The list is empty before the first time, and then has the number of the operation at which the part began.
        """
        if not cls._active:
            yield
            return
        active = cls._active[-1]
        count_before = active._operations
        if not first:
            first.append(count_before)
            yield
            return
        active._operations = first[0]
        try:
            yield
        finally:
            active._operations = count_before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation, kwargs = operation_of(func), kwargs or {}
        kind = operation.kind
        if self._together:
            check_together(operation)
        if kind is RoundingKind.EXACT:
            return func(*args, **kwargs)
        if kind is RoundingKind.PRODUCT:
            return self._product(operation, args, kwargs)
        if kind is RoundingKind.IN_STEPS:
            return self._in_steps(func, args, kwargs)
        if kind is RoundingKind.CAST:
            return self._cast(operation, args, kwargs)
        if kind is RoundingKind.CONVOLUTION:
            return self._convolution(operation, args, kwargs)
        if kind is RoundingKind.ACCUMULATION:
            return self._accumulated(operation, args, kwargs)
        if kind is RoundingKind.TRANSFORM or kind is RoundingKind.FACTORIZATION:
            return self._noisy(operation, func(*self._perturbed(kind, args), **kwargs), args, 1)
        if kind is RoundingKind.SUM:
            return self._sum(operation, args, kwargs)
        return self._noisy(operation, func(*args, **kwargs), args, 1)

    def _in_steps(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operation by torch's decomposition, with noise on each step; of some, with more stores."""
        with self:  # torch leaves a mode while it dispatches to it, and the steps need noise too
            steps = decomposition_table.get(func, func.decompose)
            if self._stores_steps and args[0].dtype in _HALF:
                if func in _SCALED_NORMS:
                    return _norm_with_stores(steps, args, *_SCALED_NORMS[func])
                if func in self._half_sums:
                    return self._norm_gradients_in_half(steps, args, self._half_sums[func](args))
                if func in _BATCH_NORMS and args[5]:  # in training: else the statistics are given
                    return _batch_norm_by_stored_statistics(steps, args)
                if func is _aten._log_softmax.default and not args[2] and args[0].numel():
                    return _log_softmax_with_stored_sum(args[0], args[1])
            return steps(*args, **kwargs)

    def _sum(self, operation: RoundingOperation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute a sum with the noise of its partial sums."""
        terms = _count_terms(operation.name, args)
        if terms > 1 and _are_whole(args[0]):  # counts, which no device rounds
            return operation.func(*args, **kwargs)
        return self._noisy(operation, operation.func(*self._shaken(args, 0, terms), **kwargs), args, terms)

    def _product(self, operation: RoundingOperation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute a matrix product with the noise of its partial sums, put on the smaller factor and the result."""
        left, right = operation.factors
        terms = args[left].shape[-1]
        # noise on either factor does the same, and for the smaller one less of it is drawn
        smaller = left if args[left].numel() <= args[right].numel() else right
        terms_per_part = self._partial_terms.get(args[left].dtype)
        if terms_per_part and operation.func in MATRIX_PRODUCTS:
            parts = partial_sums(terms, terms_per_part)
            if parts > 1:
                return self._product_in_parts(operation, args, kwargs, smaller, parts)
        return self._noisy(operation, operation.func(*self._shaken(args, smaller, terms), **kwargs), args, terms)

    def _product_in_parts(
        self, operation: RoundingOperation, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, parts: int
    ) -> Any:
        """Multiply half types with the noise of `parts` partial sums that are stored in the type.

        Parameters
        ----------
        place : int
            Where the factor that gets noise is among the arguments.
        """
        unit = UNIT_ROUNDOFF[args[place].dtype] / UNIT_ROUNDOFF[torch.float32]
        wide = [_as_float32(value) for value in args]
        # the formula of one accumulator, with partial sums for terms and the half type's roundoff
        wide[place] = wide[place] * self._normal(unit * math.sqrt(parts / 18), wide[place])
        product = operation.func(*wide, **kwargs)
        return (product * self._normal(unit * math.sqrt(parts / 9 + 1 / 3), product)).to(args[place].dtype)

    def _norm_gradients_in_half(self, steps: Any, args: tuple[Any, ...], rows: int) -> Any:
        """Compute the gradients of a norm, with partial sums in the half type for the gradients of its parameters.

        The gradient of the input is computed apart, from the arguments as they are.
        """
        dtype, unit = args[0].dtype, UNIT_ROUNDOFF[args[0].dtype] / UNIT_ROUNDOFF[torch.float32]
        input_gradient, *plain_gradients = steps(*args)
        output_gradient, *wide = (_as_float32(value) for value in args)
        noisy_gradients = steps(output_gradient * self._normal(unit * math.sqrt(rows / 18), output_gradient), *wide)[1:]
        factor = unit * math.sqrt(rows / 9 + 1 / 3)
        parameter_gradients: list[torch.Tensor | None] = []
        for plain, noisy in zip(plain_gradients, noisy_gradients, strict=True):
            if plain is None:
                parameter_gradients.append(None)
            else:
                parameter_gradients.append((noisy * self._normal(factor, noisy)).to(dtype))
        return input_gradient, *parameter_gradients

    def _convolution(self, operation: RoundingOperation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute a convolution, or its gradients, with the noise of sums as long as its longest inner product."""
        if operation.func is _aten.convolution.default:
            weight, is_transposed = args[1], args[6]
            output_channels = weight.shape[1] if is_transposed else weight.shape[0]
            terms = weight.numel() // max(1, output_channels)
        else:
            gradient, weight = args[0], args[2]
            channels = gradient.shape[1]
            terms = max(weight.numel() // max(1, weight.shape[1]), gradient.numel() // max(1, channels))
        return self._noisy(operation, operation.func(*self._shaken(args, 0, terms), **kwargs), args, terms)

    def _perturbed(self, kind: RoundingKind, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands with the noise of all steps of a transform, or of a factorization, together."""
        if kind is RoundingKind.TRANSFORM:
            stages = math.log2(max(2, math.prod(args[0].shape[dimension] for dimension in args[1])))
            return self._shaken(args, 0, math.ceil(6 * stages))  # of a sum K / 18, of stages a third each
        for place, operand in enumerate(args):
            if isinstance(operand, torch.Tensor) and operand.dim():
                args = self._shaken(args, place, operand.shape[-1])
        return args

    def _accumulated(self, operation: RoundingOperation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operation that adds by index, with the noise of as many terms as there may be for one index."""
        name = operation.name
        options = {value for value in (*args, *kwargs.values()) if isinstance(value, str)}
        if _CHOOSING & options:  # it adds nothing
            return operation.func(*args, **kwargs)
        if name == "index_put" and not _accumulates(args, kwargs):
            return operation.func(*args, **kwargs)
        indices = [tensor for tensor in _tensors(args) if not tensor.is_floating_point()]
        terms = max(map(_count_indices, indices), default=1)
        source = _SOURCES.get(name, 3)
        return self._noisy(operation, operation.func(*self._shaken(args, source, terms), **kwargs), args, terms)

    def _cast(self, operation: RoundingOperation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Convert to another dtype, with noise where it is narrower."""
        result = operation.func(*args, **kwargs)
        source = args[1] if operation.name == "copy" else args[0]
        source_unit, result_unit = (UNIT_ROUNDOFF.get(tensor.dtype) for tensor in (source, result))
        if source_unit is None or result_unit is None or source_unit >= result_unit:
            return result
        return self._noisy(operation, result, args, 1)

    def _shaken(self, args: tuple[Any, ...], place: int, terms: int) -> tuple[Any, ...]:
        """Return the arguments with noise on the one at `place`: the effect of other orders on a sum of so many terms.

        They are returned as they are where nothing is added up, or where the operand is computed in another dtype than
        float32.
        """
        operand = args[place] if place < len(args) else None
        if terms < 2 or not isinstance(operand, torch.Tensor) or operand.dtype not in _IN_FLOAT32:
            return args
        if self._toward_zero:
            # the mean and the deviation of cut partial sums, see "Where partial sums are cut" above
            cut = self._normal(max(terms, 4) / math.sqrt(12), operand) - UNIT_ROUNDOFF[torch.float32] * terms / 2
            return (*args[:place], operand * cut, *args[place + 1 :])
        # with fewer terms the factors would be rounded to 1
        noise = self._normal(math.sqrt(max(terms, 18) / 18), operand)
        return (*args[:place], operand * noise, *args[place + 1 :])

    def _noisy(self, operation: RoundingOperation, result: Any, args: tuple[Any, ...], terms: int) -> Any:
        """Return a result with the noise of a sum of so many terms; a tensor written in place is written again."""
        if operation.is_mutable:
            # the result is the operand itself: noise has to be in its memory
            target = args[0]
            noisy = self._with_noise(target, terms, operation.kind)
            if noisy is not target:
                target.copy_(noisy)
            return result
        if operation.name in _WITH_FLAGS:
            return (self._with_noise(result[0], terms, operation.kind), *result[1:])
        if isinstance(result, (tuple, list)):
            return type(result)(self._with_noise(value, terms, operation.kind) for value in result)
        return self._with_noise(result, terms, operation.kind)

    def _with_noise(self, value: Any, terms: int, kind: RoundingKind) -> Any:
        """Return a tensor with noise on each element; anything that is not rounded as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype == torch.complex64 and value.layout is torch.strided:
            parts = torch.view_as_real(value.resolve_conj())
            return torch.view_as_complex(self._with_noise(parts, terms, kind).contiguous())
        if value.dtype not in _TESTED or not value.numel():
            return value
        if value.layout is not torch.strided or value._is_zerotensor():  # exact zeros, without memory to write noise to
            return value
        if terms > 1 and value.dtype == torch.float32:
            noise = self._normal(math.sqrt(terms / 9 + 1 / 3), value)
        else:
            noise = self._drawn(self._pools.moving(value.dtype, kind), value)
        noisy = value * noise
        if kind is RoundingKind.WITH_MASKS:  # one of the smallest number must not become one of minus infinity
            noisy = torch.maximum(noisy, value.clamp(max=_SMALLEST[value.dtype]))
        return noisy

    def _normal(self, units: float, like: torch.Tensor) -> torch.Tensor:
        """Return factors of a tensor's shape that differ from 1 by a normal deviate of so many unit roundoffs."""
        # a pool has at least eight times the elements of a small tensor, so none is made for it
        if like.numel() < LENGTH // 4:
            return 1 + self._drawn(self._pools.deviates, like) * (units * UNIT_ROUNDOFF[torch.float32])
        return self._drawn(self._pools.normal(units), like)

    def _drawn(self, pool: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return noise of a tensor's shape from a pool, from another place of it for each operation."""
        elements = like.numel()
        if elements <= LENGTH:
            self._operations += 1
            return pool.as_strided(like.shape, _strides(like.shape), self._operations * STRIDE % LENGTH)
        parts = []
        # the pool is too short for a large tensor: each stretch takes noise from another place
        for start in range(0, elements, LENGTH):
            self._operations += 1
            begin = self._operations * STRIDE % LENGTH
            parts.append(pool[begin : begin + min(LENGTH, elements - start)])
        return torch.cat(parts).view(like.shape)


def _as_float32(value: Any) -> Any:
    """Return a tensor in float32; anything else as it is."""
    return value.to(torch.float32) if isinstance(value, torch.Tensor) else value


def _accumulates(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Report whether an `index_put` adds to the elements instead of replacing them."""
    return bool(len(args) > 3 and args[3]) or bool(kwargs.get("accumulate", False))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in lists and tuples of any depth."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _count_terms(name: str, args: tuple[Any, ...]) -> int:
    """Return how many terms an operation adds into each element of its result; 1 where it adds none."""
    operand = args[0] if args else None
    if not isinstance(operand, torch.Tensor) or not operand.dim():
        return 1
    if name in RUNNING:  # the last element has all terms
        return max(1, int(operand.shape[args[1]]))
    if name not in REDUCING:
        return 1
    dimensions = next((value for value in args[1:] if _is_dimension(value)), None)
    if isinstance(dimensions, int):
        dimensions = [dimensions]
    elif not dimensions:  # none given: it adds along all
        dimensions = range(operand.dim())
    return max(1, math.prod(int(operand.shape[dimension]) for dimension in dimensions))


def _count_indices(index: torch.Tensor) -> int:
    """Return how often one index may occur among indices: along one dimension where there are several."""
    return index.numel() if index.dim() < 2 else max(index.shape)


def _are_whole(values: torch.Tensor) -> bool:
    """Report whether all values are whole numbers whose sums are exact."""
    if values.dtype not in _TESTED or not values.numel():
        return False
    first = values.reshape(-1)[:1]
    if bool(first % 1):  # the first element tells nearly always
        return False
    return torch.equal(values, values.round()) and float(values.abs().sum(dtype=torch.float64)) < 2**24


def _is_dimension(value: object) -> bool:
    """Report whether an argument is a dimension, or several; True and False are none."""
    if isinstance(value, (list, tuple)):
        return all(type(dimension) is int for dimension in value)
    return type(value) is int
