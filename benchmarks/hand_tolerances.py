"""Re-enact ten threads on tolerances that were chosen by hand: what each lets through, and what rounding may do.

    python -m benchmarks.hand_tolerances          # the table of docs/testing.md: a minute

Each row has a function like that of the thread, small and on the CPU, the rule of its test, a healthy result and one
with a mistake. The healthy one is that of a kernel which adds in another order, where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rewritten_tests import attention, lora_merge, rms_norm
from consistency.testing import rounding_tolerance, within_rounding

Function = Callable[..., Tensor]
Rule = Callable[[Tensor, Tensor, Tensor], bool]
"""Whether a result passes, by another one in its dtype and the exact one."""

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


def close(atol: float, rtol: float) -> Rule:
    return lambda actual, other, _: torch.allclose(actual, other, atol=atol, rtol=rtol)


def largest(factor: float, plus: float = 0.0) -> Rule:
    """Return flash-attention's rule, and that of torch's own tests of attention."""
    return lambda actual, other, exact: worst(actual, exact) <= factor * worst(other, exact) + plus


def worst(one: Tensor, exact: Tensor) -> float:
    return float((one.double() - exact).abs().max())


def rms(one: Tensor, exact: Tensor) -> float:
    return float((one.double() - exact).square().mean().sqrt())


def cosine(least: float) -> Rule:
    return lambda actual, other, _: (
        float(torch.cosine_similarity(actual.double().flatten(), other.double().flatten(), 0)) >= least
    )


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A thread, its rule, and a mistake of its kind."""

    name: str
    rule: str
    passes: Rule
    dtype: torch.dtype
    function: Function
    inputs: tuple[Tensor, ...]
    wrong: Function
    mistake: str
    healthy: Function | None = None


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backwards(x: Tensor, weight: Tensor) -> Tensor:
    """Add the terms of a product from the last to the first, in blocks of eight."""
    total = torch.zeros(len(x), weight.shape[1], dtype=torch.float32)
    for k in range(x.shape[1] - 8, -1, -8):
        total = total + x[:, k : k + 8].float() @ weight[k : k + 8].float()
    return total.to(x.dtype)


def short(x: Tensor, weight: Tensor) -> Tensor:
    return x[:, :-16] @ weight[:-16]


def one_element(function: Function, factor: float) -> Function:
    def wrong(*inputs: Tensor) -> Tensor:
        found = function(*inputs).clone()
        found[-1, -1] *= factor
        return found

    return wrong


def last_row(function: Function) -> Function:
    """Return a function whose last row is a tenth too small."""

    def wrong(*inputs: Tensor) -> Tensor:
        found = function(*inputs).clone()
        found[..., -1, :] *= 0.9
        return found

    return wrong


def massive() -> tuple[Tensor, ...]:
    """Return the inputs of attention with one token a thousand times the others, as in a trained model."""
    q, k, v = attention.inputs()
    v[..., 0, :] *= 1000
    q[..., -1, :] = 50 * k[..., -1, :]  # sees the last token alone
    return q, k, v


PRODUCT = (drawn(16, 512), drawn(512, 16, seed=1))

THREADS = (
    Thread(
        name="Liger-Kernel#74", rule="atol 5", passes=close(5.0, 1e-5), dtype=BF16, function=rms_norm.reference,
        healthy=rms_norm.kernel, inputs=rms_norm.inputs(), wrong=rms_norm.WRONG["no offset (issue 74)"],
        mistake="the weight's offset of 1 is missing",
    ),
    Thread(
        name="peft#2237, #3741", rule="atol 0.01, rtol 10",
        passes=lambda a, b, exact: close(0.01, 10.0)(a.softmax(-1), b.softmax(-1), exact), dtype=BF16,
        function=lora_merge.unmerged, healthy=lora_merge.merged, inputs=tuple(lora_merge.inputs()),
        wrong=lora_merge.WRONG["a bias without its scale (issues 2486, 3741)"],
        mistake="a merged bias without its scale",
    ),
    Thread(
        name="KernelBench#165", rule="atol 0.01, rtol 0.01", passes=close(1e-2, 1e-2), dtype=F32,
        function=lambda x: x.softmax(-1), inputs=(drawn(16, 1024, size=0.5),), wrong=torch.zeros_like,
        mistake="all zeros",
    ),
    Thread(
        name="flash-attention#1231", rule="twice the error of torch's", passes=largest(2.0), dtype=F16,
        function=attention.reference, healthy=attention.in_blocks, inputs=massive(),
        wrong=last_row(attention.reference), mistake="a token's output × 0.9",
    ),
    Thread(
        name="sglang#35795", rule="atol 0.06", passes=close(0.06, 0.0), dtype=BF16, function=torch.matmul,
        healthy=backwards, inputs=(drawn(96, 512), drawn(512, 96, seed=1)), wrong=one_element(torch.matmul, 1.5),
        mistake="one element × 1.5",
    ),
    Thread(
        name="aiter#5031", rule="atol 100", passes=close(100.0, 0.0), dtype=BF16, function=torch.matmul,
        healthy=backwards, inputs=PRODUCT, wrong=short, mistake="the last 16 of 512 terms are missing",
    ),
    Thread(
        name="pytorch#117889", rule="assert_close's default", passes=close(1e-5, 1.3e-6), dtype=F32,
        function=torch.matmul, healthy=backwards, inputs=PRODUCT, wrong=lambda x, w: x.bfloat16().float() @ w,
        mistake="an operand in bfloat16",
    ),
    Thread(
        name="pytorch#108202 (`same`)", rule="RMSE of thrice torch's, + 1e-3",
        passes=lambda a, b, exact: rms(a, exact) <= 3 * rms(b, exact) + 1e-3, dtype=BF16, function=torch.matmul,
        healthy=backwards, inputs=(drawn(256, 64), drawn(64, 256, seed=1)), wrong=one_element(torch.matmul, 1.5),
        mistake="one element × 1.5",
    ),
    Thread(
        name="flashinfer#3663", rule="cosine 0.9", passes=cosine(0.9), dtype=BF16, function=attention.reference,
        healthy=attention.in_blocks, inputs=tuple(attention.inputs()),
        wrong=attention.WRONG["a mask off by one"], mistake="a mask off by one",
    ),
    Thread(
        name="pytorch test_transformers", rule="1550 times the error of torch's", passes=largest(1550.0, 1e-5),
        dtype=F16, function=attention.reference, healthy=attention.in_blocks, inputs=tuple(attention.inputs()),
        wrong=lambda *given: attention.in_blocks(*given, rescales=False), mistake="blocks that are not rescaled",
    ),
)  # fmt: skip


def row(thread: Thread) -> str:
    """Return a row of the table."""
    low = [one.to(thread.dtype) for one in thread.inputs]
    exact = thread.function(*(one.double() for one in low)).double()
    other = thread.function(*low)
    healthy = thread.healthy or thread.function
    tolerance = rounding_tolerance(thread.function, *low)
    cells = [thread.name, thread.rule, f"{tolerance['atol']:.1g}, {tolerance['rtol']:.1g}", thread.mistake]
    for function in (healthy, thread.wrong):
        cells.append("passes" if thread.passes(function(*low), other, exact) else "fails")
        found = within_rounding(function, *low, reference=thread.function, gradients=False)
        ratio = max(one.ratio for one in found.results)
        cells.append("∞" if math.isinf(ratio) else f"{ratio:.2g} ×")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    print(
        "| thread | by hand | rounding: atol, rtol | mistake | healthy, by hand | figure | mistake, by hand | figure |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for thread in THREADS:
        print(row(thread), flush=True)


if __name__ == "__main__":
    main()
