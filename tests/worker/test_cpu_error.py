"""What rounding may do on devices, in the precision that each of them multiplies in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consistency.devices.products import Products
from consistency.numerics.precision import SPLIT_TERMS, Precision
from consistency.numerics.reduced_products import rounded_to_bfloat16, truncated_to_tf32
from consistency.worker import cpu_error
from consistency.worker.cpu_error import computing_with, name_of, products_in, products_of_run
from consistency.worker.determinism import deterministic, in_force
from consistency.worker.protocol import Job, Peer
from tests.worker.made_jobs import job_of
from tests.worker.model.made_models import case_of

TF32 = Products(matmul=Precision.TF32, convolution=Precision.TF32)
BFLOAT16 = Products(matmul=Precision.BFLOAT16, convolution=Precision.BFLOAT16)
LINEAR, CONVOLUTION = torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Conv1d(3, 3, 2))


def job(*peers: Peer) -> Job:
    return job_of(case_of(Path("base"), None), peers=peers)


def peer(kind: str, **settings: Any) -> Peer:
    return Peer(type=kind, settings=settings)


@pytest.fixture
def _cpu_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_error, "products_of", lambda _: Products(matmul=Precision.BFLOAT16))


def test_a_pinned_run_without_such_devices_needs_nothing_else() -> None:
    with deterministic(threads=1):
        assert products_of_run(job(peer("cpu"), peer("cuda"), peer("npu")), LINEAR) == {"float32": Products()}


def test_each_precision_of_the_run_is_needed_once() -> None:
    high = {"float32_matmul_precision": "high"}
    with deterministic(threads=1):
        found = products_of_run(job(peer("cpu"), peer("cuda", **high), peer("npu", **high), peer("cuda")), LINEAR)
        assert found == {"float32": Products(), "tf32": TF32}
        found = products_of_run(job(peer("npu", float32_matmul_precision="medium")), LINEAR)
        assert found == {"float32": Products(), "bfloat16": BFLOAT16}


def test_sums_in_a_half_type_are_of_models_that_have_it() -> None:
    """CUDA's libraries may store partial sums in half types by default; a model in float32 multiplies none."""
    half = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    with deterministic(pins=False):
        assert list(products_of_run(job(peer("cuda")), LINEAR)) == ["float32"]
        found = products_of_run(job(peer("cuda")), half)
        assert list(found) == ["float32", "float32, partial sums in bfloat16"]
        assert found["float32, partial sums in bfloat16"].partial_terms == {"bfloat16": SPLIT_TERMS}
    assert name_of(Products(partial_terms={"float16": 1})) == "float32, sums in float16"


@pytest.mark.parametrize("terms", [1, SPLIT_TERMS])
def test_passes_have_the_errors_of_sums_in_a_half_type(terms: int) -> None:
    left = torch.linspace(-1, 1, 64 * 1024).reshape(64, 1024).to(torch.bfloat16)
    right = left.T.contiguous()
    exact = left.double() @ right.double()
    found = {}
    for products in (Products(), Products(partial_terms={"bfloat16": terms})):
        with cpu_error.with_noise(products, 1):
            found[name_of(products)] = float((torch.mm(left, right).double() - exact).square().mean())
    plain, stored = found.values()
    assert stored > 4 * plain


def test_what_a_library_turned_on_is_needed_as_deployed() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with deterministic(pins=False):
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            assert list(products_of_run(job(peer("cuda")), LINEAR)) == ["float32", "tf32"]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_cpu_in_bfloat16")
def test_a_cpu_that_is_not_in_float32_needs_passes_in_float32_too() -> None:
    with deterministic(threads=1):
        assert products_of_run(job(peer("cpu")), LINEAR) == {"bfloat16": BFLOAT16, "float32": Products()}


def test_a_model_without_convolutions_does_not_tell_their_precision_apart() -> None:
    mixed = Products(matmul=Precision.FLOAT32, convolution=Precision.TF32)
    assert products_in(LINEAR, mixed) == Products()
    assert products_in(CONVOLUTION, mixed) == mixed
    assert name_of(mixed) == "float32, convolutions tf32"
    assert name_of(Products()) == cpu_error.PLAIN == "float32"


@pytest.mark.parametrize(("products", "cut"), [(TF32, truncated_to_tf32), (BFLOAT16, rounded_to_bfloat16)])
def test_the_cpu_computes_as_the_device_and_settings_come_back(products: Products, cut: Any) -> None:
    a, b = torch.rand(64, 64), torch.rand(64, 64)
    with deterministic(threads=1, float32_matmul_precision="medium", sdpa_flash=True):
        before = in_force()
        with computing_with(products):
            found = a @ b
            onednn = in_force()["mkldnn_matmul_fp32_precision"]
            assert onednn == "ieee" or onednn.startswith("unreadable")  # torch 2.8 has no such switch
            assert in_force()["sdpa_flash"] is False
        assert in_force() == before
    assert torch.equal(found, cut(a) @ cut(b))


@pytest.mark.usefixtures("_cpu_in_bfloat16")
def test_float32_is_float32_whatever_the_cpu_s_settings_permit() -> None:
    a, b = torch.rand(64, 64), torch.rand(64, 64)
    with deterministic(threads=1, float32_matmul_precision="medium"), computing_with(Products()):
        found = a @ b
    with deterministic(threads=1):
        assert torch.equal(found, a @ b)


def counted(*counts: dict[str, int], passes: range = range(2, 17)) -> int:
    """Return how many passes are drawn whose tensors have these numbers of independent errors, in turn."""
    each = iter(counts)
    return len(cpu_error.draw(Products(), passes, lambda: next(each), lambda drawn: drawn))


def test_passes_are_drawn_until_every_tensor_has_enough_independent_errors() -> None:
    assert counted(*[{"a": 8, "b": 128}] * 3) == 2
    assert counted(*[{"a": 128, "b": 128}] * 3) == 2, "two at least"
    # the first pass alone promises six
    assert counted({"a": 3}, {"a": 5}, {"a": 5}, {"a": 3}, {"a": 3}) == 4
    assert counted({"a": 15}, {"a": 1}, {"a": 1}) == 2
    assert counted({"a": 15}, *[{"a": 0}] * 20) == 16, "no more than are allowed, however few there are"
    # another one has the fewest in each pass, and none has few in both
    assert counted({"a": 4, "b": 12}, {"a": 12, "b": 4}, {"a": 4, "b": 12}) == 2


def test_of_no_tensor_and_of_a_large_model_no_more_passes_are_drawn_than_at_least() -> None:
    assert counted(*[{}] * 3) == 2
    assert counted({"a": 1}, {"a": 1}, passes=range(1, 2)) == 1
    assert counted(*[{"a": 1}] * 3, passes=range(2, 3)) == 2


@pytest.mark.parametrize(("seed", "is_fused"), [(0, True), (1, False), (2, True)])
def test_every_other_pass_has_attention_as_a_fused_kernel_computes_it(seed: int, is_fused: bool) -> None:
    """A token that attends to itself alone has no gradient by the formula, and one by the rounded output."""
    one = torch.linspace(-1, 1, 64, dtype=torch.bfloat16).reshape(1, 1, 1, 64)
    query = one.clone().requires_grad_()
    with cpu_error.with_noise(Products(), seed):
        output = torch.nn.functional.scaled_dot_product_attention(query, one * 1.7, one * 0.3 + 1)
        (gradient,) = torch.autograd.grad(output, query, one * 0.9 + 2)
    assert bool(gradient.any()) == is_fused
