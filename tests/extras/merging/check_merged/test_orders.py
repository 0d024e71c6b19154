"""Every honest writer's order of roundings is right, to the element; what no order gives is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.effect import Effect
from consistency.extras.merging.check_merged.merge_writer import MergeWriter, _Telling
from consistency.extras.merging.check_merged.orders import LowRankSum, Order, RoundedProduct, orders, stored_ends
from consistency.extras.merging.check_merged.outside import judge, part_beyond_all
from tests.extras.merging.check_merged.made_merges import checked, kinds, llama, random

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALVES = (BF16, F16)

Made = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def matrices(dtype: torch.dtype, adapter: torch.dtype, *, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    made = random({"w": (96, 320), "b": (96, 8), "a": (8, 320)}, seed=7)
    return made["w"].to(dtype), (made["b"] * size).to(adapter), made["a"].to(adapter)


def on_a_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALVES else x


def plain(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    """PEFT on a CPU: the delta through float32, in the adapter's dtype, added in the weight's own memory."""
    return w.clone().add_((on_a_cpu(b) @ on_a_cpu(a) * s).to(b.dtype))


def plain_on_an_accelerator(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w.clone().add_((b @ a) * s)


def safe(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w + (on_a_cpu(b) @ on_a_cpu(a) * s).to(b.dtype).to(w.dtype)


def unsloth(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w.float().addmm(b.float(), a.float(), alpha=s).to(w.dtype)


def torchtune(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w + (s * b.to(w.dtype)) @ a.to(w.dtype)


def mlx(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w + ((s * b) @ a).to(w.dtype)


def megatron(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w + s * (b.to(w.dtype) @ a.to(w.dtype))


def in_float64(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return (w.double() + s * (b.double() @ a.double())).to(w.dtype)


def as_a_change(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    """mergekit: what a merged model has more than its base, added to the base again."""
    return w + (unsloth(w, b, a, s) - w)


def as_a_change_in_float32(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    return w + (w.float() + s * (b.float() @ a.float()) - w.float()).to(w.dtype)


def through_float16(w: torch.Tensor, b: torch.Tensor, a: torch.Tensor, s: float) -> torch.Tensor:
    """A model that was loaded and merged in float16, and saved in its own dtype."""
    return plain(w.to(F16), b, a, s).to(w.dtype)


WRITERS: tuple[Made, ...] = (
    plain,
    plain_on_an_accelerator,
    safe,
    unsloth,
    torchtune,
    mlx,
    megatron,
    in_float64,
    as_a_change,
    as_a_change_in_float32,
)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("adapter", [F32, BF16, F16])
@pytest.mark.parametrize("scaling", [2.0, 1.7, -0.3])
def test_a_writer_is_right(writer: Made, dtype: torch.dtype, adapter: torch.dtype, scaling: float) -> None:
    if writer is plain and dtype in HALVES and adapter in HALVES and adapter != dtype:
        pytest.skip("PEFT casts the adapter of a half type to float32 where the base has another")
    w, b, a = matrices(dtype, adapter)
    merged = writer(w, b, a, scaling)
    assert merged.dtype == dtype
    assert MergeWriter().judge(merged, LowRankSum(w, b, a, scaling)).outside == 0


@pytest.mark.parametrize("adapter", [F32, BF16])
def test_a_sum_in_float16_that_was_saved_in_bfloat16(adapter: torch.dtype) -> None:
    w, b, a = matrices(BF16, adapter)
    assert MergeWriter().judge(through_float16(w, b, a, 2.0), LowRankSum(w, b, a, 2.0)).outside == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("writer", [plain, safe, unsloth], ids=lambda one: one.__name__)
def test_a_base_that_was_loaded_in_a_half_type(writer: Made, dtype: torch.dtype) -> None:
    w, b, a = matrices(F32, F32)
    assert MergeWriter().judge(writer(w.to(dtype), b, a, 2.0), LowRankSum(w, b, a, 2.0)).outside == 0


@pytest.mark.parametrize("writer", [plain, safe, unsloth, mlx, as_a_change], ids=lambda one: one.__name__)
@pytest.mark.parametrize("dtype", HALVES)
def test_one_unit_in_the_last_place_is_found_beside_any_writer(writer: Made, dtype: torch.dtype) -> None:
    """Off by two roundings: the value before or after the right one."""
    w, b, a = matrices(dtype, F32)
    merged = writer(w, b, a, 1.7)
    for away in (1, -1):
        changed = merged.clone()
        changed.view(torch.int16)[11, 200] += away
        found = MergeWriter().judge(changed, LowRankSum(w, b, a, 1.7))
        assert (found.outside, found.worst and found.worst[:2]) == (1, (11, 200))


def test_float32_is_as_sharp_as_the_product_allows() -> None:
    """A small delta leaves the last bit of float32 certain; a large one has the error of its own sums."""
    for size, wanted in ((0.01, 1), (1.0, 0)):
        w, b, a = matrices(F32, F32, size=size)
        merged = in_float64(w, b, a, 2.0)
        assert judge(merged, LowRankSum(w, b, a, 2.0), Order()).outside == 0
        merged.view(torch.int32)[11, 200] += 1
        assert judge(merged, LowRankSum(w, b, a, 2.0), Order()).outside == wanted


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(F32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_products_in_tf32_are_right_and_said(dtype: torch.dtype) -> None:
    w, b, a = matrices(dtype, F32)
    merged = (w.float() + (in_tf32(b) @ in_tf32(a)) * 2.0).to(dtype)
    found = MergeWriter().judge(merged, LowRankSum(w, b, a, 2.0))
    assert (found.outside, found.order.tf32) == (0, True)


def test_infinities_and_nan() -> None:
    w, b, a = matrices(F16, F32)
    w[0, 0], w[1, 1] = torch.inf, torch.nan
    w[2, 2] = 65504.0
    b[2], a[:, 2] = 100.0, 100.0
    merged = in_float64(w, b, a, 2.0)
    assert MergeWriter().judge(merged, LowRankSum(w, b, a, 2.0)).outside == 0
    finite = merged.isfinite()
    assert not finite.all()
    merged[finite] += 1.0
    assert MergeWriter().judge(merged, LowRankSum(w, b, a, 2.0)).outside > 0, "and the others are judged"


def test_the_order_is_told() -> None:
    w, b, a = matrices(BF16, F32)
    assert MergeWriter().judge(safe(w, b, a, 1.7), LowRankSum(w, b, a, 1.7)).order.text == "the delta in bfloat16"
    assert MergeWriter().judge(unsloth(w, b, a, 1.7), LowRankSum(w, b, a, 1.7)).order.text == "one rounding"
    assert len(orders(BF16, F32, F16)) == len(set(orders(BF16, F32, F16)))


def test_what_rounding_takes() -> None:
    """A delta below half a unit in the last place is lost whole in bfloat16, and kept in float32."""
    w, b, a = torch.ones(64, 64).bfloat16(), torch.full((64, 1), 1e-3), torch.ones(1, 64)
    effect = Effect()
    effect.add(in_float64(w, b, a, 1.0), LowRankSum(w, b, a, 1.0))
    assert effect.share("lost") == pytest.approx(1.0)
    assert effect.share("in_float32") < 1e-4


def test_the_loss_is_said(tmp_path: Path) -> None:
    case = llama(tmp_path, config={"lora_alpha": 0.5})
    found = checked(case, tmp_path, case.right(BF16))
    assert (found.verdict, kinds(found)) == ("consistent", [])
    (note,) = (one.message for one in found.findings if one.kind == MergeCause.LOSS)
    assert note.startswith("rounding to bfloat16 took")
    assert "merged and saved in float32" in note


@pytest.mark.parametrize("stored", [F32, BF16, F16])
@pytest.mark.parametrize("base", [F32, BF16, F16])
@pytest.mark.parametrize("adapter", [F32, BF16, F16])
@pytest.mark.parametrize("size", [0.01, 30.0])
def test_no_order_is_beyond_all_orders(
    stored: torch.dtype, base: torch.dtype, adapter: torch.dtype, size: float
) -> None:
    """Large and small deltas, weights that a delta takes to near zero, and numbers below the normal ones."""
    w, b, a = matrices(base, adapter, size=size)
    w, b, a = w[:24, :64].clone(), b[:24].clone(), a[:, :64].clone()
    w[:8] = (-1.7 * b[:8].double() @ a.double()).to(base)
    w[8:16] *= 1e-6
    b[12:20] *= 1e-5
    for order in orders(stored, base, adapter):
        for between in (None, stored):
            twice = between is not None
            if twice and order.change is not None:
                continue  # nobody writes the difference of a second merge
            product = RoundedProduct(LowRankSum(w, b, a, 1.7), replace(order, between=between))
            ends = product.ends(slice(0, len(w)))
            for values in (product.once(slice(0, len(w)), torch.empty(w.shape)), *ends, *ends.float()):
                beyond = part_beyond_all(values.to(stored), LowRankSum(w, b, a, 1.7), is_twice=twice)
                assert beyond == 0, (order, twice)


def test_a_tensor_beyond_all_orders_is_never_right() -> None:
    """One element that is off in a row that the first sample lacks, with an order that was near to others."""
    w, b, a = matrices(BF16, F32)
    writer, of = MergeWriter(), LowRankSum(w, b, a, 1.7)
    assert writer.judge(safe(w, b, a, 1.7), of).outside == 0
    for row in range(0, 96, 5):
        changed = safe(w, b, a, 1.7)
        changed[row, 7] += 0.25
        assert writer.judge(changed, of).outside == 1
        assert not writer.explains(changed, of)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_elements_refuse_an_order_as_it_refuses_them_alone(dtype: torch.dtype) -> None:
    """All orders together say of each what the order says by itself, of elements that one of them makes."""
    w, b, a = matrices(dtype, F32)
    whole, row, column = LowRankSum(w, b, a, 1.7), torch.arange(64), torch.arange(64) * 5
    known = orders(dtype, dtype, F32)
    known += [replace(order, between=dtype) for order in known if order.change is None]
    for order in known[:: max(1, len(known) // 12)]:
        values = RoundedProduct(whole, order).ends_at(row, column)[0].to(dtype)
        refused = _Telling(values, whole.pairs(row, column)).refused(known)
        assert order not in refused
        for other in known:
            low, high = stored_ends(RoundedProduct(whole, other).ends_at(row, column), dtype)
            assert (other in refused) == bool(((values < low) | (values > high)).any()), other


@pytest.mark.parametrize("first", [plain, safe, mlx, as_a_change], ids=lambda one: one.__name__)
def test_a_writer_is_right_after_a_tensor_of_another_that_is_wrong(first: Made) -> None:
    """An order that was refused for one tensor is not refused for the next."""
    w, b, a = matrices(BF16, F32)
    of, writer = LowRankSum(w, b, a, 1.7), MergeWriter()
    changed = first(w, b, a, 1.7)
    changed.view(torch.int16)[11, 200] += 1
    assert writer.judge(changed, of).outside == 1
    for other in WRITERS:
        assert writer.judge(other(w, b, a, 1.7), of).outside == 0
