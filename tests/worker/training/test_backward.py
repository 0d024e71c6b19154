"""The backward passes: in which dtype, over which parts, and that the model is left as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from consistency.case.budget.costs import TRAINING_PARTS
from consistency.case.builtin import builtin_folder
from consistency.numerics.exact import HAS_GRAD_DTYPE
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.sizes import PART_BYTES
from consistency.worker.judging.gradients import as_it_is, from_end_to_end
from consistency.worker.memory.peak import ProfilerMeter
from consistency.worker.model.block_backward import Backward, NoGradientError
from consistency.worker.training.backward import loss_weights, of_outputs, parts_of, trained
from tests.versions import needs_method
from tests.worker.model.made_models import on_llama

Tensors = dict[str, torch.Tensor]


class Layer(torch.nn.Module):
    """A layer that casts to float32 where it is careful, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.frozen = torch.nn.Linear(8, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.frozen(self.first(x)))
        return torch.softmax(x.to(torch.float32), dim=-1).to(self.first.weight.dtype)


class Careful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.last = torch.nn.Linear(6, 5)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.last(x)
        return found


NAMES = ["layers.0.first.weight", "layers.1.first.bias", "last.weight", "unused"]


@pytest.fixture
def inputs() -> Tensors:
    return {"x": torch.linspace(-2, 2, 8 * 3 * 6).reshape(8, 3, 6).sin()}


def gradients(model: torch.nn.Module, inputs: Tensors, names: list[str] = NAMES, *, exact: bool = False) -> Tensors:
    wanted = {name: model.get_parameter(name) for name in names}
    of = Backward(model=model, parameters=wanted, inputs=inputs, loss=of_outputs)
    return from_end_to_end(of, as_it_is, exact=exact)


def plain(model: torch.nn.Module, inputs: Tensors) -> Tensors:
    twin = copy.deepcopy(model)
    output = twin(**inputs)
    output.backward(loss_weights(output))
    return {name: p.grad for name, p in twin.named_parameters() if name in NAMES and p.grad is not None}


def test_gradients_are_those_of_torch(inputs: Tensors) -> None:
    expected = plain(Careful(), inputs)
    assert set(expected) == set(NAMES) - {"unused"}
    found = gradients(Careful(), inputs)
    assert set(found) == set(expected), "nothing depends on one of them"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_passes_are_parts_of_the_batch(inputs: Tensors) -> None:
    parts = parts_of(inputs)
    assert [part["x"].shape[0] for part in parts] == [2] * TRAINING_PARTS
    assert torch.equal(torch.cat([part["x"] for part in parts]), inputs["x"])


def test_inputs_that_are_no_batch_are_one_pass() -> None:
    assert len(parts_of({"x": torch.ones(4, 2), "mask": torch.ones(3)})) == 1
    assert len(parts_of({"x": torch.ones(4, 2), "scale": torch.tensor(1.0)})) == 1
    assert [part["x"].shape[0] for part in parts_of({"x": torch.ones(3, 2)})] == [1, 1, 1]


def test_the_weights_of_the_loss_are_exact_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = loss_weights(torch.empty(8, 16, 256, dtype=dtype))
        assert weights.dtype == dtype
        assert set(weights.unique().tolist()) == {2.0**-8, -(2.0**-8)}


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_float64_throughout(
    inputs: Tensors, dtype: torch.dtype, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a float64 copy of the parameters, and without one."""
    monkeypatch.setattr("consistency.numerics.exact._LARGE", 1 if is_large else 1 << 22)
    model = Careful().to(dtype)
    inputs = {"x": inputs["x"].to(dtype)}
    found = gradients(model, inputs, exact=True)
    twin = copy.deepcopy(model).double()
    x = inputs["x"].double()
    for layer in twin.layers:
        x = torch.softmax(torch.nn.functional.gelu(layer.frozen(layer.first(x))), dim=-1)  # type: ignore[operator]
    output = twin.last(x)
    output.backward(loss_weights(output))
    for name in NAMES[:3]:
        expected = twin.get_parameter(name).grad
        assert expected is not None
        assert found[name].dtype == torch.float64
        assert torch.allclose(found[name], expected, rtol=1e-12, atol=1e-15)
        assert model.get_parameter(name).dtype == dtype


class Head(torch.nn.Module):
    """A large matrix, used by a layer and by model code of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


class ByHand(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.weight.t()
        halves = self.weight.chunk(2)
        kind = type(x @ turned)
        assert kind is torch.Tensor
        return x @ turned * 2 + torch.cat([x @ half.transpose(0, 1) for half in halves], -1) + turned.sum().exp()


def test_views_of_a_large_parameter_are_used_in_float64_in_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.numerics.exact._LARGE", 1)
    model, inputs = ByHand(6, 4), {"x": torch.linspace(0, 1, 12).reshape(3, 4)}
    found = gradients(model, inputs, ["weight"], exact=True)["weight"]
    twin = copy.deepcopy(model).double()
    output = twin(inputs["x"].double())
    output.backward(loss_weights(output))
    assert found.dtype == torch.float64
    assert twin.weight.grad is not None
    assert torch.allclose(found, twin.weight.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="this torch needs a float64 copy of what has a float64 gradient")
def test_a_large_gradient_is_all_that_float64_takes() -> None:
    """No float64 copy of the parameter, nor a second one of its gradient."""
    model, inputs = Head(1 << 13, 1 << 10), {"x": torch.ones(2, 1 << 10)}
    peaks = ProfilerMeter().measure(lambda _: gradients(model, inputs, ["weight"], exact=True).clear())
    gradient, buffer = model.weight.numel() * 8, PART_BYTES
    assert gradient <= peaks.whole < 1.1 * (gradient + buffer)


class InFrequency(torch.nn.Module):
    """Complex numbers in between, as some methods have them, and a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.sparse = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([[0, 1], [2, 3]])
        added = torch.sparse_coo_tensor(places, self.sparse, (4, 4), check_invariants=False).to_dense()
        found: torch.Tensor = x @ (torch.fft.ifft2(self.weight).real * 3 + added)
        return found


def test_complex_numbers_and_sparse_matrices_are_no_obstacle() -> None:
    found = gradients(InFrequency(), {"x": torch.ones(2, 4)}, ["weight", "sparse"], exact=True)
    assert found["weight"].dtype == found["sparse"].dtype == torch.float64


def test_products_in_float32_kernels_err_as_native_ones(inputs: Tensors) -> None:
    model, inputs = Careful().bfloat16(), {"x": inputs["x"].bfloat16()}
    exact = gradients(model, inputs, exact=True)
    native = gradients(model, inputs)
    with RoundedProducts():
        rounded = gradients(model, inputs)
    for name in NAMES[:3]:
        errors = [float((found[name].double() - exact[name]).abs().max()) for found in (native, rounded)]
        assert rounded[name].dtype == torch.bfloat16
        assert 1 / 4 <= errors[1] / errors[0] <= 4


def test_the_model_is_left_as_it_was(inputs: Tensors) -> None:
    model = Careful().eval()
    before = {name: (p.detach().clone(), p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()}
    gradients(model, inputs)
    gradients(model, inputs, exact=True)

    def refuse(**_: Any) -> torch.Tensor:
        raise ValueError("no")

    model.forward = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match="no"):
        gradients(model, inputs, exact=True)
    for name, parameter in model.named_parameters():
        data, needed, pointer = before[name]
        assert torch.equal(parameter, data)
        assert (parameter.requires_grad, parameter.data_ptr(), parameter.grad) == (needed, pointer, None)
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
        assert getattr(parameter, "grad_dtype", parameter.dtype) == parameter.dtype
    assert not any(module.training for module in model.modules())
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_model_that_ends_with_nothing_of_the_adapter_says_so(inputs: Tensors) -> None:
    model = Careful()
    model.register_forward_hook(lambda *found: found[2].detach())
    with pytest.raises(NoGradientError, match="no output of the model depends on the adapter"):
        gradients(model, inputs)


# which tensors training changes


class Everything(dict[str, object]):
    """An adapter's file that holds every tensor."""

    def __contains__(self, key: object) -> bool:
        return True


def loaded(tmp_path: Path, config: Any) -> Any:
    base = tmp_path / "base"
    base.symlink_to(builtin_folder("llama") / "base")
    adapter = on_llama(base, config)
    from transformers import AutoModelForCausalLM

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def last_parts(names: list[str]) -> set[str]:
    return {name.removeprefix("base_model.model.").replace(".default", "") for name in names}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_embedding_that_is_saved_beside_its_factors_is_not_trained(tmp_path: Path) -> None:
    model = loaded(tmp_path, peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM"))
    names = last_parts(trained(model, Everything()))
    assert {"model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_B"} <= names
    assert not any("base_layer" in name for name in names)
    assert not any(p.requires_grad for p in model.parameters()), "as it was"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT 0.18, of any such module
def test_whole_modules_and_biases_are_trained_where_the_config_says_so(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], bias="all", task_type="CAUSAL_LM")
    names = last_parts(trained(loaded(tmp_path, config), Everything()))
    assert "lm_head.modules_to_save.weight" in names
    assert not any("original_module" in name or name.endswith("embed_tokens.weight") for name in names)


def test_a_prompt_is_trained(tmp_path: Path) -> None:
    model = loaded(tmp_path, peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    assert trained(model, Everything()) == ["prompt_encoder.default.embedding.weight"]


def test_a_vector_that_layers_share_is_trained_by_its_name_in_the_file(tmp_path: Path) -> None:
    """Each layer has it under a name of its own, and the first of these is in no file."""
    config = peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=64, topk=2, target_modules=["q_proj", "v_proj"])
    model, bank = loaded(tmp_path, config), "base_model.vblora_vector_bank.default"
    found = trained(model, {bank: None})
    assert found == [bank]
    taken = gradients(model, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, found)
    assert taken[bank].shape == (8, 64)
    assert bool(taken[bank].any())


def test_a_method_that_marks_its_own_model_is_asked_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X-LoRA's takes no argument."""
    model = loaded(tmp_path, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    asked: list[bool] = []
    monkeypatch.setattr(model.base_model, "_mark_only_adapters_as_trainable", lambda: asked.append(True))
    assert trained(model, Everything())
    assert asked


@needs_method("TinyLoraConfig")
def test_vectors_of_the_model_itself_are_trained(tmp_path: Path) -> None:
    """TinyLoRA marks them for adapters alone that were loaded to be trained."""
    config = peft.TinyLoraConfig(r=2, u=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = loaded(tmp_path, config)
    name = "base_model.tinylora_v.default.0"
    assert trained(model, {name: None}) == [name]


def test_what_a_method_without_marks_trains_is_found(tmp_path: Path) -> None:
    model = loaded(tmp_path, peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"))
    names = [name for name, p in model.named_parameters() if "adaption" in name]
    assert {name.rpartition(".")[2] for name in trained(model, dict.fromkeys(names))} == {
        "adaption_prompt",
        "adaption_gate",
    }


@pytest.mark.parametrize("exact", [False, True])
def test_the_gradient_of_a_prefix_is_computed_although_its_cache_grows(tmp_path: Path, exact: bool) -> None:
    model = loaded(tmp_path, peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    given = {"input_ids": torch.arange(8).reshape(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    names = trained(model, Everything())
    assert names == ["prompt_encoder.default.embedding.weight"]
    (found,) = gradients(model, given, names, exact=exact).values()
    assert found.dtype == (torch.float64 if exact else torch.float32)
    assert bool(found.any())


def test_a_convolution_that_is_computed_again_is_float64_too(inputs: Tensors) -> None:
    """torch takes the modes for functions off while it runs backward."""

    class Convolving(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = torch.nn.ModuleList(torch.nn.Conv1d(3, 3, 1) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]

    model = Convolving()
    found = gradients(model, inputs, ["layers.1.weight"], exact=True)["layers.1.weight"]
    twin = copy.deepcopy(model).double()
    output = twin(inputs["x"].double())
    output.backward(loss_weights(output))
    expected = twin.layers[1].weight.grad
    assert isinstance(expected, torch.Tensor)
    assert torch.allclose(found, expected, rtol=1e-12)
