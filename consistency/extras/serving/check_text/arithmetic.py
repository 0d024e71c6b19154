"""How an engine may compute otherwise than in the model's dtype: its cache in a narrower one, or all of it.

A cache in a narrower dtype rounds every key and value once, by an error that depends on their last bits, so no pass of
ours has the engine's own errors: passes with noise get random ones of the same size, and what rounding may do is as
much wider. Where an engine computes in a narrower dtype than the model's, passes with noise are those of the model in
that dtype, whose weights are rounded to it as the engine rounds them.

Every engine takes log probabilities from its logits in float32, and adds up as many exponentials as there are tokens in
the vocabulary, in an order of its own (`log_softmax_error`). Nothing else is widened: that an engine's SiLU is an
approximation of a few units in the last place of float32 is within what passes with noise allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from consistency.extras.serving.check_text.sampling import KV_DTYPES
from consistency.extras.serving.engines import ENGINES
from consistency.numerics.rules import FALSE_ALARM, UNIT_ROUNDOFF

INT8 = "int8"
_STEPS_OF_INT8 = 127
"""Steps of 8 bits between zero and the largest magnitude of a token's keys in one head."""

_RELATIVE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""Largest relative error of one rounding to a dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArithmetic:
    """How a writer computes.

    Attributes
    ----------
    kv_dtype : str
        Dtype in which keys and values are kept; empty for the model's own.
    computes_in : str
        Dtype in which all is computed, of a model in a wider one; empty for the model's own.
    """

    kv_dtype: str = ""
    computes_in: str = ""

    def __str__(self) -> str:
        """Return what differs, as the end of "explained by": `keys and values in float16`; empty where nothing does."""
        named = []
        if self.computes_in:
            named.append(f"computing in {self.computes_in}")
        if self.kv_dtype:
            named.append(f"keys and values in {self.kv_dtype}")
        return " with ".join(named)

    def of_parameters(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the parameters of a model are in the dtype of this arithmetic."""
        return _parameters_in(model, getattr(torch, self.computes_in)) if self.computes_in else nullcontext()

    def of_cache(self, seed: int) -> AbstractContextManager[Any]:
        """Return a context in which errors of a rounded cache are added to keys and values."""
        return RoundedCache(self.kv_dtype, seed) if self.kv_dtype else nullcontext()


def log_softmax_error(vocabulary: int) -> float:
    r"""Return by how much a float32 sum of a vocabulary's exponentials may move all log probabilities of a place.

    The relative error of a sum of n positive terms, added up in any order, is at most :math:`\lambda \sqrt n u` but for
    a probability of :math:`2 n e^{-\lambda^2 / 2}`, here 10⁻⁹ (Higham and Mary, *A new approach to probabilistic
    rounding error analysis*, 2019), and so is the absolute error of its logarithm. That takes errors for independent,
    which those of terms too small to count are not: added up one by one, without any partial sums, 50,000 of them were
    off by 1.2 times this; in four partial sums, as the narrowest vector units have, by a third. An exponential that is
    off by a few units in its last place adds as much once, not n times.
    """
    lambda_ = math.sqrt(2 * math.log(2 * vocabulary / FALSE_ALARM))
    return lambda_ * math.sqrt(vocabulary) * UNIT_ROUNDOFF["float32"]


OWN = EngineArithmetic()
"""The model's own dtype throughout."""


def of_engine(name: str, dtype: str) -> EngineArithmetic:
    """Return the arithmetic that an engine has by default with a model in a dtype; an empty name is of none."""
    if not name:
        return OWN
    engine = ENGINES[name]
    computes_in = engine.computes_in.get(dtype, "")
    kv_dtype = engine.kv_dtypes.get(dtype, "")
    if computes_in and kv_dtype and UNIT_ROUNDOFF[kv_dtype] <= UNIT_ROUNDOFF[computes_in]:
        kv_dtype = ""  # which rounds no more than all else does
    return EngineArithmetic(kv_dtype=kv_dtype, computes_in=computes_in)


def engines_with(arithmetic: EngineArithmetic, dtype: str) -> list[str]:
    """Return the names of the engines that have an arithmetic by default with a model in a dtype."""
    return [name for name in ENGINES if of_engine(name, dtype) == arithmetic]


def others_than(dtype: str) -> Iterator[EngineArithmetic]:
    """Yield arithmetics with larger errors than a dtype has, the smallest errors first, those that engines have too."""
    own_roundoff = UNIT_ROUNDOFF[dtype]
    for kv_dtype in KV_DTYPES:
        if UNIT_ROUNDOFF.get(kv_dtype, 1.0) > own_roundoff:
            yield EngineArithmetic(kv_dtype=kv_dtype)
    known = dict.fromkeys(of_engine(name, dtype) for name in ENGINES)
    yield from (arithmetic for arithmetic in known if arithmetic.computes_in)


@contextmanager
def _parameters_in(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert the parameters of a model while the context is active; buffers, such as rotary tables, stay."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    before = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data


class RoundedCache(TorchFunctionMode):
    """Add errors of rounding to keys and values, while the mode is active, wherever attention is computed."""

    def __init__(self, dtype: str, seed: int) -> None:
        super().__init__()
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if len(args) > 2:
            query, key, value, *others = args
            return func(query, self._rounded(key), self._rounded(value), *others, **kwargs)
        for name in ("key", "value"):
            kwargs[name] = self._rounded(kwargs[name])
        return func(*args, **kwargs)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values `(…, tokens, features)` with a random error of one rounding."""
        signs = torch.rand(values.shape, generator=self._generator, dtype=torch.float32) * 2 - 1
        widened = values.to(torch.float32)
        if self._dtype == INT8:
            steps = widened.abs().amax(-1, keepdim=True) / _STEPS_OF_INT8
            return (widened + signs * steps / 2).to(values.dtype)
        return (widened * (1 + _RELATIVE[self._dtype] * signs)).to(values.dtype)
