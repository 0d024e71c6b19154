"""A model's modules, attributes and hooks are put back as they were."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from consistency.worker.model.structure import Structure
from tests.worker.model.made_models import a_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def model() -> Any:
    return a_llama().eval()


def described(model: torch.nn.Module) -> dict[str, Any]:
    """Return everything of a model that an adapter may change, besides values."""

    def held(value: Any) -> Any:
        return {key: id(one) for key, one in value.items()} if isinstance(value, dict) else id(value)

    return {
        name: (
            id(module),
            {key: held(value) for key, value in vars(module).items()},
            [(parameter.requires_grad, parameter.shape, parameter.dtype) for parameter in module.parameters()],
            module.training,
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"),
    ],
    ids=lambda config: config.peft_type.value.lower(),
)
def test_what_peft_puts_into_a_model_is_taken_out(model: Any, config: Any) -> None:
    before, written = described(model), model.config.to_dict()
    structure = Structure(model)
    adapted = peft.get_peft_model(model, config)
    adapted.train()
    assert described(model) != before
    assert structure.restore()
    assert described(model) == before
    assert model.config.to_dict() == written


def test_whatever_a_user_does_to_a_model_is_undone(model: Any) -> None:
    before, written = described(model), model.config.to_dict()
    structure = Structure(model)
    tied = model.lm_head.weight
    model.resize_token_embeddings(80)
    model.lm_head.register_forward_hook(lambda *_: None)
    model.model.forward = lambda *_: None
    model.config.rope_parameters["rope_theta"] = 7.0
    model.half().train()
    tied.grad = torch.zeros_like(tied)
    tied.left_by_somebody = True
    assert structure.restore()
    assert described(model) == before
    assert model.config.to_dict() == written
    assert tied.grad is None
    assert not hasattr(tied, "left_by_somebody")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tensors_that_no_longer_share_their_memory_are_not_brought_back(model: Any) -> None:
    """Two parameters, not one under two names: nobody sees it in either of them."""
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.data)
    structure = Structure(model)
    assert structure.restore()
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert not structure.restore()
