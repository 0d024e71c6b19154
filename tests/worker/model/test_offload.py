"""Weights that arrive with the layer that needs them, on the CPU: there they arrive as they are."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.worker.environment import release
from consistency.worker.model.loading import LoadedBase, load_adapter, load_base, load_model
from consistency.worker.model.merging import MergeRefusedError, in_merged
from consistency.worker.model.offload import units_of
from consistency.worker.model.running import activations, device_of, is_of_the_model, refusal
from tests.worker.model.made_models import adapter_on, case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

INPUTS = {"input_ids": torch.arange(12).reshape(2, 6)}

METHODS = {
    "lora": peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    # these read the base weight outside of the base layer's forward pass
    "dora": peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "boft": peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
    "saved": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    # this one rewrites the base weights when it is loaded
    "pissa": peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def both(folder: Path, method: str | None) -> tuple[Any, LoadedBase, Any]:
    """Return a model on its device, and the base and the model of an offloaded one."""
    adapter = None if method is None else on_llama(folder, METHODS[method])
    case = case_of(folder, adapter)
    base = load_base(case, "cpu", offload=True)
    return load_model(case, "cpu"), base, base.model if adapter is None else load_adapter(base, case).model


@pytest.mark.parametrize("method", [None, *METHODS])
def test_an_offloaded_model_gives_the_same_bits(llama: Path, method: str | None) -> None:
    plain, base, model = both(llama, method)
    expected = activations(plain, INPUTS)
    for _ in range(2):
        found = activations(model, INPUTS)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(p.is_meta for n, p in model.named_parameters() if base.tensors.keys() & {n, n.partition("model.")[2]})
    assert device_of(model) == torch.device("cpu")


@pytest.mark.parametrize("method", [None, *METHODS])
def test_every_tensor_arrives_and_leaves(llama: Path, method: str | None) -> None:
    _, base, model = both(llama, method)
    plain = load_base(case_of(llama, llama.parent / "adapter" if method else None), "cpu")
    if method is not None:
        load_adapter(plain, case_of(llama, llama.parent / "adapter"))
    held = dict(base.on_device())
    assert held.keys() == plain.tensors.keys()
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in held.items())
    (one,) = base.on_device({"lm_head.weight"})
    assert one[0] == "lm_head.weight"
    resident = {id(p) for p in model.parameters() if not p.is_meta}
    assert all(p.is_meta for p in base.model.get_submodule("model.norm").parameters())
    with base.onload(model):
        assert not any(p.is_meta for p in model.parameters())
    assert {id(p) for p in model.parameters() if not p.is_meta} == resident, "the adapter's own are still there"


@pytest.mark.parametrize("method", ["lora", "dora", "boft"])
def test_layers_are_merged_when_they_arrive(llama: Path, method: str) -> None:
    plain, _, model = both(llama, method)
    on = activations(plain, INPUTS)
    with torch.no_grad():
        plain.merge_adapter()
    expected, found = activations(plain, INPUTS), in_merged(model, lambda: activations(model, INPUTS))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # before version 0.20 PEFT runs a BOFT with the weight that it would merge
    if method != "boft" or release("peft") >= (0, 20):
        assert not torch.equal(found["logits"], on["logits"]), "merged weights round otherwise"
    again = in_merged(model, lambda: activations(model, INPUTS))
    assert torch.equal(found["logits"], again["logits"]), "nothing of a merge stays"
    assert torch.equal(activations(model, INPUTS)["logits"], on["logits"])


def test_layers_inside_a_module_with_weights_of_its_own_are_merged_once(masked_bert: Path) -> None:
    """The head of this model has a bias, and an adapted layer inside."""
    plain = transformers.BertForMaskedLM.from_pretrained(masked_bert)
    adapter = adapter_on(plain, peft.LoraConfig(r=2, target_modules=["dense"]), masked_bert.parent / "adapter")
    case = case_of(masked_bert, adapter)
    models = (load_model(case, "cpu"), load_adapter(load_base(case, "cpu", offload=True), case).model)
    expected, found = (in_merged(model, functools.partial(activations, model, INPUTS)) for model in models)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_peft_does_not_merge_leaves_no_trace(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, model = both(llama, "lora")
    expected = activations(model, INPUTS)

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", refuse)
    with pytest.raises(MergeRefusedError, match="no"):
        in_merged(model, lambda: activations(model, INPUTS))
    found = activations(model, INPUTS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_copy_of_a_layer_copies_no_weights(llama: Path) -> None:
    _, _, model = both(llama, "lora")
    twin = copy.deepcopy(model)
    assert [unit for _, unit in units_of(twin)] == [unit for _, unit in units_of(model)]
    assert units_of(model)


def test_an_adapter_is_loaded_onto_the_host_s_own_parameters(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, METHODS["lora"]))
    base = load_base(case, "cpu", offload=True)
    before = {name: id(tensor) for name, tensor in base.tensors.items()}
    seen: dict[str, int] = {}
    real = peft.PeftModel.load_adapter

    def look(model: Any, *args: Any, **options: Any) -> Any:
        seen.update((n, id(p)) for n, p in base.model.named_parameters() if "lora" not in n)
        return real(model, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "load_adapter", look)
        load_adapter(base, case)
    assert set(seen.values()) <= set(before.values())
    assert seen


def test_weights_that_no_hook_brings_are_the_models_matter(llama: Path) -> None:
    """Some code reads a layer's weight without calling the layer."""
    model: Any = load_base(case_of(llama, None), "cpu", offload=True).model
    real, weight = model.model.forward, model.lm_head.weight
    model.model.forward = lambda *args, **kwargs: (weight.sum().item(), real(*args, **kwargs))
    with pytest.raises((RuntimeError, NotImplementedError)) as failed:
        activations(model, INPUTS)
    assert is_of_the_model(failed.value, model)
    assert refusal(case_of(llama, None), failed.value, model).startswith(
        "the model reads weights that accelerate's hooks do"
    )
