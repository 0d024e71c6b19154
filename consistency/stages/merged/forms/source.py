"""The source of a form: the settings of a layer, and the bytes of adapter and base in their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency.devices.products import Products
from consistency.numerics.dtype import name_of
from consistency.numerics.running_error import Arithmetic
from consistency.numerics.typed import HALF_TYPES, Typed
from consistency.worker.model.adapter_settings import stated_scaling
from consistency.worker.model.loading import ADAPTER_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One adapted layer as its files have it.

    Attributes
    ----------
    layer : Any
        PEFT's layer, of which only the settings are used.
    weight : torch.Tensor
        The weight before the merge, on the CPU.
    files : mapping of str to torch.Tensor
        The adapter's tensors by their names in the layer, on the CPU, in their dtypes on the device.
    products : Products
        Precisions of products that the settings in force permit on the device.
    on_cpu : bool
        Whether the device is a CPU.
    """

    layer: Any
    weight: torch.Tensor
    files: Mapping[str, torch.Tensor]
    products: Products = Products()
    on_cpu: bool = True

    def tensor(self, key: str) -> torch.Tensor | None:
        """Return the adapter's tensor of that name, None where its file has none."""
        tensor = self.files.get(f"{key}.{ADAPTER_NAME}")
        if tensor is None:  # a module has that name, not a parameter
            tensor = self.files.get(f"{key}.{ADAPTER_NAME}.weight")
        return tensor

    def known(self, key: str) -> Typed | None:
        """Return the adapter's tensor of that name as exact values, None where its file has none."""
        tensor = self.tensor(key)
        return None if tensor is None else Typed.known(tensor)

    def matmul(self, dtype: torch.dtype) -> Arithmetic:
        """Return how the device multiplies matrices of a dtype."""
        return self._arithmetic(dtype, convolution=False)

    def convolution(self, dtype: torch.dtype) -> Arithmetic:
        """Return how the device convolves in a dtype."""
        return self._arithmetic(dtype, convolution=True)

    def _arithmetic(self, dtype: torch.dtype, *, convolution: bool) -> Arithmetic:
        products = self.products.convolution if convolution else self.products.matmul
        return Arithmetic.of(
            dtype,
            truncating=not self.on_cpu,  # bfloat16 and float16 products run on matrix units there
            products=products,
            partial_terms=self.products.partial_terms.get(name_of(dtype)),
        )

    def computed_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which PEFT multiplies the factors of a LoRA: on a CPU, half types in float32."""
        return torch.float32 if self.on_cpu and dtype in HALF_TYPES else dtype

    def lycoris_scaling(self) -> float:
        """Return the scaling of a LyCORIS method: alpha over rank."""
        return float(self.layer.alpha[ADAPTER_NAME]) / int(self.layer.r[ADAPTER_NAME])

    def lora_scaling(self) -> float:
        """Return the scaling of a LoRA: alpha over rank, or over its square root, as the configuration asks."""
        return stated_scaling(self.layer)
