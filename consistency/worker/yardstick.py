"""The CPU's own error for a device that may multiply in a lower precision: its code, with the device's products.

The `relative` rule allows a device twice the error that a correct machine makes. Which error that is depends on the
precision of the products that the settings in force permit there. The worker that makes the float64 reference measures
it for every precision that a worker of the run may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from consistency.devices.backends import CPU
from consistency.devices.products import Products, permitted
from consistency.devices.settings import with_implied
from consistency.numerics.precision import Precision
from consistency.numerics.reduced_products import ReducedProducts
from consistency.worker import determinism
from consistency.worker.precision import products_of
from consistency.worker.protocol import Job

_IN_FLOAT32 = {
    "float32_matmul_precision": "highest",
    "mkldnn_matmul_fp32_precision": "ieee",
    "mkldnn_conv_fp32_precision": "ieee",
}
_BY_FORMULA = {"sdpa_math": True, "sdpa_flash": False, "sdpa_mem_efficient": False, "sdpa_cudnn": False}
"""Settings of attention without a fused kernel, whose products could not be reached."""


def in_float32() -> AbstractContextManager[None]:
    """Compute float32 products on the CPU by the kernels for float32 alone, whatever the settings in force are."""
    return determinism.switched(**_IN_FLOAT32)


@contextmanager
def computing_with(products: Products) -> Iterator[None]:
    """Compute float32 products on the CPU as a device does, whatever the CPU's own settings are."""
    if not products.is_reduced and not products_of(torch.device(CPU)).is_reduced:
        yield
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
    """Return products of a model: one without convolutions does not tell their precisions apart."""
    if products.convolution is products.matmul:  # asked for every tensor, and there are thousands of modules
        return products
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in model.modules())
    return products if convolves else replace(products, convolution=products.matmul)


def name_of(products: Products) -> str:
    """Return the name under which the CPU's errors with such products are shared."""
    if products.matmul is products.convolution:
        return str(products.matmul)
    return f"{products.matmul}, convolutions {products.convolution}"


def others_of_run(job: Job, model: torch.nn.Module) -> dict[str, Products]:
    """Return, by name, the products for which the CPU's own passes in this process do not stand.

    They are what the settings of the run's workers permit, and float32 where the CPU itself is not in float32.
    """
    (settings, variables), own = determinism.meant(), products_of(torch.device(CPU))
    found = [own, *([Products()] if own.is_reduced else [])]
    for peer in job.peers:
        found.append(permitted(peer.type, {**settings, **with_implied(peer.settings)}, variables))
    named = {name_of(products): products for products in (products_in(model, one) for one in found)}
    return {name: products for name, products in named.items() if products.is_reduced or own.is_reduced}


PLAIN = str(Precision.FLOAT32)
