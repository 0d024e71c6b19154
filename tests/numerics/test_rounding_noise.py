"""Random rounding errors: as large as those of one accumulator, in what is computed and in nothing that is moved."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from consistency.numerics.noise_pools import LENGTH, STRIDE
from consistency.numerics.rounding_noise import RoundingNoise

U = 2.0**-24


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32))


def in_one_accumulator(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(left.shape[0], right.shape[1])
    for k in range(left.shape[1]):
        total.addr_(left[:, k], right[k])
    return total


def rms(error: torch.Tensor) -> float:
    return float(error.double().square().mean().sqrt())


@pytest.mark.parametrize("terms", [64, 512, 4096])
@pytest.mark.parametrize("sign", ["both signs", "one sign"])
def test_a_product_has_the_error_of_one_accumulator(terms: int, sign: str) -> None:
    """Not less, so that no healthy device is outside, and not twice as much, so that no fault is inside for nothing."""
    left, right = normal(48, terms), normal(terms, 40, seed=2)
    if sign == "one sign":
        left, right = left.abs(), right.abs()
    exact = left.double() @ right.double()
    theirs = rms(in_one_accumulator(left, right).double() - exact)
    with RoundingNoise(0):
        noisy = left @ right
    assert 1.0 < rms(noisy.double() - exact) / theirs < 2.2


@pytest.mark.parametrize("terms", [64, 4096])
def test_sums_have_the_error_of_one_accumulator(terms: int) -> None:
    values = normal(64, terms).abs()
    one = torch.zeros(64)
    for k in range(terms):
        one = one + values[:, k]
    exact = values.double().sum(1)
    with RoundingNoise(0):
        added, mean, running = values.sum(1), values.mean(1), values.cumsum(1)[:, -1]
    theirs = rms(one.double() - exact)
    for noisy in (added, mean * terms, running):
        assert 1.0 < rms(noisy.double() - exact) / theirs < 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_seed_has_other_errors_and_the_same_seed_the_same(dtype: torch.dtype) -> None:
    x, w = normal(64, 96).to(dtype), normal(96, 96, seed=2).to(dtype)

    def computed(seed: int) -> torch.Tensor:
        with RoundingNoise(seed):
            return functional.silu(functional.layer_norm(x @ w, (96,)))

    assert torch.equal(computed(1), computed(1))
    assert not torch.equal(computed(1), computed(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_type_has_hardly_more_than_its_own_rounding(dtype: torch.dtype) -> None:
    left, right = normal(64, 256).to(dtype), normal(256, 64, seed=2).to(dtype)
    exact = left.double() @ right.double()
    with RoundingNoise(0):
        noisy = left @ right
    assert 1.0 < rms(noisy.double() - exact) / rms((left @ right).double() - exact) < 1.3


def added_up_in(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor, each: int) -> torch.Tensor:
    """Multiply in partial sums of `each` terms, each of which is added up and stored in a half type."""
    total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype)
    for k in range(0, left.shape[1], each):
        total = (total.float() + left[:, k : k + each].float() @ right[k : k + each].float()).to(dtype)
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("terms", "each", "permitted"), [(512, 32, 32), (1024, 32, 32), (1024, 1, 1)])
def test_partial_sums_that_are_stored_in_a_half_type(dtype: torch.dtype, terms: int, each: int, permitted: int) -> None:
    """As large as those of a device that stores them, which are twice as large as others at least."""
    left, right = normal(48, terms).to(dtype), normal(terms, 40, seed=2).to(dtype)
    exact = left.double() @ right.double()
    theirs = rms(added_up_in(dtype, left, right, each).double() - exact)
    with RoundingNoise(0, partial_terms={dtype: permitted}):
        noisy = torch.mm(left, right)
    assert noisy.dtype == dtype
    assert 0.9 < rms(noisy.double() - exact) / theirs < 2.5
    with RoundingNoise(0):
        assert rms(torch.mm(left, right).double() - exact) < theirs / 2


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(4, -1),
    "contiguous": lambda x: x.t().contiguous(),
    "clone": torch.clone,
    "cast to a wider type": lambda x: x.to(torch.float64),
    "gather": lambda x: x.gather(0, torch.zeros(1, 16, dtype=torch.long)),
    "rows": lambda x: functional.embedding(torch.tensor([3, 1]), x),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 0, x, -x),
    "relu": functional.relu,
    "largest": lambda x: x.topk(3).values,
    "write": lambda x: torch.zeros_like(x).index_put((torch.tensor([1]),), x[:1]),
    "whole numbers": lambda x: (x > 0).float().sum(0),
    "counts": lambda x: torch.histc(x.round(), 5, -2, 2).cumsum(0),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_or_counted_is_exact(name: str) -> None:
    x = normal(8, 16)
    plain = MOVES[name](x)
    for seed in range(4):
        with RoundingNoise(seed):
            assert torch.equal(MOVES[name](x), plain)


def test_a_mask_stays_what_it_is() -> None:
    """The smallest number must not become minus infinity: a row of those alone would be NaN."""
    scores = normal(64, 64)
    for mask in (torch.finfo(torch.float32).min, -math.inf):
        masked = torch.full((64, 64), mask).triu(1)
        masked[0] = torch.finfo(torch.float32).min
        with RoundingNoise(0):
            weights = torch.softmax(scores + masked, -1)
        assert torch.isfinite(weights).all()
        assert not weights[1:].triu(2).any()


def test_operands_and_what_is_written_in_place() -> None:
    x, w = normal(32, 64), normal(64, 64, seed=2)
    kept = x.clone(), w.clone()
    target = torch.ones(32, 64)
    with RoundingNoise(0):
        x.to(torch.float32).reshape(64, 32)
        target.mul_(x @ w)
    assert torch.equal(x, kept[0])
    assert torch.equal(w, kept[1])
    error = (target.double() - x.double() @ w.double()).abs().max()
    assert 0 < float(error) < 1e-4


def test_an_operation_in_steps_rounds_in_each() -> None:
    """The sum of a softmax over many places is one that devices add in other orders."""
    x = torch.zeros(256, 4096)
    with RoundingNoise(0):
        weights = torch.softmax(x, -1)
    per_row = (weights.double() * 4096 - 1).mean(1)
    assert rms(per_row) > 5 * U, "all weights of a row share the error of its sum"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["layer", "group"])
def test_every_other_pass_stores_a_norm_in_a_half_type_between_its_steps(dtype: torch.dtype, norm: str) -> None:
    """As torch's own code for a device without such a kernel does: three roundings, where the CPU makes one."""
    x, weight, bias = (normal(*shape, seed=seed).to(dtype) for seed, shape in enumerate([(64, 32, 16), (32,), (32,)]))

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if norm == "group":
            return functional.group_norm(x, 4, weight, bias)
        return functional.layer_norm(x.transpose(1, 2), (32,), weight, bias)

    exact, errors = compute(x.double(), weight.double(), bias.double()), []
    for seed in (0, 1):
        with RoundingNoise(seed):
            errors.append(rms(compute(x, weight, bias) - exact))
    assert 1.2 < errors[1] / errors[0] < math.sqrt(3)


def test_a_gradient_that_is_zero_by_invariance_is_not_zero_in_every_pass() -> None:
    """A constant that is added to all scores changes no weight: CPU and float64 may have exactly 0, by luck."""
    values = normal(16, 8)

    def gradient(seed: int | None) -> float:
        shift = torch.zeros(1, requires_grad=True)
        scores = torch.zeros(16, 16) + shift
        if seed is None:
            (torch.softmax(scores, -1) @ values).sum().backward()
        else:
            with RoundingNoise(seed):
                (torch.softmax(scores, -1) @ values).sum().backward()
        assert shift.grad is not None
        return float(shift.grad)

    largest = max(abs(gradient(seed)) for seed in range(2))
    assert largest > 0
    assert abs(gradient(None)) < 10 * largest


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("operation", [torch.scatter_reduce, torch.index_reduce])
def test_a_gradient_goes_to_the_element_that_was_chosen(operation: Callable[..., torch.Tensor], reduce: str) -> None:
    """Where noise makes the result another number than each element, torch divides the gradient among none: NaN."""
    index = torch.tensor([0, 1, 0, 1])
    places = index if operation is torch.index_reduce else index[:, None].expand(4, 64)

    def gradient() -> torch.Tensor:
        x = normal(4, 64).requires_grad_()
        (found,) = torch.autograd.grad(operation(torch.zeros(2, 64), 0, places, x, reduce).sum(), x)
        return found

    with RoundingNoise(0):
        noisy = gradient()
    assert torch.equal(noisy.round(), gradient())


def test_zeros_without_memory_stay_as_they_are() -> None:
    """Writing noise to them would end the process."""
    x = normal(4, 4).requires_grad_()
    with RoundingNoise(0):
        (gradient,) = torch.autograd.grad(x.sgn().sum(), x)
    assert not gradient.any()


def test_a_part_that_is_computed_again_has_the_same_errors() -> None:
    x, w = normal(32, 32), normal(32, 32, seed=2)
    part: list[int] = []
    with RoundingNoise(0):
        with RoundingNoise.repeating(part):
            first = x @ w
        other = x @ w
        with RoundingNoise.repeating(part):
            again = x @ w
        after = x @ w
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(other, after), "what follows has errors of its own"


def test_without_a_pass_nothing_is_repeated() -> None:
    with RoundingNoise.repeating([]):
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


@pytest.mark.parametrize("seed", [0, 1, 9])
def test_noise_is_that_of_the_seed_bit_by_bit(seed: int) -> None:
    """Whatever is kept from one pass for the next."""
    generator = np.random.Generator(np.random.PCG64(seed))
    deviates = torch.from_numpy(generator.standard_normal(2 * LENGTH, dtype=np.float32))
    bytes_ = generator.integers(0, 256, 2 * LENGTH, dtype=np.uint8).astype(np.float32)
    moved = torch.from_numpy((bytes_ < 43).astype(np.float32) - (bytes_ >= 256 - 43).astype(np.float32))
    values = torch.linspace(0.5, 2, 800).view(8, 100)
    for _ in range(2):
        with RoundingNoise(seed):
            exponentials, sums = values.exp(), values.sum(1)
        at = slice(STRIDE, STRIDE + 800)
        assert torch.equal(exponentials, values.exp() * (1 + 2 * U * moved[at]).view(8, 100))
        at = slice(2 * STRIDE, 2 * STRIDE + 800)
        shaken = values * (1 + deviates[at] * (math.sqrt(100 / 18) * U)).view(8, 100)
        begin = 3 * STRIDE % LENGTH
        noise = 1 + deviates[begin : begin + 8] * (math.sqrt(100 / 9 + 1 / 3) * U)
        assert torch.equal(sums, shaken.sum(1) * noise)
