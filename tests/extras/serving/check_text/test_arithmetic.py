"""An engine is not a device: its own arithmetic explains a healthy text, and hides no mistake."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch

from consistency.case.case import Case
from consistency.errors import InputError
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.arithmetic import (
    EngineArithmetic,
    engines_with,
    log_softmax_error,
    of_engine,
    others_than,
)
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.options import TextOptions
from consistency.extras.serving.check_text.sampling import KV_DTYPES, Sampling
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text
from consistency.extras.serving.engines import ENGINES
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded, texts_of
from tests.extras.serving.check_text.rounded_cache import KeptIn
from tests.worker.model.made_models import adapter_on, case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]

EIGHT = [*PROMPTS, [11, 3, 60], [22, 5]]
LLAMA_CPP = TextOptions(engine="llama.cpp")
OPENVINO = TextOptions(engine="openvino")


@pytest.fixture
def case(llama: Path) -> Case:
    return case_of(llama, on_llama(llama, LORA))


def in_half_cache(_: int = 0) -> AbstractContextManager[Any]:
    """Keep keys and values in float16, as llama.cpp does by default."""
    return KeptIn(torch.float16)


def test_every_engine_says_where_its_arithmetic_is_stated() -> None:
    for name, engine in ENGINES.items():
        assert engine.source, name
        assert engine.version, name
        for dtype in ("float32", "bfloat16", "float16"):
            assert of_engine(name, dtype).kv_dtype in ("", *KV_DTYPES)
    assert of_engine("", "float32") == EngineArithmetic()
    assert of_engine("llama.cpp", "float32") == EngineArithmetic(kv_dtype="float16")
    # what is no narrower than the model itself adds nothing
    assert of_engine("llama.cpp", "bfloat16") == EngineArithmetic()
    assert of_engine("openvino", "float32") == EngineArithmetic(computes_in="bfloat16")


def test_arithmetics_that_engines_have_by_default_are_among_those_that_are_tried() -> None:
    tried = list(others_than("float32"))
    assert [one for one in tried if engines_with(one, "float32")] == [
        EngineArithmetic(kv_dtype="float16"),
        EngineArithmetic(computes_in="bfloat16"),
    ]
    assert not any(engines_with(one, "bfloat16") for one in others_than("bfloat16"))


def test_an_engine_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="arithmetic is not known"):
        TextOptions(engine="lama.cpp")


def test_a_float32_sum_over_a_vocabulary_is_within_what_a_log_softmax_is_allowed() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 50_000, dtype=torch.float64) * 4
    terms = (logits - logits.amax(-1, keepdim=True)).exp().to(torch.float32)
    lanes = torch.zeros(64, 4, dtype=torch.float32)
    for columns in terms.reshape(64, -1, 4).unbind(1):  # the narrowest vector units add up four partial sums
        lanes += columns
    total = lanes.sum(-1)
    error = (total.double().log() - terms.double().sum(-1).log()).abs().max()
    allowed = log_softmax_error(50_000)
    assert allowed / 100 < float(error) < allowed


def test_the_sum_of_a_softmax_moves_all_log_probabilities_alike(case: Case) -> None:
    """CTranslate2 in float32: each log probability is off by as much, which no token is too certain for."""
    texts = texts_of(loaded(case), EIGHT)
    vocabulary = loaded(case).config.vocab_size

    def moved(by: float) -> list[Text]:
        return [Text(prompt=t.prompt, text=t.text, logprobs=[value + by for value in t.logprobs or ()]) for t in texts]

    right, wrong = moved(log_softmax_error(vocabulary) / 2), moved(100 * log_softmax_error(vocabulary))
    assert check_text(case, right).exit_status == 0
    assert check_text(case, wrong).exit_status == 1


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_a_cache_in_float16_is_explained(case: Case, *, with_logprobs: bool) -> None:
    texts = texts_of(loaded(case), EIGHT, change=in_half_cache)
    if not with_logprobs:
        texts = [Text(prompt=text.prompt, text=text.text) for text in texts]
    report = check_text(case, texts)
    assert report.exit_status == 0
    lines = list(report.lines())
    if with_logprobs:
        said = "explained by keys and values in float16, as llama.cpp and openvino do by default"
        assert any(said in line for line in lines)
    stated = check_text(case, texts, options=LLAMA_CPP)
    assert (stated.exit_status, stated.cache, stated.computed_in) == (0, "", "")


def test_one_wrong_text_among_those_of_a_cache_in_float16(case: Case) -> None:
    model = loaded(case)
    with model.disable_adapter():
        wrong = texts_of(model, EIGHT[2:3], change=in_half_cache)
    texts = texts_of(model, EIGHT, change=in_half_cache)
    texts[2] = wrong[0]
    for options in (TextOptions(), LLAMA_CPP):
        report = check_text(case, texts, options=options)
        assert report.exit_status == 1
    assert [number for number, result in enumerate(report.texts) if result.is_unexplained] == [2]
    assert Cause.IGNORED.value in (*report.causes, *report.logprob_causes)


def _scaled_by_two(model: Any) -> AbstractContextManager[Any]:
    return _Doubled([module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)])


class _Doubled(AbstractContextManager[None]):
    """Apply the adapter twice as strongly."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.scaling["default"] *= 2

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.scaling["default"] /= 2


def _as_base(model: Any) -> AbstractContextManager[Any]:
    return model.disable_adapter()  # type: ignore[no-any-return]


def _other_rope(model: Any) -> AbstractContextManager[Any]:
    rotary = model.get_base_model().model.rotary_emb
    size = len(rotary.inv_freq)
    return mock.patch.object(rotary, "inv_freq", 1.0 / 500_000.0 ** (torch.arange(size, dtype=torch.float32) / size))


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        (_scaled_by_two, Cause.TWICE.value),
        (_as_base, Cause.IGNORED.value),
        (_other_rope, Cause.ROTARY.value),
    ],
)
def test_mistakes_of_a_stated_engine_are_named(case: Case, mistake: Any, cause: str) -> None:
    model = loaded(case)
    with mistake(model):
        texts = texts_of(model, PROMPTS[:3], change=in_half_cache)
    report = check_text(case, texts, options=LLAMA_CPP)
    assert report.exit_status == 1
    assert cause in (*report.causes, *report.logprob_causes)


def test_a_cache_in_8_bits_of_a_stated_engine_is_named(case: Case) -> None:
    texts = texts_of(loaded(case), PROMPTS[:4], change=lambda _: KeptIn(torch.float8_e4m3fn), drawn=True)
    report = check_text(case, texts, options=LLAMA_CPP)
    assert (report.exit_status, report.logprob_causes) == (1, (TextCause.CACHE.value,))
    assert "8" in report.about[TextCause.CACHE.value]


def test_another_adapter_of_a_stated_engine_is_found(case: Case, llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    base = loaded(case).get_base_model()
    adapter_on(base, peft.LoraConfig(r=4, target_modules=["q_proj"]), tmp_path / "other")
    other = case_of(llama, tmp_path / "other")
    texts = texts_of(loaded(other), PROMPTS[:3], change=in_half_cache)
    assert check_text(case, texts, options=LLAMA_CPP).exit_status == 1


def test_computing_in_bfloat16_is_explained_and_its_mistakes_are_found(case: Case) -> None:
    """OpenVINO computes a float32 model in bfloat16 on a processor that has it."""
    model = loaded(case).to(torch.bfloat16)
    texts = texts_of(model, EIGHT, drawn=True)
    report = check_text(case, texts)
    assert (report.exit_status, report.computed_in) == (0, "bfloat16")
    assert any("explained by computing in bfloat16, as openvino does by default" in line for line in report.lines())
    stated = check_text(case, texts, options=OPENVINO)
    assert (stated.exit_status, stated.computed_in) == (0, "")
    # an engine that is stated to compute otherwise has no excuse
    otherwise = check_text(case, texts, options=LLAMA_CPP)
    assert (otherwise.exit_status, otherwise.logprob_causes) == (1, (TextCause.COMPUTED_IN.value,))
    with model.disable_adapter():
        of_base = texts_of(model, EIGHT, drawn=True)
    assert check_text(case, of_base, options=OPENVINO).exit_status == 1
    assert check_text(case, of_base).exit_status == 1


def test_the_model_is_left_as_it_was(case: Case) -> None:
    model = loaded(case)
    before = [parameter.clone() for parameter in model.parameters()]
    with EngineArithmetic(computes_in="bfloat16").of_parameters(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_an_engine_takes_log_probabilities_after_its_temperature(case: Case) -> None:
    """SGLang does by default, vLLM does not; either is judged as it does."""
    model = loaded(case)
    after_temperature = []
    for text in texts_of(model, EIGHT, drawn=True):
        logprobs = _logprobs_at(model, text, 0.7)
        after_temperature.append(Text(prompt=text.prompt, text=text.text, logprobs=logprobs))
    sampling = Sampling(temperature=0.7, top_p=0.9999)
    right = check_text(case, after_temperature, options=TextOptions(engine="sglang", sampling=sampling))
    assert right.logprobs_verdict == "right"
    wrong = check_text(case, after_temperature, options=TextOptions(engine="vllm", sampling=sampling))
    assert wrong.logprobs_verdict == "explained"
    assert wrong.texts[0].logprobs_of.startswith("temperature 0.7")


def _logprobs_at(model: Any, text: Text, temperature: float) -> list[float]:
    ids = torch.tensor([[*text.prompt, *text.text[:-1]]])
    with torch.no_grad():
        logits = model(ids).logits[0, -len(text.text) :].double() / temperature
    chosen = torch.tensor(text.text)
    values: list[float] = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
    assert all(math.isfinite(value) for value in values)
    return values
