from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from consistency.numerics.exact import Float64Mode, in_float64

pytestmark = pytest.mark.usefixtures("one_thread")

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def filled(module: nn.Module) -> nn.Module:
    """Give a module numbers that do not depend on torch's generator."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 2)
    return module.eval()


class Block(nn.Module):
    """Attention, norm and feed-forward with no cast inside: `double()` is an exact reference for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h: torch.Tensor = self.down(functional.silu(self.up(x)))
        return x + h


class CarefulNorm(nn.Module):
    """A norm as transformers writes it: computed in float32, given back in the input's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Careful(nn.Module):
    """Casts as transformers' models have them: norm, rotary table and softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = CarefulNorm(), nn.Linear(16, 16)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", normal(8).abs(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(self.norm(x))
        angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * self.frequencies.float()[None]
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)
        scores = functional.softmax(h @ h.transpose(-1, -2), dim=-1, dtype=torch.float32).to(x.dtype)
        out: torch.Tensor = scores @ (h * table)
        return out


def careful_by_hand(module: Careful, x: torch.Tensor) -> torch.Tensor:
    """Compute `Careful` in float64, with every cast taken out."""
    weight = module.norm.weight.detach().double()
    y = x.double()
    y = weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
    h = functional.linear(y, module.project.weight.detach().double(), module.project.bias.detach().double())
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * module.frequencies.double()[None]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return torch.softmax(h @ h.transpose(-1, -2), dim=-1) @ (h * table)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error in units of the float64 roundoff and of the largest magnitude."""
    assert actual.dtype == expected.dtype == torch.float64
    return float((actual - expected).abs().max() / expected.abs().max() * 2.0**53)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_module_without_casts_computes_what_its_double_computes(dtype: torch.dtype) -> None:
    module, x = filled(Block()).to(dtype), normal(2, 5, 16, seed=9).to(dtype)
    expected = copy.deepcopy(module).double()(x.double()).detach()
    assert error(in_float64(module, x), expected) < 64
    with torch.no_grad():
        assert error(module(x).double(), expected) > 1e6  # the narrow dtype itself is that far off


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_casts_inside_a_module_do_not_narrow_it(dtype: torch.dtype) -> None:
    module = Careful()
    filled(module).to(dtype)
    x = normal(5, 16, seed=9).to(dtype)
    expected = careful_by_hand(module, x)
    assert error(in_float64(module, x), expected) < 64
    naive = copy.deepcopy(module).double()(x.double()).detach()
    assert error(naive, expected) > 1e6  # `double()` alone is no float64 reference for it


def test_parameters_buffers_and_inputs_are_left_as_they_were() -> None:
    module = Careful()
    filled(module).to(torch.bfloat16)
    before = {name: (t.data_ptr(), t.dtype, t.detach().clone()) for name, t in [*module.named_parameters()]}
    before |= {name: (t.data_ptr(), t.dtype, t.detach().clone()) for name, t in [*module.named_buffers()]}
    x = normal(5, 16).bfloat16()
    kept = x.clone()
    in_float64(module, x)
    assert torch.equal(x, kept)
    assert x.dtype == torch.bfloat16
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert set(after) == set(before)
    for name, (address, dtype, values) in before.items():
        assert after[name].data_ptr() == address, name
        assert after[name].dtype == dtype, name
        assert torch.equal(after[name].detach(), values), name


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_cast_to_a_narrow_dtype_gives_float64(dtype: torch.dtype) -> None:
    x = normal(3).double()
    with Float64Mode():
        cast = [x.to(dtype), x.type(dtype), x.type_as(torch.zeros(1, dtype=dtype)), x.float(), x.half(), x.bfloat16()]
        made = [torch.zeros(2, dtype=dtype), torch.full((2,), 0.1, dtype=dtype), torch.arange(3, dtype=dtype)]
    assert {t.dtype for t in [*cast, *made]} == {torch.float64}
    assert all(torch.equal(t, x) for t in cast)
    assert made[1].tolist() == [0.1, 0.1]


def test_operations_widen_what_they_meet() -> None:
    x, y = normal(4, 4), normal(4, 4, seed=1)
    with Float64Mode():
        found = {
            "matmul": x @ y,
            "mixed": x.bfloat16() @ y.bfloat16(),
            "scalar": x * 0.1,
            "softmax": torch.softmax(x, -1),
            "cat": torch.cat([x, y]),
            "where": torch.where(x > 0, x, torch.tensor(float("-inf"))),
            "embedding": functional.embedding(torch.tensor([1, 2]), x),
            "sum": x.sum(),
            "conv": functional.conv1d(x[None], y[:, :, None]),
        }
    assert {name: t.dtype for name, t in found.items()} == dict.fromkeys(found, torch.float64)
    assert torch.equal(found["matmul"], x.double() @ y.double())
    assert torch.equal(found["scalar"], x.double() * 0.1)
    assert torch.equal(found["sum"], x.double().sum())


def test_integers_booleans_and_views_stay() -> None:
    with Float64Mode():
        assert (torch.arange(4) + 1).dtype == torch.int64
        assert (torch.arange(4) > 1).dtype == torch.bool
        assert torch.zeros(2, dtype=torch.int32).dtype == torch.int32
    weight = normal(4, 4)
    with Float64Mode():
        row = weight[1]
        assert row.data_ptr() == weight[1].data_ptr()
        assert row.dtype == torch.float32


def test_a_write_into_a_narrower_tensor_keeps_its_storage() -> None:
    weight = normal(4, 4)
    kept, address = weight.clone(), weight.data_ptr()
    delta = normal(4, 4, seed=1)
    with Float64Mode():
        weight += delta @ delta
        weight[0].zero_()
    assert weight.data_ptr() == address
    assert weight.dtype == torch.float32
    expected = (kept.double() + delta.double() @ delta.double()).float()
    assert torch.equal(weight[1:], expected[1:])
    assert torch.equal(weight[0], torch.zeros(4))


def test_a_write_into_float64_takes_float64() -> None:
    total, x = torch.zeros(4, 4, dtype=torch.float64), normal(4, 4)
    with Float64Mode():
        total.addmm_(x, x)
        total += x
    assert torch.equal(total, x.double() @ x.double() + x.double())


def test_outside_the_mode_nothing_has_changed() -> None:
    x = normal(4, 4)
    with Float64Mode():
        pass
    assert (x @ x).dtype == torch.float32
    with pytest.raises(ZeroDivisionError):
        in_float64(lambda: 1 // 0)
    assert (x @ x).dtype == torch.float32


def test_no_gradient_is_kept() -> None:
    assert not in_float64(filled(nn.Linear(4, 4)), normal(2, 4)).requires_grad


def test_convolutions_take_float64_before_they_compare_dtypes() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1), torch.nn.ConvTranspose2d(2, 1, 2))
    found = in_float64(model, torch.ones(1, 3, 8, 8))
    assert found.dtype == torch.float64
    assert torch.nn.functional.conv2d is torch.conv2d


def test_a_table_without_a_dtype_takes_float64() -> None:
    """FourierFT makes zeros in torch's default dtype and writes its frequencies into them."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(4)
        table[torch.tensor([1, 3])] = values / 3
        return table

    found = in_float64(spread, torch.ones(2))
    assert found.tolist() == [0, 1 / 3, 0, 1 / 3]


def test_a_parameter_made_in_the_pass_needs_no_gradient() -> None:
    """PEFT makes one of a transposed weight, which autograd would take for float32."""
    weight = nn.Parameter(normal(3, 2), requires_grad=False)
    factor = nn.Parameter(normal(2, 3))
    mode = Float64Mode()
    with mode.with_gradients([factor]), mode:
        made = nn.Parameter(weight.T)
        (made * factor).sum().backward()
    assert not made.requires_grad
    assert factor.grad is not None
    assert factor.grad.dtype == torch.float64
    assert torch.equal(factor.grad, weight.T.double())
    assert nn.Parameter(weight.T).requires_grad, "as torch does outside"


def test_a_parametrization_of_the_pass_may_widen_a_weight() -> None:
    """PEFT adds the deltas of fused experts by one."""

    class Added(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + 1

    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.double()

    layer = filled(nn.Linear(2, 2, bias=False))
    with Float64Mode(), torch.no_grad():
        parametrize.register_parametrization(layer, "weight", Added())
        assert isinstance(layer.weight, torch.Tensor)
        assert layer.weight.dtype == torch.float64
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    with pytest.raises(ValueError, match="may not change the dtype"):
        parametrize.register_parametrization(layer, "weight", Double())


def test_modes_of_two_threads_leave_torch_as_it_was() -> None:
    """The one that began first ends first; what the other one put back was what the first had put there."""
    real, (inside, ended) = parametrize.register_parametrization, (threading.Event(), threading.Event())

    def second() -> None:
        with Float64Mode():
            inside.set()
            ended.wait(10)

    with Float64Mode():
        thread = threading.Thread(target=second)
        thread.start()
        assert inside.wait(10)
    ended.set()
    thread.join()
    assert parametrize.register_parametrization is real


def test_prelu_takes_operands_of_two_dtypes() -> None:
    found = in_float64(functional.prelu, -torch.ones(2, dtype=torch.float64), torch.full((1,), 0.25))
    assert found.tolist() == [-0.25, -0.25]


def test_paused_it_computes_in_the_dtype_of_the_operands() -> None:
    a, weight = normal(3, 4, 5), normal(2, 4, 3, seed=1)
    expected = functional.conv1d(a, weight) @ normal(3, 2, seed=2)
    with Float64Mode() as mode:
        with mode.paused():
            with mode.paused():
                pass
            found = functional.conv1d(a, weight) @ normal(3, 2, seed=2)
            assert torch.ones(2, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert (a @ a.mT).dtype == torch.float64
        assert functional.conv1d(a, weight).dtype == torch.float64
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
