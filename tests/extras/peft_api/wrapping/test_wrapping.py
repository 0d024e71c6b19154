"""A wrapper that hides nothing passes; what wrappers hide or hold twice is said, and the model is left as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import consistency
from consistency.case.builtin import builtin_folder
from consistency.extras.peft_api.wrapping.check import check_wrapped
from consistency.extras.peft_api.wrapping.keys import prefix_of
from consistency.extras.peft_api.wrapping.planted import Harmless, Hiding, HoldingTwice
from consistency.extras.peft_api.wrapping.report import WrapperReport
from tests.worker.model.made_models import a_llama


def llama(**options: Any) -> Any:
    return a_llama(num_hidden_layers=2, **options)


def kinds(report: WrapperReport) -> list[tuple[str, str, str]]:
    return [(f.check, f.kind, f.where) for f in report.findings]


def same(model: nn.Module) -> list[Any]:
    """Return everything of a model's tensors that a look could change."""
    return [(n, p.data_ptr(), p.dtype, p.requires_grad, p.grad, dict(vars(p))) for n, p in model.named_parameters()]


@pytest.mark.parametrize("wrap", [lambda m: m, Harmless, lambda m: nn.ModuleDict({"a": m})["a"]])
def test_what_hides_nothing_passes(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = llama()
    before = same(model)
    report = check_wrapped(wrap(model), model, step=False)
    assert report.findings == ()
    assert report.prefix == ("model." if wrap is Harmless else "")
    assert report.figures["adapter_layers"] == {"layers": 4, "layers_plain": 4}
    assert same(model) == before
    assert not any("lora" in name for name, _ in model.named_modules())
    assert consistency.check_wrapped is check_wrapped


def test_tied_weights_and_another_instance_are_no_fault() -> None:
    plain, other = llama(tie_word_embeddings=True), llama(tie_word_embeddings=True)
    other.load_state_dict(plain.state_dict())
    assert check_wrapped(Harmless(other), plain, step=False).findings == ()


def test_what_the_first_wrapper_of_everybody_hides() -> None:
    model = llama()
    found = kinds(check_wrapped(Hiding(model), model, step=False))
    assert found == [
        ("reach", "hidden", "config"),
        ("reach", "hidden", "gradient_checkpointing_enable"),
        ("reach", "hidden", "enable_input_require_grads"),
        ("reach", "hidden", "get_input_embeddings"),
        ("adapter_layers", "layers-missed", "get_peft_model"),
    ]


class InAList(Harmless):
    """Keep the model where neither PEFT nor torch looks."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.models = [model]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.models[0], name)


def test_a_model_in_a_list_is_not_found() -> None:
    model = llama()
    found = kinds(check_wrapped(InAList(model), model, step=False))
    assert [(check, kind) for check, kind, _ in found] == [
        ("keys", "keys"),
        ("adapter_layers", "layers-missed"),
        ("adapter_layers", "layers-missed"),
    ]


class UnderTwoNames(Harmless):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.again = model.model


class WithHead(Harmless):
    """Add a head of its own, as wrappers for reinforcement learning do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.value = nn.Linear(32, 1)


def test_keys_under_two_names_and_a_head_of_its_own() -> None:
    model = llama()
    ((check, kind, where),) = kinds(check_wrapped(UnderTwoNames(model), model, step=False))
    assert (check, kind) == ("keys", "keys")
    assert where.startswith("again.embed_tokens.weight")
    assert check_wrapped(WithHead(model), model, step=False).findings == ()


def test_a_copy_is_told_by_its_address() -> None:
    model = llama()
    (finding,) = check_wrapped(HoldingTwice(model), model, step=False).findings
    assert finding.kind == "held-twice"
    size = sum(t.nbytes for t in model.state_dict().values())
    assert finding.what == f"{len(model.state_dict())} storages are held twice: {size} bytes"


def test_another_dtype_through_the_wrapper() -> None:
    plain, other = llama(), llama()
    other.load_state_dict(plain.state_dict())
    other.lm_head.to(torch.bfloat16)
    (finding,) = check_wrapped(Harmless(other), plain, step=False).findings
    assert (finding.kind, finding.where, finding.got, finding.wanted) == (
        "dtype", "lm_head.weight", "bfloat16", "float32",
    )  # fmt: skip


class Hoarding(Harmless):
    """Keep what the layers made, for somebody to look at."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, output_hidden_states=True, **kwargs)
        self.hoard = [h.detach().repeat(1, 1, 8) for h in output.hidden_states for _ in range(4)]
        return output


@pytest.mark.parametrize(("wrap", "wanted"), [(Harmless, []), (Hoarding, ["more-memory"])])
def test_peak_of_a_training_step(wrap: type[Harmless], wanted: list[str]) -> None:
    model = llama()
    report = check_wrapped(wrap(model), model)
    assert [f.kind for f in report.findings] == wanted
    figures = report.figures["training_step"]
    assert figures["peak_plain_bytes"] < figures["allowed_bytes"]
    if not wanted:
        assert figures["peak_bytes"] == figures["peak_plain_bytes"], "the same operations, to the byte"


def test_a_wrapper_that_loses_the_inputs_cannot_be_trained() -> None:
    class Deaf(Harmless):
        def forward(self, pixels: torch.Tensor) -> Any:
            return self.model(pixels)

    model = llama()
    (finding,) = check_wrapped(Deaf(model), model).findings
    assert finding.kind == "does-not-run"
    assert "unexpected keyword argument" in finding.got


def test_without_a_config_there_is_nothing_to_train_by() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    report = check_wrapped(model, model)
    assert report.findings == ()
    assert "no config" in report.skipped["training_step"]


def test_prefix_is_the_one_behind_which_the_model_is() -> None:
    plain = ["a.weight", "b.weight"]
    assert prefix_of(["x.a.weight", "x.b.weight", "y.a.weight"], plain) == "x."
    assert prefix_of(plain, plain) == ""
    assert prefix_of(["xa.weight"], ["a.weight"]) is None


def test_fixture_fails_with_the_sentences(consistency_check_wrapped: Callable[..., WrapperReport]) -> None:
    model = llama()
    assert consistency_check_wrapped(Harmless(model), model, step=False).passed
    with pytest.raises(pytest.fail.Exception, match="the wrapper hides config"):
        consistency_check_wrapped(Hiding(model), model, step=False)


def eight_bit(library: str) -> nn.Module:
    """Load the built-in base in 8 bits on the CPU: what the library does there is its real code."""
    pytest.importorskip(library, reason=f"{library} is not installed: no 8-bit base on this machine")
    if library == "bitsandbytes":
        from transformers import BitsAndBytesConfig

        quantization: Any = BitsAndBytesConfig(load_in_8bit=True)
    else:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        quantization = TorchAoConfig(Int8WeightOnlyConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = AutoModelForCausalLM.from_pretrained(
            builtin_folder("llama") / "base", quantization_config=quantization, device_map={"": "cpu"}
        )
    return found


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
@pytest.mark.filterwarnings("ignore")
def test_eight_bit_base_behind_a_wrapper(library: str) -> None:
    """peft#1902: PEFT and the trainer miss the 8-bit model, and a training step takes more than twice the memory.

    Both libraries really run on the CPU, forward and backward: seen with bitsandbytes 0.50.2 and torchao 0.18.0 beside
    torch 2.13.
    """
    plain = eight_bit(library)
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        before = eight_bit(library)(input_ids=ids).logits
    assert check_wrapped(Harmless(plain), plain).findings == ()
    report = check_wrapped(Hiding(plain), plain)
    found = {f.where: f for f in report.findings}
    assert {"is_quantized", "quantization_method", "hf_quantizer", "prepare_model_for_kbit_training"} <= set(found)
    figures = report.figures["training_step"]
    assert figures["peak_bytes"] > 2 * figures["peak_plain_bytes"]
    if library == "bitsandbytes":
        assert "is_loaded_in_8bit" in found
        (other,) = [f for f in report.findings if "of another kind" in f.what]
        assert other.got.startswith("Linear with")
        assert other.wanted.startswith("Linear8bitLt with")
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, before), "the model is as it was"
