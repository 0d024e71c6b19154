"""What computed a part of a text otherwise is named: the prompt, some layers, single tokens, or what a token saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
import transformers

from consistency.case.case import Case
from consistency.case.named_adapters import NamedAdapter
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text import alternatives, explaining
from consistency.extras.serving.check_text.computed_in_parts import layers_by
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.report import TextReport
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text
from consistency.worker.model.merging import adapted_layers
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded, texts_of
from tests.worker.model.made_models import SIZES, a_llama, adapter_on, case_of, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]

EARLIER = "earlier"
LONG_PROMPTS = [[*prompt, *range(10, 26)] for prompt in PROMPTS[:3]]
"""Prompts that fill a block of a cache."""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A model of three layers."""
    torch.manual_seed(0)
    base = saved(a_llama(num_hidden_layers=3), tmp_path / "base")
    return case_of(base, on_llama(base, LORA))


@pytest.fixture
def with_earlier(case: Case, tmp_path: Path) -> tuple[Case, Any]:
    """A case with two adapters, and the model with both loaded."""
    folder = tmp_path / EARLIER
    model = loaded(case)
    model.save_pretrained(folder)
    model.load_adapter(str(folder), adapter_name=EARLIER)
    for name, parameter in model.named_parameters():
        if "lora_B.earlier" in name:
            parameter.data.mul_(0.5)
    model.save_pretrained(tmp_path / "saved", selected_adapters=[EARLIER])
    assert case.adapter is not None
    adapters = (
        NamedAdapter(name="now", path=case.adapter),
        NamedAdapter(name=EARLIER, path=str(tmp_path / "saved" / EARLIER)),
    )
    return msgspec.structs.replace(case, adapters=adapters), model


def _named(report: TextReport) -> tuple[str, str]:
    """Return the one cause that is named, and what it is about."""
    (cause,) = report.causes or report.logprob_causes
    return cause, report.about.get(cause, "")


@contextmanager
def _by(model: Any, name: str) -> Iterator[None]:
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter("default")


@pytest.mark.parametrize("drawn", [True, False])
def test_a_prompt_of_the_base_alone(case: Case, *, drawn: bool) -> None:
    model = loaded(case)

    def prompt_without(place: int) -> AbstractContextManager[Any]:
        return nullcontext() if place else model.disable_adapter()

    report = check_text(case, texts_of(model, change=prompt_without, drawn=drawn))
    assert report.exit_status == 1
    assert _named(report) == (TextCause.PREFIX.value, "of the base alone")


def test_blocks_of_a_prompt_of_the_base_alone(case: Case) -> None:
    """What is left of the prompt after its last whole block is computed anew, with the adapter."""
    model = loaded(case)
    layers = [layer for _, layer in adapted_layers(model)]

    def blocks_without(layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] == 1:
            return output
        return torch.cat([layer.get_base_layer()(args[0])[:, :16], output[:, 16:]], 1)

    handles = [layer.register_forward_hook(blocks_without) for layer in layers]
    texts = texts_of(model, LONG_PROMPTS, drawn=True)
    for handle in handles:
        handle.remove()
    assert _named(check_text(case, texts)) == (TextCause.PREFIX.value, "of the base alone")


def test_a_prompt_of_an_earlier_step(with_earlier: tuple[Case, Any]) -> None:
    case, model = with_earlier

    def prompt_by_earlier(place: int) -> AbstractContextManager[Any]:
        return nullcontext() if place else _by(model, EARLIER)

    report = check_text(case, texts_of(model, change=prompt_by_earlier, drawn=True))
    assert report.exit_status == 1
    assert _named(report) == (TextCause.PREFIX.value, "of the adapter earlier")


def test_layers_of_an_earlier_step(with_earlier: tuple[Case, Any]) -> None:
    """Some layers had their new weights when the text was written, and others not."""
    case, model = with_earlier
    first = [layer for name, layer in adapted_layers(model) if "layers.0." in name]
    with layers_by(first, EARLIER):
        texts = texts_of(model, drawn=True)
    report = check_text(case, texts)
    assert report.exit_status == 1
    assert _named(report) == (TextCause.PARTLY.value, "layer 0 by the adapter earlier")


@pytest.mark.parametrize(("part", "about"), [("v_proj", "v_proj"), ("layers.1.", "layer 1"), ("layers.0.", "layer 0")])
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_layers_without_the_adapter(case: Case, part: str, about: str, *, with_logprobs: bool) -> None:
    model = loaded(case)
    without = [layer for name, layer in adapted_layers(model) if part in name]
    with layers_by(without, None):
        texts = texts_of(model, tokens=24, drawn=with_logprobs, with_logprobs=with_logprobs)
    report = check_text(case, texts)
    assert report.exit_status == 1
    assert _named(report) == (Cause.LAYERS.value, about)


@pytest.mark.parametrize("drawn", [True, False])
def test_a_window(case: Case, *, drawn: bool) -> None:
    def last_ten(_place: int, length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(1, length, dtype=torch.long)
        mask[:, :-10] = 0
        return {"attention_mask": mask, "position_ids": torch.arange(length)[None] if _place == 0 else _last(length)}

    report = check_text(case, texts_of(loaded(case), also=last_ten, drawn=drawn))
    assert report.exit_status == 1
    assert _named(report) == (TextCause.WINDOW.value, "the last 10 tokens alone")


@pytest.mark.parametrize("drawn", [True, False])
def test_a_cache_that_loses_its_beginning(case: Case, *, drawn: bool) -> None:
    """Where it is full, which is at another token of each text."""

    def without_two(place: int, length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(1, length, dtype=torch.long)
        if length > 12:
            mask[:, :2] = 0
        return {"attention_mask": mask, "position_ids": torch.arange(length)[None] if place == 0 else _last(length)}

    report = check_text(case, texts_of(loaded(case), also=without_two, drawn=drawn))
    assert report.exit_status == 1
    assert _named(report) == (TextCause.WINDOW.value, "all tokens but the first 2, from some token on")


def _last(length: int) -> torch.Tensor:
    return torch.tensor([[length - 1]])


@pytest.mark.parametrize(("step", "about"), [(1, "one further"), (-1, "one lower")])
def test_positions_with_a_gap(case: Case, step: int, about: str) -> None:
    def with_gap(place: int, length: int) -> dict[str, torch.Tensor]:
        return {"position_ids": _last(length) + step if place else torch.arange(length)[None]}

    report = check_text(case, texts_of(loaded(case), also=with_gap, drawn=True))
    assert report.exit_status == 1
    assert _named(report) == (TextCause.POSITIONS.value, f"{about} from the first token of the text on")


@pytest.mark.parametrize("drawn", [True, False])
def test_single_tokens(case: Case, *, drawn: bool) -> None:
    report = check_text(case, [_with_drafts(loaded(case), prompt, drawn=drawn) for prompt in PROMPTS])
    assert report.exit_status == 1
    assert _named(report) == (TextCause.SINGLE.value, "")


@torch.no_grad()
def _with_drafts(model: Any, prompt: list[int], *, drawn: bool) -> Text:
    """Return a text of which each sixth token is the base's least likely one: a draft that nobody verified."""
    generator = torch.Generator().manual_seed(0)
    ids, logprobs = list[int](), list[float]()
    for place in range(18):
        is_draft = place % 6 == 5
        with model.disable_adapter() if is_draft else nullcontext():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1].double()
        of_all = logits.log_softmax(-1)
        logits[model.config.eos_token_id] = -torch.inf if not is_draft else torch.inf
        ids.append(int(logits.argmin() if is_draft else logits.argmax()))
        if drawn and not is_draft:
            ids[-1] = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        logprobs.append(float(of_all[ids[-1]]))
    return Text(prompt=prompt, text=ids, logprobs=logprobs)


@pytest.mark.parametrize("counts", [(3, 3, 3), (1, 2, 3)])
def test_padding_that_was_seen(case: Case, counts: tuple[int, ...]) -> None:
    model = loaded(case)
    padding = model.generation_config.pad_token_id
    padding = model.generation_config.eos_token_id if padding is None else padding
    texts = []
    for prompt, count in zip(PROMPTS, counts, strict=False):
        texts += texts_of(model, [prompt], given=lambda ids, count=count: [padding] * count + ids, drawn=True)  # type: ignore[misc]
    report = check_text(case, texts)
    assert report.exit_status == 1
    cause, about = _named(report)
    assert cause == TextCause.PROMPT_PADDED.value
    assert about == ("3 tokens" if counts[0] == 3 else "a number of tokens that differs from text to text")


def test_a_text_that_fills_a_model_of_learned_positions_has_no_room_for_some_mistakes(tmp_path: Path) -> None:
    """One token of padding more, or positions one further, are past the end of its table."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=20, eos_token_id=0, bos_token_id=0
    )
    base = saved(transformers.GPT2LMHeadModel(config), tmp_path / "base")
    lora = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["c_attn"], fan_in_fan_out=True)
    case = case_of(base, adapter_on(transformers.GPT2LMHeadModel.from_pretrained(base), lora, tmp_path / "adapter"))
    model = loaded(case)
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.scaling["default"] *= 1.37  # nothing explains this
    report = check_text(case, texts_of(model, [[1, 2, 3, 4], [9, 8, 7, 6]], tokens=17, drawn=True))
    assert (report.exit_status, report.causes, report.logprob_causes) == (1, (), ())
    with model.disable_adapter():
        texts = texts_of(model, [[1, 2, 3, 4], [9, 8, 7, 6]], tokens=17, drawn=True)
    assert _named(check_text(case, texts)) == (Cause.IGNORED.value, "")


def test_a_window_that_an_engine_does_not_know(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.MistralConfig(**sizes, sliding_window=8, max_position_embeddings=64)
    base = saved(transformers.MistralForCausalLM(config), tmp_path / "base")
    case = case_of(base, adapter_on(transformers.MistralForCausalLM.from_pretrained(base), LORA, tmp_path / "adapter"))
    assert check_text(case, texts_of(loaded(case), PROMPTS[:3], drawn=True)).verdict == "consistent"
    without_window = transformers.MistralForCausalLM.from_pretrained(base, sliding_window=None)
    model = peft.PeftModel.from_pretrained(without_window, tmp_path / "adapter").eval()
    report = check_text(case, texts_of(model, PROMPTS[:3], drawn=True))
    assert report.exit_status == 1
    assert _named(report) == (TextCause.WINDOW.value, "all tokens before it, and not the last 8 alone")


def test_what_a_large_model_is_not_asked_is_said(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text that nothing explains; what is tried is left out here, since it takes long."""
    monkeypatch.setattr(explaining, "causes_of", lambda _: None)
    monkeypatch.setattr(explaining, "_fitting_arithmetic", lambda *_: None)
    (text,) = texts_of(loaded(case), PROMPTS[:1], tokens=4, drawn=True)
    assert text.logprobs is not None
    wrong = [msgspec.structs.replace(text, logprobs=[each - 1 for each in text.logprobs])]
    report = check_text(case, wrong)
    assert (report.verdict, report.not_tried) == ("inconsistent", ())
    monkeypatch.setattr(alternatives, "MOST_WORK", 1)
    report = check_text(case, wrong)
    assert report.not_tried == ("some layers without the adapter, or with another one",)
    assert "not tried with this model: some layers without" in "\n".join(report.lines())
