"""A pass in which every block computes on given values: what is given, what is seen, and that nothing is unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from consistency.numerics.decision import is_real
from consistency.numerics.exact import Float64Mode
from consistency.worker.model.block_pass import ResultPlace, as_exact, rounded, run_by_blocks
from consistency.worker.model.structure import blocks_of
from tests.worker.model.kinds_of_models import GIVEN, albert, no_list, two_layers

Tensors = dict[str, torch.Tensor]


class Passes:
    """An exact pass of a model, and others on what it gives."""

    def __init__(self, make: Callable[[], Any]) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = make().eval(), GIVEN[make]
        self.given: Tensors = {}
        self.exact: Tensors = {}
        with Float64Mode():
            run_by_blocks(
                self.model, self.inputs, self._round,
                lambda place, result: self.exact.update({str(place): as_exact(result, torch.float32)}),
            )  # fmt: skip

    def _round(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.given[name] = rounded(value, torch.float32)
        return self.given[name].to(value.dtype)

    def again(self) -> Tensors:
        found: Tensors = {}
        run_by_blocks(
            self.model, self.inputs, lambda name, own: self.given[name].to(own.dtype),
            lambda place, result: found.update({str(place): result.clone()}),
        )  # fmt: skip
        return found


@pytest.fixture(scope="module", params=GIVEN, ids=lambda make: make.__name__)
def passes(request: pytest.FixtureRequest) -> Passes:
    return Passes(request.param)


def test_another_pass_has_the_same_results_but_for_rounding(passes: Passes) -> None:
    found = passes.again()
    assert found.keys() == passes.exact.keys()
    for name, result in found.items():
        exact = passes.exact[name]
        assert result.shape == exact.shape
        assert torch.allclose(result.double(), exact.double(), rtol=1e-4, atol=1e-5), name


def test_no_wrong_module_is_unseen_and_none_makes_another_block_wrong(passes: Passes) -> None:
    """Whatever a module with parameters returns reaches a result: of its own block, or outside of the blocks."""
    right, blocks = passes.again(), blocks_of(passes.model)
    for name, module in passes.model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        ran: list[bool] = []

        def hook(_: Any, __: Any, found: Any, ran: list[bool] = ran) -> Any:
            ran.append(True)
            return _pytree.tree_map(lambda one: one * 1.5 + 0.5 if is_real(one) else one, found)

        handle = module.register_forward_hook(hook)
        wrong = {place for place, result in passes.again().items() if not torch.equal(result, right[place])}
        handle.remove()
        own = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
        if ran and not name.endswith("vision_tower.post_layernorm"):  # nothing takes what it returns
            assert wrong, f"{name} is wrong, and nothing differs"
        if own is not None:
            assert {place for place in wrong if not place.startswith((f"{own}:", f"{own}."))} == set()


def test_every_block_and_its_parts_and_the_outputs_are_results() -> None:
    layers = {ResultPlace.of(name) for name in Passes(two_layers).exact}
    parts = ("", ".self_attn", ".mlp", ".input_layernorm", ".post_attention_layernorm")
    assert {ResultPlace(f"model.layers.{n}{part}") for n in (0, 1) for part in parts} <= layers
    assert ResultPlace("logits") in layers
    assert ResultPlace("model.layers.0", "input.hidden_states") in layers
    assert {ResultPlace("model.layers.0", f"input.position_embeddings.{n}") for n in (0, 1)} <= layers
    assert ResultPlace("model.layers.1", "input.hidden_states") not in layers, "what the block before it left"


def test_a_block_that_runs_again_has_a_number() -> None:
    names = [name for name in Passes(albert).exact if "albert_layer_groups" in name]
    assert {name.rpartition("@")[2] for name in names if "@" in name} == {"2"}


def test_a_model_without_blocks_is_one() -> None:
    assert blocks_of(no_list()) == {}
    assert [*Passes(no_list).exact] == ["output::"]


def test_infinity_stays_and_what_overflows_is_the_largest_number() -> None:
    values = torch.tensor([-torch.inf, torch.inf, torch.nan, 1e300, -1e300, 1.0], dtype=torch.float64)
    found = rounded(values, torch.float16)
    assert found.dtype == torch.float16
    assert found.tolist()[:2] == [-torch.inf, torch.inf]
    assert found.isnan().tolist() == [False, False, True, False, False, False]
    assert found.tolist()[3:] == [65504, -65504, 1]


def test_the_smallest_number_of_a_mask_is_that_of_the_dtype() -> None:
    mask = torch.tensor([torch.finfo(torch.float64).min, 0.0, -torch.inf], dtype=torch.float64)
    assert as_exact(mask, torch.bfloat16).tolist() == [torch.finfo(torch.bfloat16).min, 0, -torch.inf]
