"""Noisy passes: passes on the CPU with random rounding errors in a device's precision, which show what rounding may do.

The `relative` rule allows a device the error that rounding makes, which passes with random rounding errors show
(`consistency.numerics.rounding_noise`). How large it is depends on the precision of the products that the settings in
force permit there: the worker that makes the float64 reference computes the passes for every precision that a worker of
the run may have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch

from consistency.devices.backends import CPU
from consistency.devices.products import Products, permitted
from consistency.devices.settings import with_implied
from consistency.numerics.dtype import name_of as name_of_dtype
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import Readable
from consistency.numerics.fused_attention import FusedAttention
from consistency.numerics.precision import Precision
from consistency.numerics.real import Real
from consistency.numerics.reduced_products import ReducedProducts
from consistency.numerics.rounding_noise import NORM_GRADIENTS, HalfSums, RoundingNoise
from consistency.numerics.rules import RoundingError
from consistency.worker import determinism
from consistency.worker.bound_kernels import multiplies_in_triton
from consistency.worker.precision import products_of
from consistency.worker.protocol import Job

Drawn = TypeVar("Drawn")

_IN_FLOAT32 = {
    "float32_matmul_precision": "highest",
    "mkldnn_matmul_fp32_precision": "ieee",
    "mkldnn_conv_fp32_precision": "ieee",
}
_BY_FORMULA = {"sdpa_math": True, "sdpa_flash": False, "sdpa_mem_efficient": False, "sdpa_cudnn": False}
"""Settings of attention by its formula: the steps of the CPU's fused kernels could not be reached by noise."""

PLAIN = str(Precision.FLOAT32)
"""The name of float32 products."""

ENOUGH = 16
"""Number of independent errors of a tensor that is enough: a device may exceed the largest of them 6.8 to 8.3 times
where it makes 1 to 16 itself (`rules.error_factor`); with twice as many it would be 4.2 to 4.8 times."""

MOST_PASSES = 16
"""Largest number of noisy passes: with one error in each, for a model of a single row, that factor is 6.8."""

_PRODUCTS_AT_MOST = 1 << 35
"""Largest number of multiplications of all passes: a core computes them in a second or two."""


def in_float32() -> AbstractContextManager[None]:
    """Compute float32 products on the CPU by the kernels for float32 alone, whatever the settings in force are."""
    return determinism.switched(**_IN_FLOAT32)


def by_formula() -> AbstractContextManager[None]:
    """Compute attention by its formula, without a fused kernel."""
    return determinism.switched(**_BY_FORMULA)


@contextmanager
def computing_with(products: Products) -> Iterator[None]:
    """Compute float32 products on the CPU as a device does, whatever the CPU's own settings are."""
    if not products.is_reduced and not products_of(torch.device(CPU)).is_reduced:
        yield  # the CPU computes in float32 already
    elif not products.is_reduced:
        with in_float32():
            yield
    else:
        with (
            determinism.switched(**_IN_FLOAT32, **_BY_FORMULA),
            ReducedProducts(matmul=products.matmul, convolution=products.convolution),
        ):
            yield


def products_in(model: torch.nn.Module, products: Products) -> Products:
    """Return products without what a model has none of: convolutions, and partial sums in dtypes that it does not use.

    Workers that differ in these alone compute the model alike, and share their noisy passes.
    """
    if products.partial_terms:
        stored = {name_of_dtype(parameter.dtype) for parameter in model.parameters()}
        partial = {name: terms for name, terms in products.partial_terms.items() if name in stored}
        products = replace(products, partial_terms=partial)
    if products.convolution is products.matmul:  # asked for every tensor, and there are thousands of modules
        return products
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    return products if convolves else replace(products, convolution=products.matmul)


def name_of(products: Products) -> str:
    """Return the name under which the errors with such products are shared: `tf32, convolutions float32`."""
    name = str(products.matmul)
    if products.matmul is not products.convolution:
        name += f", convolutions {products.convolution}"
    for dtype, terms in sorted(products.partial_terms.items()):
        sums = "sums" if terms == 1 else "partial sums"
        name += f", {sums} in {dtype}"
    return name


def products_on(model: torch.nn.Module, device: torch.device | str) -> str:
    """Return the name of the products that a device may compute a model with."""
    device = torch.device(device)
    return name_of(products_in(model, _with_bound(model, device.type, products_of(device))))


def _with_bound(model: torch.nn.Module, kind: str, products: Products) -> Products:
    """Return products with those of packages whose kernels compute parts of a model on this type of device.

    Triton's kernels multiply in TF32 where torch's settings do not permit that to torch.
    """
    is_reduced = kind == "cuda" and products.matmul is Precision.FLOAT32 and multiplies_in_triton(model)
    return replace(products, matmul=Precision.TF32) if is_reduced else products


def products_of_run(job: Job, model: torch.nn.Module) -> dict[str, Products]:
    """Return the products with which the workers of a run compute, and float32 products, by name."""
    settings, variables = determinism.settings_to_judge_by()
    products_of_workers = [Products(), products_of(torch.device(CPU))]
    for peer in job.peers:
        products = permitted(peer.type, {**settings, **with_implied(peer.settings)}, variables)
        products_of_workers.append(_with_bound(model, peer.type, products))
    by_name: dict[str, Products] = {}
    for products in products_of_workers:
        products_of_model = products_in(model, products)
        by_name[name_of(products_of_model)] = products_of_model
    return by_name


@contextmanager
def with_noise(
    products: Products,
    seed: int,
    *,
    toward_zero: bool = False,
    is_kept: bool = False,
    half_sums: HalfSums = NORM_GRADIENTS,
    together: bool = False,
) -> Iterator[None]:
    """Compute on the CPU as a healthy device with such products may, with other rounding errors for each seed.

    A device may have attention by a fused kernel, or by its formula: every other pass is one, from the first on. The
    options are those of `RoundingNoise`.
    """
    # passes together have no attention: a mode of functions sees each of their many calls, in twice the time
    attention = nullcontext() if seed % 2 or together else FusedAttention()
    partial = {getattr(torch, dtype): terms for dtype, terms in products.partial_terms.items()}
    noise = RoundingNoise(
        seed, partial_terms=partial, toward_zero=toward_zero, is_kept=is_kept, half_sums=half_sums, together=together
    )
    with computing_with(products), by_formula(), attention, noise:
        yield


def passes_for(multiplications: int) -> range:
    """Return the range of the number of noisy passes to compute, by the multiplications of one of them."""
    most = min(MOST_PASSES, max(1, _PRODUCTS_AT_MOST // max(1, multiplications)))
    return range(min(2, most), most + 1)


def is_large(passes: range) -> bool:
    """Report whether a model is so large that one pass with noise is a good part of the work."""
    return passes.stop <= 2


def draw(
    products: Products, passes: range, compute: Callable[[], Drawn], count: Callable[[Drawn], Mapping[str, int]]
) -> list[Drawn]:
    """Compute noisy passes until each tensor has enough independent errors.

    Parameters
    ----------
    passes : range
        Least and largest number of passes.
    compute : callable
        Computes one pass.
    count : callable
        Returns the number of independent errors in one pass, by name of the tensor.
    """
    drawn: list[Drawn] = []
    errors: Counter[str] = Counter()
    while len(drawn) < passes.start or (len(drawn) < passes.stop - 1 and min(errors.values(), default=ENOUGH) < ENOUGH):
        with with_noise(products, seed=len(drawn)):
            drawn.append(compute())
        if len(passes) > 1:  # else the number of passes does not depend on their errors
            errors.update(count(drawn[-1]))
    return drawn


def rounding_error(
    drawn: Iterable[Readable], exact: Readable, samples: Callable[[Readable, Readable], int]
) -> RoundingError:
    """Measure the tensors of noisy passes against the exact one; `samples` counts the independent errors in one."""
    counts, errors = [], []
    for tensor in drawn:
        counts.append(samples(tensor, exact))
        errors.append(float(measure_against_exact(tensor, exact).max_abs))
    # max() of values among which is NaN depends on their order
    largest = math.nan if any(math.isnan(error) for error in errors) else max(errors)
    samples_of_one = -(-sum(counts) // len(counts))  # rounded up
    return RoundingError(largest=Real(largest), samples=samples_of_one, drawn=sum(counts))
