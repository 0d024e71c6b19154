"""Compare the error of one accumulator, and that of random rounding errors, with the CPU's own, by width.

    python -m benchmarks.rounding                    # hidden sizes 128 and 512: some seconds
    python -m benchmarks.rounding --widths 2048      # one accumulator takes minutes

Each is the root mean square of the error against float64, of the logits of a Llama with two layers and 128
rows, in units of the CPU's. In float32 the noise has to be more than one accumulator makes, and not twice as much; in a
half type, where stores decide, hardly more than the CPU's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers

from consistency.numerics.dispatch_mode import DispatchMode
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rounding_noise import RoundingNoise

_aten = torch.ops.aten
_PLACES = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}


class OneAccumulator(DispatchMode):
    """Add the terms of float32 products one after the other."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves this class untyped

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = _PLACES.get(func)
        if place is None or args[place].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        left, right = args[place : place + 2]
        total = torch.zeros(*left.shape[:-1], right.shape[-1])
        for k in range(left.shape[-1]):
            total.addcmul_(left[..., k : k + 1], right[..., k : k + 1, :])
        return total + args[0] if place else total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="128,512", help="hidden sizes, separated by commas")
    arguments = parser.parse_args()
    print("| hidden size | dtype | one accumulator | noise |\n|---|---|---|---|")
    for width in map(int, arguments.widths.split(",")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            one, noise = measured(width, dtype)
            print(f"| {width} | {str(dtype).removeprefix('torch.')} | {one} | {noise:.2f} |")


def measured(width: int, dtype: torch.dtype) -> tuple[str, float]:
    """Return the errors of one accumulator (of float32 alone) and of the noise, over the CPU's."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=2, num_attention_heads=width // 64,
        vocab_size=1000, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    ids = torch.randint(0, 1000, (8, 16))

    def last(mode: AbstractContextManager[Any]) -> torch.Tensor:
        with torch.no_grad(), mode:
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return found.to(torch.float64)

    exact = last(Float64Mode())

    def error(mode: AbstractContextManager[Any]) -> float:
        return float((last(mode) - exact).square().mean().sqrt())

    own = error(nullcontext())
    one = f"{error(OneAccumulator()) / own:.2f}" if dtype == torch.float32 else ""
    return one, error(RoundingNoise(0)) / own


if __name__ == "__main__":
    main()
