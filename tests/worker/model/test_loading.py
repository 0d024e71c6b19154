"""Loading base and adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from consistency.errors import InputError
from consistency.worker.model.loading import library_missing, load_adapter, load_base
from tests.worker.model.made_models import SIZES, case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("says", ["CUDA error: out of memory", "CUDA error: uncorrectable ECC error encountered"])
def test_an_error_of_the_device_is_no_base_or_adapter_that_cannot_be_loaded(
    llama: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    case = case_of(llama, on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"])))
    base = load_base(case, "cpu")
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", raising(torch.AcceleratorError(says)))
    with pytest.raises(torch.AcceleratorError, match=says):
        load_adapter(base, case)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", raising(torch.AcceleratorError(says)))
    with pytest.raises(torch.AcceleratorError, match=says):
        load_base(case, "cpu")


@pytest.mark.parametrize(
    ("error", "raised"),
    [(torch.AcceleratorError("CUDA error: out of memory"), torch.AcceleratorError), (ValueError("odd"), InputError)],
)
def test_what_transformers_converts_does_not_hide_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    """It merges the experts of a mixture into one tensor, and logs what goes wrong in that."""
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    case = case_of(tmp_path, None)
    load_base(case, "cpu")
    monkeypatch.setattr(core_model_loading.MergeModulelist, "convert", raising(error))
    with pytest.raises(raised):
        load_base(case, "cpu")


def test_a_file_without_a_tensor_that_its_config_asks_for_is_told_so(llama: Path) -> None:
    adapter = on_llama(llama, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("lm_head.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    case = case_of(llama, adapter)
    with pytest.raises(InputError, match="the adapter's file lacks a tensor that its config asks for") as caught:
        load_adapter(load_base(case, "cpu"), case)
    assert caught.value.got == f"no {lost}"


@pytest.mark.parametrize("error", [TypeError("unexpected keyword"), ValueError("size mismatch")])
def test_an_error_of_code_leads_to_the_versions(llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """PEFT 0.21 under transformers 5.0 raises so on some mixtures of experts."""
    case = case_of(llama, on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"])))
    base = load_base(case, "cpu")
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", raising(error))
    with pytest.raises(InputError) as raised:
        load_adapter(base, case)
    versions = f"does peft {peft.__version__} fit transformers {transformers.__version__}? "
    expected = f"{versions if isinstance(error, TypeError) else ''}is it for {case.base}?"
    assert (raised.value.parts["hint"], raised.value.parts["got"]) == (expected, f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("function", ["a_model", "a_plain_module"])
def test_the_model_of_a_factory_is_brought_to_the_dtype(function: str) -> None:
    """It was computed as the factory gave it, and reported as what was asked for."""
    case = case_of(Path(f"python:tests.worker.model.made_models:{function}"), None, dtype="bfloat16")
    base = load_base(case, "cpu")
    assert base.dtype == "bfloat16"
    assert {tensor.dtype for tensor in base.model.parameters()} == {torch.bfloat16}
    for name, tensor in base.model.named_buffers():  # as `from_pretrained` leaves them; numbers that are no floats too
        assert tensor.dtype == (torch.complex64 if name == "turns" else torch.float32)


def test_the_model_of_a_factory_keeps_its_dtype_where_none_is_asked_for() -> None:
    case = case_of(Path("python:tests.worker.model.made_models:a_plain_module"), None, dtype="auto")
    assert load_base(case, "cpu").dtype == "float32"


def test_a_quantized_model_of_a_factory_is_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.worker.model.loading.quantized_layers", lambda model: iter([("0", model)]))
    case = case_of(Path("python:tests.worker.model.made_models:a_plain_module"), None, dtype="float16")
    with pytest.raises(InputError, match="a quantized model cannot be brought to another dtype"):
        load_base(case, "cpu")


def test_an_embedding_with_more_rows_asks_for_a_base_of_that_size(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint asked whether the adapter is for this base; a token was added to it."""
    case = case_of(llama, on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"])))
    says = (
        "Error(s) in loading state_dict: size mismatch for base_model.model.model.embed_tokens.weight: copying a param "
        "with shape torch.Size([65, 32]) from checkpoint, the shape in current model is torch.Size([64, 32])."
    )
    base = load_base(case, "cpu")
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", raising(RuntimeError(says)))
    with pytest.raises(InputError) as raised:
        load_adapter(base, case)
    assert "model.resize_token_embeddings(65)" in str(raised.value.parts["hint"])


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("The required package 'scipy' is not installed. Please install it to continue.", "pip install scipy"),
        ("No module named 'bitsandbytes'", "pip install bitsandbytes"),
        ("something else", None),
    ],
)
def test_a_library_that_peft_lacks_is_named_in_its_words(message: str, hint: str | None) -> None:
    error = library_missing(ImportError(message), "adapter")
    assert (error.parts["got"], error.hint) == (f"ImportError: {message}", hint)


@pytest.mark.parametrize("kind", [ImportError, AssertionError])
def test_what_a_library_of_peft_lacks_is_no_other_base(
    llama: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The hint was whether the adapter is for this base, and an AssertionError was a mistake of this tool."""
    case = case_of(llama, on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"])))
    base = load_base(case, "cpu")
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", raising(kind("Torch not compiled with CUDA enabled")))
    with pytest.raises(InputError) as refused:
        load_adapter(base, case)
    assert "is it for" not in str(refused.value)
    assert "Torch not compiled with CUDA" in str(refused.value)
