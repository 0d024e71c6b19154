"""Measure what one core takes for the work that `benchmarks.on_paper` counts: products, and work on each element.

    python -m benchmarks.host_rates        # ten seconds, one thread

Each is the best of three runs, in processor time. The functions are those that the stages call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from consistency.numerics.bound import delta_allowance, merged_allowance
from consistency.numerics.chunks import LowRankProduct, LowRankTensor
from consistency.numerics.digest import digest
from consistency.numerics.error import measure_low_rank
from consistency.numerics.error_spread import Spread
from consistency.numerics.exact import in_float64
from consistency.numerics.precision import Precision
from consistency.numerics.running_error import Arithmetic
from consistency.stages.gradient.optimizer_step import PART
from consistency.worker.training import adamw

_ROUNDS = 3
_ROWS, _COLUMNS, _RANK, _SCALING = 64, 8192, 16, 2.0
_SIDE = 4096
"""Rows and columns of a layer."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("\n".join(_lines()))


def _lines() -> Iterator[str]:
    yield from _products()
    yield from _of_layers()
    yield from _of_results()
    yield from _of_gradients()


def _products() -> Iterator[str]:
    """Yield the rates of products of so many rows with a weight, in 10⁹ operations per second."""
    weight = torch.randn(5632, 2048).to(torch.bfloat16)
    rows, wide = torch.randn(_ROWS, 2048), weight.to(torch.float32)
    operations = 2 * _ROWS * weight.numel()
    linear = torch.nn.functional.linear
    exact_s = _seconds(lambda: in_float64(linear, rows, weight))
    plain_s = _seconds(lambda: linear(rows, wide))
    yield f"float64 product, weight widened   {operations / exact_s / 1e9:8.1f} GFLOP/s"
    yield f"float32 product                   {operations / plain_s / 1e9:8.1f} GFLOP/s"


def _of_layers() -> Iterator[str]:
    """Yield what one element of an adapted layer takes in `merged`, and what a digest takes."""
    left, right = torch.randn(_SIDE, _RANK), torch.randn(_RANK, _SIDE)
    weight = (torch.randn(_SIDE, _SIDE) * 0.02).to(torch.bfloat16)
    delta = (left @ right) * _SCALING
    merged = (weight + delta).to(torch.bfloat16)
    of_delta = delta_allowance(_RANK, scaling=_SCALING, adapter=torch.float32, products=Precision.FLOAT32)
    of_merged = merged_allowance(of_delta, weight=torch.bfloat16, roundings=1)
    tensors = [
        LowRankTensor(actual=delta, allowance=of_delta, has_base=False),
        LowRankTensor(actual=merged, allowance=of_merged, has_base=True),
    ]
    product = LowRankProduct(left=left, right=right, scaling=_SCALING, base=weight)
    yield _per_element("delta of a LoRA", lambda: (left @ right) * _SCALING, delta)
    yield _per_element("sum with a copy of the weight", lambda: weight.clone().add_(delta), delta)
    yield _per_element("delta and merged measured at once", lambda: measure_low_rank(tensors, product), delta)
    yield _per_element("delta measured", lambda: measure_low_rank(tensors[:1], product), delta)
    yield _per_element("merged weight measured", lambda: measure_low_rank(tensors[1:], product), delta)
    yield f"digest                            {merged.nbytes / _seconds(lambda: digest(merged)) / 1e9:8.1f} GB/s"


def _of_results() -> Iterator[str]:
    """Yield what one element of a block's result takes by the rule `block`."""
    exact = torch.randn(_ROWS, _COLUMNS, dtype=torch.float64)
    first, second, actual = (_off(exact, torch.bfloat16) for _ in range(3))
    spread = Spread.of([first, second], exact)
    yield _per_element("spread of results, two passes", lambda: Spread.of([first, second], exact), exact)
    yield _per_element("figures of a result", lambda: spread.figures(actual, exact), exact)


def _of_gradients() -> Iterator[str]:
    """Yield what one element of a trained tensor takes in `gradient`."""
    exact = torch.randn(_RANK, _COLUMNS, dtype=torch.float64)
    passes = [_off(exact, torch.float32) for _ in range(4)]
    spread = Spread.of(passes, exact, of_a_sum=True)
    yield _per_element("spread of gradients, four passes", lambda: Spread.of(passes, exact, of_a_sum=True), exact)
    yield _per_element("figures of a gradient", lambda: spread.figures(passes[0], exact), exact)
    before, gradient = (torch.randn(PART, dtype=torch.float64).numpy() for _ in range(2))
    arithmetic = Arithmetic.of(torch.float32)

    def step() -> object:
        return adamw.exact_step(arithmetic.known(before), arithmetic.known(gradient))

    yield _per_element("exact step of AdamW, one thread", step, torch.empty(PART))


def _off(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (exact * (1 + 1e-3 * torch.randn_like(exact))).to(dtype)


def _per_element(name: str, work: Callable[[], object], tensor: torch.Tensor) -> str:
    return f"{name:34}{_seconds(work) / tensor.numel() * 1e9:8.1f} ns per element"


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor time of the fastest of some runs, after one that is not timed."""
    work()
    taken = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


if __name__ == "__main__":
    main()
