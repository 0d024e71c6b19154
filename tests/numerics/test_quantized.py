"""Formulas of quantized weights, against weights that are quantized here, and what they allow and do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistency.numerics.quantized import Affine, EightBit, Float8, FourBit, QuantizedWeight

TABLE = torch.tensor([-1.0, -0.7, -0.53, -0.4, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])
Round = Callable[[torch.Tensor], torch.Tensor]
"""Return the number of the level of each value, given on the scale of the levels' numbers."""


def values(rows: int = 12, columns: int = 128, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nearest(x: torch.Tensor) -> torch.Tensor:
    return x.round()


def cut(x: torch.Tensor) -> torch.Tensor:
    return x.floor()


def numbers(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return where values lie between levels, as the number of the level below and the share of the way."""
    above = torch.bucketize(x, levels).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return above - 1 + (x - low) / (high - low)


def four_bit(x: torch.Tensor, rounding: Round = nearest, *, nested: bool = False) -> FourBit:
    blocks = x.reshape(-1, 64)
    scales = blocks.abs().amax(dim=1).float()
    table = TABLE.double()
    codes = rounding(numbers(blocks / scales.double()[:, None], table)).clamp(0, 15).to(torch.uint8).reshape(-1)
    parts = {"codes": (codes[::2] << 4) | codes[1::2], "table": TABLE, "absmax": scales}
    if nested:
        levels, offset = torch.linspace(-1, 1, 256), scales.mean()
        largest = (scales - offset).abs().max()
        close = numbers(((scales - offset) / largest).double(), levels.double()).round().clamp(0, 255)
        parts |= {
            "absmax": close.to(torch.uint8), "nested_table": levels, "nested_absmax": largest.reshape(1),
            "offset": offset,
        }  # fmt: skip
    return FourBit(parts=parts, shape=tuple(x.shape), dtype=torch.float32, block=64)


def nested(x: torch.Tensor, rounding: Round = nearest) -> FourBit:
    return four_bit(x, rounding, nested=True)


def eight_bit(x: torch.Tensor, rounding: Round = nearest) -> EightBit:
    half = x.half()
    scales = half.abs().amax(dim=1).float()
    codes = rounding(half.double() * 127 / scales.double()[:, None]).clamp(-127, 127).to(torch.int8)
    return EightBit(parts={"codes": codes, "absmax": scales}, shape=tuple(x.shape), dtype=torch.float32)


def affine(x: torch.Tensor, rounding: Round = nearest) -> Affine:
    scales = (x.reshape(len(x), -1, 32).abs().amax(dim=2) / 7.5).float()
    codes = rounding(x / scales.double().repeat_interleave(32, dim=1)).clamp(-8, 7).to(torch.int8)
    return Affine(
        parts={"qdata": codes, "scale": scales, "zero_point": torch.zeros_like(scales, dtype=torch.int8)},
        shape=tuple(x.shape), dtype=torch.float32, block=(1, 32), lowest=-8, highest=7,
    )  # fmt: skip


def asymmetric(x: torch.Tensor, rounding: Round = nearest) -> Affine:
    blocks = x.reshape(len(x), -1, 32)
    low, high = blocks.amin(dim=2).clamp(max=0), blocks.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).float()
    points = (-8 - low / scales).round().to(torch.int8)
    spread, moved = (part.double().repeat_interleave(32, dim=1) for part in (scales, points))
    codes = rounding(x / spread + moved).clamp(-8, 7).to(torch.int8)
    return Affine(
        parts={"qdata": codes, "scale": scales, "zero_point": points},
        shape=tuple(x.shape), dtype=torch.float32, block=(1, 32), lowest=-8, highest=7,
    )  # fmt: skip


def float8(x: torch.Tensor, rounding: Round = nearest) -> Float8:
    scales = (x.abs().amax(dim=1, keepdim=True) / 448).float()
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    levels = levels[levels.isfinite()].unique()
    number = rounding(numbers(x / scales.double(), levels)).clamp(0, len(levels) - 1).long()
    codes = levels[number].to(torch.float8_e4m3fn)
    return Float8(parts={"qdata": codes, "scale": scales}, shape=tuple(x.shape), dtype=torch.float32, block=(1, 128))


QUANTIZERS = [four_bit, nested, eight_bit, affine, asymmetric, float8]
Quantizer = Callable[..., QuantizedWeight]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_rounded_and_exact_differ_by_rounding_alone(quantizer: Quantizer) -> None:
    weight = quantizer(values())
    exact, rounded = weight.exact(), weight.rounded()
    assert exact.dtype == torch.float64
    assert rounded.dtype == torch.float32
    assert exact.shape == rounded.shape == weight.shape
    error = (rounded.double() - exact).abs()
    assert bool((error <= weight.dequantized_allowance(exact)).all())
    assert bool((error > 0).any()), "a product of a level and a scale is rounded"


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_nearest_levels_are_within_half_a_step(quantizer: Quantizer) -> None:
    x = values()
    found = quantizer(x).requantized(x, torch.zeros_like(x))
    error = (quantizer(x).exact() - x).abs()
    assert bool((error <= found.allowed).all())
    assert float((error / found.allowed).max()) > 0.9, "the allowance is no larger than it has to be"
    assert float((found.allowed / found.step).median()) < (0.7 if quantizer is nested else 0.56)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_values_that_are_cut_instead_of_rounded_are_outside(quantizer: Quantizer) -> None:
    x = values()
    found = quantizer(x).requantized(x, torch.zeros_like(x))
    share = (quantizer(x, cut).exact() - x).abs() / found.allowed
    assert float(share.max()) > 1.5
    assert float((share > 1).double().mean()) > 0.2


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("factor", [1.25, 0.8])
def test_a_wrong_scale_is_outside(quantizer: Quantizer, factor: float) -> None:
    x = values()
    right = quantizer(x)
    name = next(name for name in ("nested_absmax", "absmax", "scale") if name in right.parts)
    wrong = right.of({name: right.parts[name] * factor})
    found = right.requantized(x, torch.zeros_like(x))
    assert bool(((wrong.exact() - x).abs() > found.allowed).any())


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_a_sum_with_an_error_may_take_another_level(quantizer: Quantizer, size: float) -> None:
    x = values()
    error = values(seed=1).clamp(-3, 3) * size
    found = quantizer(x).requantized(x, error.abs())
    assert bool(((quantizer(x + error).exact() - x).abs() <= found.allowed).all())


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_other_bytes_stand_for_another_weight(quantizer: Quantizer) -> None:
    weight = quantizer(values())
    name = "codes" if "codes" in weight.parts else "qdata"
    codes = weight.parts[name].clone()
    codes.view(torch.uint8).reshape(-1)[5] ^= 1
    changed = weight.of({name: codes})
    assert int((changed.exact() != weight.exact()).sum()) == 1


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_row_of_zeros_has_a_finite_allowance(quantizer: Quantizer) -> None:
    x = values()
    x[0] = 0
    found = quantizer(values()).requantized(x, torch.zeros_like(x))
    assert bool(found.allowed.isfinite().all())
    assert bool(found.step.isfinite().all())


def test_a_last_block_may_be_short() -> None:
    x = values(3, 33)  # 99 values: one block of 64, and 35
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, 29)).reshape(2, 64)
    weight = four_bit(blocks)
    short = FourBit(parts=weight.parts, shape=(3, 33), dtype=torch.float32, block=64)
    assert torch.equal(short.exact().reshape(-1), weight.exact().reshape(-1)[:99])
    found = short.requantized(x, torch.zeros_like(x))
    assert bool(((short.exact() - x).abs() <= found.allowed).all())
