"""Functions of other packages that transformers binds into a model's code: on the CPU the model's own code runs.

Where fla, mamba_ssm or causal_conv1d are installed, their functions take the place of transformers' own as a model's
module is imported, whatever device it is for. They run on a GPU alone, so that a float64 pass, a pass with noise, and
the CPU as a device would have no result.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

_BINDER = "use_kernel_func_from_hub_with_fallback"
"""Transformers' decorator of a function that a package's may replace."""

BOUND: dict[str, str] = {}
"""The package of each function that is bound in this process, by the function's name."""

_IN_TRITON = ("fla", "mamba_ssm")
"""Packages whose products are Triton's: of float32 in TF32, whatever torch's switches say (`tl.dot`)."""

_modules_with_triton: set[str] = set()
"""Python modules of models whose code calls functions of these packages."""


def multiplies_in_triton(model: torch.nn.Module) -> bool:
    """Report whether a model's code calls a bound function that may multiply float32 in TF32."""
    if not _modules_with_triton:
        return False
    return any(type(module).__module__ in _modules_with_triton for module in model.modules())


def choose_by_device() -> None:
    """Let transformers bind packages' functions for other devices than the CPU alone.

    It has to be called before a model's Python module is imported.
    """
    from transformers import integrations
    from transformers.integrations import hub_kernels

    real = getattr(hub_kernels, _BINDER, None)
    if real is None or getattr(real, "chooses_by_device", False):  # another version of transformers, or done
        return

    @functools.wraps(real)
    def bind(name: str, package: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        decorate: Callable[[Any], Any] = real(name, package, *args, **kwargs)
        if importlib.util.find_spec(package) is None:
            return decorate
        return functools.partial(_bind_by_device, name, package, decorate)

    bind.chooses_by_device = True  # type: ignore[attr-defined]
    for module in (hub_kernels, integrations):
        setattr(module, _BINDER, bind)


def _bind_by_device(name: str, package: str, decorate: Callable[[Any], Any], function: Callable[..., Any]) -> Any:
    """Return a function that calls the package's on a device, and the model's own one on the CPU.

    Parameters
    ----------
    decorate : callable
        Transformers' decorator, which returns the package's function in place of the model's own `function`.
    """
    bound, accepted = decorate(function), inspect.signature(function).parameters
    BOUND[name] = package
    if package in _IN_TRITON:
        _modules_with_triton.add(function.__module__)

    @functools.wraps(bound)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if first is None or first.device.type != "cpu":
            return bound(*args, **kwargs)
        # a package's function may have options that the model's own one has not
        return function(*args, **{key: value for key, value in kwargs.items() if key in accepted})

    return call
