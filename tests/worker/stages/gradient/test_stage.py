"""The backward pass and the optimizer's step: what they are held against, and that the model is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from consistency.numerics.exact import Float64Mode
from consistency.numerics.independent_errors import independent_lines
from consistency.numerics.running_error import Arithmetic, measure_tracked
from consistency.worker.stages import adamw
from consistency.worker.stages.gradient import stage as gradient

Tensors = dict[str, torch.Tensor]


class Careful(torch.nn.Module):
    """A model that casts to float32 where it is careful, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(6, 8)
        self.frozen = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 5)
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.frozen(self.first(x)))
        x = torch.softmax(x.to(torch.float32), dim=-1).to(self.last.weight.dtype)
        found: torch.Tensor = self.last(x)
        return found


NAMES = ["first.weight", "first.bias", "last.weight", "unused"]


@pytest.fixture
def inputs() -> Tensors:
    return {"x": torch.linspace(-2, 2, 8 * 3 * 6).reshape(8, 3, 6).sin()}


def test_passes_are_parts_of_the_batch(inputs: Tensors) -> None:
    model = Careful()
    found = gradient.gradients(model, NAMES, inputs)
    assert found["first.weight"].shape == (gradient.PASSES, 8, 6)
    assert "unused" not in found, "nothing depends on it"
    weights = gradient._weights(torch.empty(2, 3, 5))
    model(inputs["x"][2:4]).backward(weights)
    expected = model.first.weight.grad
    assert expected is not None
    assert torch.equal(found["first.weight"][1], expected)


def test_inputs_that_are_no_batch_are_one_pass() -> None:
    parts = gradient._parts({"x": torch.ones(4, 2), "mask": torch.ones(3)})
    assert len(parts) == 1
    assert len(gradient._parts({"x": torch.ones(4, 2), "scale": torch.tensor(1.0)})) == 1
    assert [part["x"].shape[0] for part in gradient._parts({"x": torch.ones(3, 2)})] == [1, 1, 1]


def test_the_weights_of_the_loss_are_exact_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = gradient._weights(torch.empty(8, 16, 256, dtype=dtype))
        assert weights.dtype == dtype
        assert set(weights.unique().tolist()) == {2.0**-8, -(2.0**-8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_float64_throughout(inputs: Tensors, dtype: torch.dtype) -> None:
    model = Careful().to(dtype)
    twin = copy.deepcopy(model).double()
    names = NAMES[:3]
    inputs = {"x": inputs["x"].to(dtype)}
    with gradient._widened([model.get_parameter(name) for name in names]), Float64Mode():
        found = gradient.gradients(model, names, inputs)
    plain = torch.nn.functional.gelu(twin.frozen(twin.first(inputs["x"].double())))
    output = twin.last(torch.softmax(plain, dim=-1))
    output.backward(torch.cat([gradient._weights(part) for part in output.split(2)]))
    for name in names:
        assert found[name].dtype == torch.float64
        expected = twin.get_parameter(name).grad
        assert expected is not None
        assert torch.allclose(found[name].sum(0), expected, rtol=1e-12, atol=1e-15)
        assert model.get_parameter(name).dtype == dtype


def test_the_model_is_left_as_it_was(inputs: Tensors) -> None:
    model = Careful().eval()
    before = {name: (p.detach().clone(), p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()}
    gradient.gradients(model, NAMES, inputs)
    with gradient._widened([model.get_parameter(name) for name in NAMES]), Float64Mode():
        gradient.gradients(model, NAMES, inputs)
    gradient.stepped(model.first.weight, torch.ones_like(model.first.weight))

    def refuse(**_: Any) -> torch.Tensor:
        raise ValueError("no")

    model.forward = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match="no"), gradient._widened([model.get_parameter("first.weight")]):
        gradient.gradients(model, NAMES, inputs)
    for name, parameter in model.named_parameters():
        data, needed, pointer = before[name]
        assert torch.equal(parameter, data)
        assert (parameter.requires_grad, parameter.data_ptr(), parameter.grad) == (needed, pointer, None)
    assert not any(module.training for module in model.modules())


def test_a_model_that_ends_with_nothing_of_the_adapter_says_so(inputs: Tensors) -> None:
    model = Careful()
    model.register_forward_hook(lambda *found: found[2].detach())
    with pytest.raises(ValueError, match="no output of the model depends on the adapter"):
        gradient.gradients(model, NAMES, inputs)


def test_independent_errors_are_the_fewer_of_rows_and_columns() -> None:
    exact = torch.zeros(4, 8, 64, dtype=torch.float64)
    errors = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0)).double() * 1e-6
    assert 20 <= independent_lines(errors, exact) <= 32
    column = torch.zeros_like(errors)
    column[:, :, 3] = errors[:, :, 3]
    assert independent_lines(column, exact) <= 4, "one column carries all: of each pass"
    one_pass = errors * torch.tensor([1.0, 0, 0, 0])[:, None, None]
    assert independent_lines(one_pass, exact) <= 8
    assert independent_lines(errors[:, 0], exact[:, 0]) <= 4, "a vector is one row of each pass"


# the optimizer's step


def of_step(dtype: torch.dtype, g: torch.Tensor, *, steps: int = 0, off: float = 1.0) -> float:
    """Return which share of its bound a step of AdamW uses up."""
    generator = torch.Generator().manual_seed(5)
    p = (torch.randn(g.shape, generator=generator) * 0.1).to(dtype)
    g = g.to(dtype)
    moments = None
    if steps:
        first, second = (torch.randn(g.shape, generator=generator) * g.float().abs() for _ in range(2))
        moments = adamw.Moments(first=first.to(dtype), second=second.square().to(dtype), steps=steps)
    found = adamw.step(p, g, moments)
    found = torch.lerp(p, found, off) if off != 1 else found
    by = Arithmetic.of(dtype)
    given = (p, g) if moments is None else (p, g, moments.first, moments.second)
    exact = adamw.exact_step(*(by.known(t.to(torch.float64).numpy()) for t in given), steps=steps)
    measured = measure_tracked(found, exact)
    assert measured.bound_ratio is not None
    return float(measured.bound_ratio)


GRADIENTS = {
    "usual": torch.linspace(-1, 1, 999),
    "zero": torch.zeros(9),
    "of the size of epsilon": torch.linspace(-1e-7, 1e-7, 999),
    "whose square underflows": torch.linspace(-1e-21, 1e-21, 999),
    "large": torch.linspace(-1e12, 1e12, 999),
    "of every size": torch.logspace(-30, 10, 999) * torch.tensor([1.0, -1.0]).repeat(500)[:999],
}


@pytest.mark.parametrize("steps", [0, 1, 50])
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_inside_its_bound(dtype: torch.dtype, kind: str, steps: int) -> None:
    assert of_step(dtype, GRADIENTS[kind], steps=steps) <= 1


def test_a_step_that_goes_a_thousandth_too_far_is_outside() -> None:
    assert of_step(torch.float32, GRADIENTS["usual"], off=1.001) > 5
    assert of_step(torch.float32, GRADIENTS["usual"], off=-1) > 100
    assert of_step(torch.float32, GRADIENTS["usual"], off=0) > 100


def test_the_exact_step_is_that_of_float64() -> None:
    g = GRADIENTS["usual"].double()
    p = torch.linspace(-0.1, 0.1, 999, dtype=torch.float64)
    by = Arithmetic.of(torch.float64)
    exact = adamw.exact_step(by.known(p.numpy()), by.known(g.numpy()))
    assert torch.allclose(torch.from_numpy(exact.value), adamw.step(p, g), rtol=1e-14, atol=1e-17)
