"""A backward pass in which every block computes on given values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from consistency.numerics.exact import Float64Mode
from consistency.worker.model.block_backward import backward_by_blocks
from consistency.worker.model.block_pass import rounded
from consistency.worker.training.backward import of_outputs
from tests.worker.model.test_block_pass import GIVEN, IDS, t5, two_layers

Tensors = dict[str, torch.Tensor]


def of_all(_: Any, ends: Tensors) -> Any:
    return [(tensor, torch.ones_like(tensor)) for tensor in ends.values() if tensor.requires_grad]


class Passes:
    """An exact backward pass of a model, and others on what it gives."""

    def __init__(self, model: torch.nn.Module, inputs: Tensors) -> None:
        self.model, self.inputs = model.eval(), inputs
        self.wanted = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.given: Tensors = {}
        self.gradients: Tensors = {}

    def exact(self, dtype: torch.dtype | None = torch.float32, *, again: bool = True) -> Tensors:
        """Compute in float64, on values rounded to a dtype, or as they are."""
        found: Tensors = {}

        def keep(into: Tensors) -> Callable[[str, torch.Tensor], torch.Tensor]:
            def given(name: str, own: torch.Tensor) -> torch.Tensor:
                assert name not in into, f"{name} twice"
                into[name] = own.detach().clone() if dtype is None else rounded(own, dtype)
                return into[name].to(own.dtype)

            return given

        self.given.clear()
        self.gradients.clear()
        mode = Float64Mode()
        with mode.with_gradients(self.wanted.values()), mode:
            backward_by_blocks(
                self.model, self.wanted, self.inputs, loss=of_outputs, given=keep(self.given),
                come_in=keep(self.gradients), take=found.__setitem__, again=again,
            )  # fmt: skip
        return {name: gradient.to(torch.float64) for name, gradient in found.items()}

    def other(self, *, exact: bool) -> Tensors:
        """Compute on what the exact pass gave, in float64 or in the model's dtype."""
        found: Tensors = {}

        def incoming(name: str, own: torch.Tensor) -> torch.Tensor | None:
            gradient = self.gradients.get(name)
            return None if gradient is None else gradient.to(own.dtype)

        def run() -> None:
            backward_by_blocks(
                self.model, self.wanted, self.inputs, loss=of_outputs, take=found.__setitem__,
                given=lambda name, own: self.given[name].to(own.dtype), incoming=incoming,
            )  # fmt: skip

        if not exact:
            run()
            return found
        mode = Float64Mode()
        with mode.with_gradients(self.wanted.values()), mode:
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
    with mode.with_gradients(passes.wanted.values()), mode, torch.enable_grad():
        terms = of_outputs(*outputs(passes.model, passes.inputs))
        found = torch.autograd.grad(
            [one for one, _ in terms], [*passes.wanted.values()], [weights for _, weights in terms], allow_unused=True
        )
    return {name: one for name, one in zip(passes.wanted, found, strict=True) if one is not None}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12 + 1e-9 * float(other.abs().max()))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("again", [True, False])
def test_on_its_own_values_a_model_has_the_gradients_of_autograd(name: str, again: bool) -> None:
    passes = made(name)
    found, wanted = passes.exact(None, again=again), plain(passes)
    assert wanted.keys() == found.keys() & passes.wanted.keys()
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
