"""A backward pass in which every block computes on given values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from consistency.numerics.exact import Float64Mode
from consistency.worker.memory.peak import ProfilerMeter
from consistency.worker.model import block_backward
from consistency.worker.model.block_backward import Backward, Crossing, backward_by_blocks
from consistency.worker.model.block_pass import rounded
from consistency.worker.training.backward import of_outputs
from tests.worker.model.kinds_of_models import GIVEN, IDS, t5, two_layers

Tensors = dict[str, torch.Tensor]


class Passes:
    """An exact backward pass of a model, and others on what it gives."""

    def __init__(self, model: Any, inputs: Tensors) -> None:
        self.model, self.inputs = model.eval(), inputs
        self.parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.of = Backward(model=self.model, parameters=self.parameters, inputs=inputs, loss=of_outputs)
        self.given: Tensors = {}
        self.gradients: Tensors = {}

    def exact(self, dtype: torch.dtype | None = torch.float32) -> Tensors:
        """Compute in float64, on values rounded to a dtype, or as they are."""
        found: Tensors = {}

        def keep(into: Tensors) -> Callable[[str, torch.Tensor], torch.Tensor]:
            def given(name: str, own: torch.Tensor) -> torch.Tensor:
                into[name] = own.detach().clone() if dtype is None else rounded(own, dtype)
                return into[name].to(own.dtype)

            return given

        self.given.clear()
        self.gradients.clear()
        mode = Float64Mode()
        with mode.with_gradients(self.parameters.values()), mode:
            crossing = Crossing(given=keep(self.given), come_in=keep(self.gradients))
            backward_by_blocks(self.of, crossing, found.__setitem__)
        return {name: gradient.to(torch.float64) for name, gradient in found.items()}

    def other(self, *, exact: bool) -> Tensors:
        """Compute on what the exact pass gave, in float64 or in the model's dtype."""
        found: Tensors = {}

        def incoming(name: str, own: torch.Tensor) -> torch.Tensor | None:
            gradient = self.gradients.get(name)
            return None if gradient is None else gradient.to(own.dtype)

        def run() -> None:
            crossing = Crossing(given=lambda name, own: self.given[name].to(own.dtype), incoming=incoming)
            backward_by_blocks(self.of, crossing, found.__setitem__)

        if not exact:
            run()
            return found
        mode = Float64Mode()
        with mode.with_gradients(self.parameters.values()), mode:
            run()
        return found


def lora(model: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2, **changes))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def prompted(kind: type[Any]) -> Callable[[], Any]:
    def make() -> Any:
        return peft.get_peft_model(two_layers(), kind(num_virtual_tokens=3, task_type="CAUSAL_LM"))

    return make


MADE: dict[str, tuple[Callable[[], Any], Tensors]] = {
    **{make.__name__: (make, GIVEN[make]) for make in GIVEN},
    "lora": (lambda: lora(two_layers()), {"input_ids": IDS}),
    "lora of head and embedding": (
        lambda: lora(two_layers(), modules_to_save=["lm_head", "embed_tokens"]), {"input_ids": IDS},
    ),
    "lora of an encoder and a decoder": (lambda: lora(t5()), GIVEN[t5]),
    "prompt": (prompted(peft.PromptTuningConfig), {"input_ids": IDS}),
    "prefix": (prompted(peft.PrefixTuningConfig), {"input_ids": IDS}),
}  # fmt: skip


def made(name: str) -> Passes:
    make, inputs = MADE[name]
    torch.manual_seed(0)
    return Passes(make(), inputs)


def plain(passes: Passes) -> Tensors:
    """Return the gradients that autograd computes in float64."""
    from consistency.worker.model.running import outputs

    mode = Float64Mode()
    with mode.with_gradients(passes.parameters.values()), mode, torch.enable_grad():
        terms = of_outputs(outputs(passes.model, passes.inputs))
        found = torch.autograd.grad(
            [one for one, _ in terms],
            [*passes.parameters.values()],
            [weights for _, weights in terms],
            allow_unused=True,
        )
    return {name: one for name, one in zip(passes.parameters, found, strict=True) if one is not None}


def fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no block run a second time."""
    real = block_backward._BackwardFromTheLoss._run_again

    def run_again(self: Any, call: Any) -> Any:
        real(self, call)
        raise block_backward._NotAgainError("another result")

    monkeypatch.setattr(block_backward._BackwardFromTheLoss, "_run_again", run_again)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12 + 1e-9 * float(other.abs().max()))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("again", [True, False])
def test_on_its_own_values_a_model_has_the_gradients_of_autograd(
    name: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks that run again for their backward pass, and with such that refuse it."""
    passes = made(name)
    if not again:
        fails_again(monkeypatch)
    found, wanted = passes.exact(None), plain(passes)
    assert wanted.keys() == found.keys() & passes.parameters.keys()
    assert wanted
    for parameter, gradient in wanted.items():
        assert close(found[parameter], gradient), parameter


@pytest.mark.parametrize("name", MADE)
def test_blocks_that_go_back_at_once_give_the_same(name: str) -> None:
    passes = made(name)
    exact = passes.exact()
    found, in_float32 = passes.other(exact=True), passes.other(exact=False)
    # before a block runs back nobody knows that an output of it has no gradient, as T5's position bias without training
    assert all("position_bias" in place for place in exact.keys() - found.keys())
    assert found.keys() == in_float32.keys()
    for place in found:
        gradient = exact[place]
        assert close(found[place], gradient), place
        error = float((in_float32[place].double() - gradient).abs().max())
        assert error <= 1e-4 * float(gradient.abs().max()) + 1e-7, place


def test_gradients_are_summed_at_borders_only_where_the_sum_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that go back on given gradients need no sum, which would stay in the device's memory to the end."""
    passes = made("lora")
    sums: list[torch.Tensor] = []
    add = block_backward._Boundary.add

    def noted(boundary: block_backward._Boundary, gradient: torch.Tensor) -> None:
        sums.append(gradient)
        add(boundary, gradient)

    monkeypatch.setattr(block_backward._Boundary, "add", noted)
    passes.exact()
    assert sums
    sums.clear()
    passes.other(exact=False)
    assert sums == []


class Counting(torch.nn.Module):
    """Counts its calls, and answers otherwise each time, as a method that sets up its layers for one pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight + self.calls


def test_a_block_that_answers_otherwise_the_second_time_keeps_its_activations() -> None:
    passes = Passes(Stack(Counting), {"x": torch.linspace(0, 1, 8).reshape(2, 4)})
    found = passes.exact(None)
    calls = [layer.calls for layer in passes.model.layers]
    assert calls == [2, 3], "the last is the first to run again, and once more in a pass that keeps its activations"
    assert {"layers.0.weight", "layers.1.weight", "first.weight"} <= found.keys()


class InPlace(torch.nn.Module):
    """Writes into what it gets, as a residual connection may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.linear(x))


class Stack(torch.nn.Module):
    def __init__(self, kind: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([kind(), kind()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_block_may_write_into_what_it_gets() -> None:
    torch.manual_seed(0)
    passes = Passes(Stack(InPlace), {"x": torch.linspace(0, 1, 8).reshape(2, 4)})
    exact = passes.exact()
    given = {name: value.clone() for name, value in passes.given.items()}
    found = passes.other(exact=False)
    assert all(torch.equal(value, passes.given[name]) for name, value in given.items())
    assert exact.keys() == found.keys()


def test_what_a_fault_in_one_block_changes_is_of_that_block() -> None:
    """Of its module, of what enters it, and of nothing above or below."""
    torch.manual_seed(0)
    passes = Passes(Stack(lambda: torch.nn.Linear(4, 4)), {"x": torch.linspace(0, 1, 8).reshape(2, 4)})
    passes.exact()
    healthy = passes.other(exact=False)
    hook = passes.model.layers[0].register_forward_hook(twice)
    wrong = passes.other(exact=False)
    hook.remove()
    changed = {name for name in healthy if not torch.equal(healthy[name], wrong[name])}
    assert changed == {"layers.0::input.input.gradient", "layers.0.weight", "layers.0.bias"}


def twice(_: Any, __: Any, output: torch.Tensor) -> None:
    """Double the gradient that comes in."""
    output.register_hook(lambda gradient: 2 * gradient)


class Wide(torch.nn.Module):
    """A block whose activations take far more than what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4096), torch.nn.Linear(4096, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Deep(torch.nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList(Wide() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("at_once", [True, False])
def test_the_activations_of_one_block_are_kept(at_once: bool) -> None:
    def peak(depth: int) -> int:
        model = Deep(depth).requires_grad_(False)
        model.first.requires_grad_(True)
        wanted = dict(model.first.named_parameters())
        of = Backward(model=model, parameters=wanted, inputs={"x": torch.ones(64, 4)}, loss=of_outputs)
        crossing = Crossing(incoming=lambda _, own: torch.ones_like(own)) if at_once else Crossing()

        def run(_: Any) -> None:
            backward_by_blocks(of, crossing, lambda *_: None)

        return ProfilerMeter().measure(run).whole

    few, many = peak(4), peak(32)
    of_one_block = 64 * 4096 * 4
    assert many - few < of_one_block, "else each of 28 blocks more keeps as much, or twice"


@pytest.mark.parametrize("at_once", [True, False])
def test_each_block_that_begins_is_told_with_the_share_of_the_pass(at_once: bool) -> None:
    model = Deep(4).requires_grad_(False)
    model.first.requires_grad_(True)
    told: list[tuple[int, int, float]] = []
    of = Backward(
        model=model, parameters=dict(model.first.named_parameters()), inputs={"x": torch.ones(2, 4)}, loss=of_outputs,
        began=lambda number, count, share: told.append((number, count, share)),
    )  # fmt: skip
    crossing, numbers = Crossing(), [1, 2, 3, 4, 4, 3, 2, 1]
    if at_once:
        crossing, numbers = Crossing(incoming=lambda _, own: torch.ones_like(own)), [1, 2, 3, 4]
    backward_by_blocks(of, crossing, lambda *_: None)
    assert [number for number, _, _ in told] == numbers
    assert {count for _, count, _ in told} == {4}
    shares = [share for _, _, share in told]
    assert shares == sorted(set(shares))
    assert shares[0] == 0
    assert shares[-1] < 1
