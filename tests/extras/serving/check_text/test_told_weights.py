"""Weights in few bits that a text was written with are named, by values that other code has rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from consistency.case.case import Case
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text import told_weights
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.report import TextReport
from consistency.extras.serving.engine_outputs.rounded_weights import FORMATS, rounded, rounded_layers
from consistency.numerics.digest import digest
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded, texts_of
from tests.worker.model.made_models import SIZES, a_llama, adapter_on, case_of, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]

Round = Callable[[torch.Tensor], torch.Tensor]


def int8_by_row(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1) / 127
    quantized = torch.quantize_per_channel(weight, scales, torch.zeros(len(weight)), 0, torch.qint8)
    return quantized.dequantize()


def int8_in_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    return int8_by_row(weight.float()).bfloat16()


def float8_by_row(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scales).to(torch.float8_e4m3fn).float() * scales


def float8_by_tensor(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Round as `quantize_row_q8_0_ref` of ggml does: blocks of 32, their scale in float16."""
    blocks = weight.numpy().reshape(-1, 32)
    scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    codes = np.round(blocks * (1 / scales))
    return torch.from_numpy((codes * scales.astype(np.float16).astype(np.float32)).reshape(weight.shape))


ROUNDINGS: dict[str, Round] = {
    "int8 by row": int8_by_row,
    "float8_e4m3fn by row": float8_by_row,
    "float8_e4m3fn by tensor": float8_by_tensor,
    "int8 in blocks of 32": q8_0,
}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    torch.manual_seed(0)
    base = saved(a_llama(num_hidden_layers=2, intermediate_size=64, max_position_embeddings=96), tmp_path / "base")
    return case_of(base, on_llama(base, LORA))


def _round_base(model: Any, rounding: Round) -> None:
    """Round the weights of a model's linear layers in place, but for the head and the adapter."""
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D)
        if is_linear and "lora" not in name and "lm_head" not in name:
            is_transposed = not isinstance(module, torch.nn.Linear)
            weight = module.weight.data.T if is_transposed else module.weight.data
            module.weight.data = rounding(weight.contiguous()).T if is_transposed else rounding(weight)


def _named(report: TextReport) -> str:
    """Return what is said of the weights, the one cause that is named."""
    assert report.exit_status == 1
    assert (report.causes or report.logprob_causes) == (Cause.WEIGHTS.value,)
    return report.about[Cause.WEIGHTS.value]


def test_q8_0_is_that_of_gguf() -> None:
    constants = pytest.importorskip("gguf.constants")
    quants = pytest.importorskip("gguf.quants")
    weight = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    kind = constants.GGMLQuantizationType.Q8_0
    wanted = quants.dequantize(quants.quantize(weight, kind), kind)
    (blocks_of_32,) = (weights for weights in FORMATS if weights.name == "int8 in blocks of 32")
    assert torch.equal(blocks_of_32.rounded(torch.from_numpy(weight)), torch.from_numpy(wanted))


@pytest.mark.parametrize("name", list(ROUNDINGS))
def test_the_base_in_few_bits(case: Case, name: str) -> None:
    model = loaded(case)
    _round_base(model, ROUNDINGS[name])
    assert _named(check_text(case, texts_of(model, drawn=True))) == name


@pytest.mark.parametrize("name", ["int8 by row", "float8_e4m3fn by row"])
def test_the_sums_with_the_adapter_in_few_bits(case: Case, name: str) -> None:
    model = loaded(case).merge_and_unload()
    _round_base(model, ROUNDINGS[name])
    report = check_text(case, texts_of(model, drawn=True))
    assert _named(report) == f"{name}, rounded after the adapter was merged"


def test_weights_of_a_library_that_are_nearly_a_format(case: Case) -> None:
    """What is left unexplained is said: bitsandbytes takes codes from weights in float16."""

    def rounding(weight: torch.Tensor) -> torch.Tensor:
        return int8_by_row(weight.half().float())

    model = loaded(case)
    _round_base(model, rounding)
    report = check_text(case, texts_of(model, drawn=True))
    assert _named(report) == "int8 by row, and other errors besides"


def test_inputs_that_are_rounded_too(case: Case) -> None:
    """No pass here has the errors of rounded inputs: they are noise, in which enough tokens show the weights."""
    model = loaded(case)
    _round_base(model, float8_by_row)

    def inputs_in_float8(_layer: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values = args[0]
        return (float8_by_row(values.reshape(-1, values.shape[-1])).reshape(values.shape),)

    for layer in rounded_layers(model):
        layer.register_forward_pre_hook(inputs_in_float8)
    report = check_text(case, texts_of(model, tokens=64, drawn=True))
    assert _named(report) == "float8_e4m3fn by row, and other errors besides"


def test_layers_with_their_weights_in_columns(tmp_path: Path) -> None:
    """GPT-2 holds the weights of one output as a column."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 64, "eos_token_id": 1}
    base = saved(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), tmp_path / "base")
    model = transformers.GPT2LMHeadModel.from_pretrained(base)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    case = case_of(base, adapter_on(model, lora, tmp_path / "adapter"))
    model = loaded(case)
    _round_base(model, int8_by_row)
    assert _named(check_text(case, texts_of(model, drawn=True))) == "int8 by row"


def test_other_mistakes_are_not_taken_for_rounded_weights(case: Case) -> None:
    """An error of the same size in the weights, by chance."""

    def noise(weight: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(11)
        return weight + (int8_by_row(weight) - weight).std() * torch.randn(weight.shape, generator=generator)

    model = loaded(case)
    _round_base(model, noise)
    report = check_text(case, texts_of(model, drawn=True))
    assert Cause.WEIGHTS.value not in (*report.causes, *report.logprob_causes)


def test_texts_without_log_probabilities_do_not_tell(case: Case) -> None:
    model = loaded(case)
    _round_base(model, float8_by_tensor)
    report = check_text(case, texts_of(model, with_logprobs=False, tokens=40))
    assert Cause.WEIGHTS.value not in (*report.causes, *report.logprob_causes)


@pytest.mark.parametrize("weights", FORMATS, ids=[weights.name for weights in FORMATS])
def test_a_model_is_left_as_it_was(case: Case, weights: Any) -> None:
    model = loaded(case)
    before = {name: digest(value) for name, value in model.state_dict().items()}
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        own = model(ids).logits
        with rounded(model, weights):
            assert not torch.equal(model(ids).logits, own)
        assert torch.equal(model(ids).logits, own)
    assert {name: digest(value) for name, value in model.state_dict().items()} == before


def test_a_format_of_blocks_that_do_not_fill_a_weight() -> None:
    """Blocks at an edge are smaller: each has the scale of its own values."""
    blocks = next(weights for weights in FORMATS if "128" in weights.name and "blocks" in weights.name)
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(192, 200)).astype("float32"))
    found = blocks.rounded(weight)
    for rows in (slice(0, 128), slice(128, 192)):
        for columns in (slice(0, 128), slice(128, 200)):
            block = weight[rows, columns]
            assert torch.equal(found[rows, columns], float8_by_tensor(block))


@pytest.mark.parametrize("on_head", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_the_head_and_the_adapter_are_not_rounded(case: Case, on_head: dict[str, list[str]]) -> None:
    lora = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **on_head})
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(case.base), lora)
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(layer)] for layer in rounded_layers(model)]
    assert len(found) == 7 * SIZES["num_hidden_layers"] * 2
    assert not any("lora" in name or "lm_head" in name for name in found)


def test_weights_within_rounding_are_leaned_to(tmp_path: Path) -> None:
    """In bfloat16 each log probability is within rounding, and all together show the weights."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 96}
    base = saved(a_llama(**sizes), tmp_path / "base")
    case = case_of(base, on_llama(base, LORA), dtype="bfloat16")
    model = loaded(case)
    healthy = check_text(case, texts_of(model, tokens=64, drawn=True))
    assert (healthy.verdict, healthy.leaning) == ("consistent", "")
    _round_base(model, int8_in_bfloat16)
    report = check_text(case, texts_of(model, tokens=64, drawn=True))
    assert report.verdict == "consistent"
    assert report.leaning == "the log probabilities lean to weights in int8 by row"


@pytest.mark.parametrize(("tokens", "is_certain"), [(1, False), (8, False), (200, True)])
def test_a_few_tokens_do_not_tell(tokens: int, *, is_certain: bool) -> None:
    """One log probability is explained by any weights that move it by about as much as it is off."""
    generator = torch.Generator().manual_seed(4)
    moved = torch.randn(tokens, generator=generator, dtype=torch.float64)
    errors = moved + 0.5 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    candidate = told_weights._Candidate("a format", lambda _: None, [errors], [moved], [None])
    assert candidate.is_certain() == is_certain
