"""What wrote a wrong text is named: another prompt, other positions, another adapter, the base from a token on."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from consistency.capture.explanation import Explanation
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.named_adapters import NamedAdapter
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text import common_causes
from consistency.extras.serving.check_text.alternatives import Alternative, AskedText, Explained, Extent
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.judged_text import JudgedText
from consistency.extras.serving.check_text.options import TextOptions
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text, Tokens
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded, texts_of
from tests.extras.serving.check_text.rounded_cache import KeptIn
from tests.worker.model.made_models import a_llama, adapter_on, case_of, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_the_adapter_is_off_from_a_token_on(llama: Path, *, with_logprobs: bool) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)

    def off_from_five(place: int) -> AbstractContextManager[Any]:
        return nullcontext() if place < 5 else model.disable_adapter()

    texts = texts_of(model, PROMPTS[:3], change=off_from_five, drawn=with_logprobs, with_logprobs=with_logprobs)
    report = check_text(case, texts)
    assert report.exit_status == 1
    named = report.logprob_causes if with_logprobs else report.causes
    assert named == (TextCause.OFF_FROM.value,)
    lines = "\n".join(report.lines())
    assert "as the base alone from " in lines
    if with_logprobs:  # each log probability tells, and tokens alone may be the same for a while
        assert "from token 6 on" in lines


@pytest.mark.parametrize(
    ("given", "cause", "about"),
    [
        (lambda prompt: prompt[-4:], TextCause.PROMPT_CUT, "its last 4 tokens"),
        (lambda prompt: prompt[:-1], TextCause.PROMPT_CUT, "without its last token"),
        (lambda prompt: [1, *prompt], TextCause.BEGIN_ADDED, ""),
    ],
)
def test_another_prompt(llama: Path, given: Any, cause: TextCause, about: str) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    prompts = [[5, 9, 33, 2, 40, 11], [7, 7, 60, 21, 8, 9, 30]]
    report = check_text(case, texts_of(loaded(case), prompts, given=given, with_logprobs=False))
    assert (report.exit_status, report.causes) == (1, (cause.value,))
    assert report.about.get(cause.value, "") == about
    healthy = check_text(case, texts_of(loaded(case), prompts, with_logprobs=False))
    assert (healthy.exit_status, healthy.causes) == (0, ())


def test_rotary_frequencies_that_were_rounded(llama: Path) -> None:
    """A model that is converted as a whole has its buffers converted too."""
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    rotary = model.get_base_model().model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    report = check_text(case, texts_of(model, PROMPTS[:2]))
    assert (report.exit_status, report.causes) == (1, (Cause.FREQUENCIES.value,))
    assert "with rotary frequencies rounded to bfloat16" in "\n".join(report.lines())


def test_other_rotary_positions(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    rotary = model.get_base_model().model.rotary_emb
    size = len(rotary.inv_freq)
    other = 1.0 / 500_000.0 ** (torch.arange(size, dtype=torch.float32) / size)
    with mock.patch.object(rotary, "inv_freq", other):
        texts = texts_of(model, PROMPTS[:2])
    report = check_text(case, texts)
    assert (report.exit_status, report.causes) == (1, (Cause.ROTARY.value,))
    assert "rotary positions of base 500,000 (here 10,000)" in "\n".join(report.lines())


@pytest.fixture
def chat(tmp_path: Path) -> Case:
    """A model with random weights, of which each token of a prompt counts, and a tokenizer with a chat template."""
    shutil.copytree(builtin_folder("llama") / "base", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    torch.manual_seed(0)
    saved(a_llama(vocab_size=512, max_position_embeddings=128), tmp_path / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapter_on(base, LORA, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_folder("llama") / "base")
    begin = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=begin
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for x in messages %}{{ x.role }}: {{ x.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    return Case(name="chat", base=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"), dtype="float32")


def test_prompts_in_words(chat: Case) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat.base)
    model = loaded(chat)
    begin = tokenizer.bos_token_id
    own = list(tokenizer("The licensor grants ")["input_ids"])
    assert own[0] == begin
    ways = {
        TextCause.BEGIN_TWICE: [begin, *own],
        TextCause.BEGIN_MISSING: own[1:],
        TextCause.PROMPT_SPACE: list(tokenizer("The licensor grants")["input_ids"]),
    }
    for cause, ids in ways.items():
        (text,) = texts_of(model, [ids], drawn=True)
        report = check_text(chat, [Text(prompt="The licensor grants ", text=text.text, logprobs=text.logprobs)])
        assert (report.exit_status, report.logprob_causes) == (1, (cause.value,)), cause


def test_a_prompt_in_words_that_lost_its_last_character(chat: Case) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat.base)
    (text,) = texts_of(loaded(chat), [list(tokenizer("The licensor grant")["input_ids"])])
    report = check_text(chat, [Text(prompt="The licensor grants", text=text.text)])
    assert report.about[TextCause.PROMPT_CUT.value] == "without its last character"


def test_prompts_by_another_template(chat: Case) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat.base)
    model = loaded(chat)
    messages = [{"role": "user", "content": "She looked at the"}]

    def ids(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    own = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    without_end = tokenizer.apply_chat_template(messages, tokenize=False)
    with_system = tokenizer.apply_chat_template(
        [{"role": "system", "content": "You are a helpful assistant."}, *messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    wrong = {
        "the chat template without its generation prompt": ids(without_end),
        "with the system message 'You are a helpful assistant.'": ids(with_system),
        "the messages without the chat template": list(tokenizer("She looked at the")["input_ids"]),
    }
    for about, prompt in wrong.items():
        (text,) = texts_of(model, [prompt], with_logprobs=False)
        report = check_text(chat, [Text(prompt=messages, text=text.text)])
        assert (report.exit_status, report.causes) == (1, (TextCause.PROMPT_TEMPLATE.value,)), about
        assert report.about[TextCause.PROMPT_TEMPLATE.value] == about
    (text,) = texts_of(model, [ids(own)], with_logprobs=False)
    assert check_text(chat, [Text(prompt=messages, text=text.text)]).exit_status == 0


@pytest.fixture
def two_steps(llama: Path, tmp_path: Path) -> Case:
    """A case of two adapters."""
    first = on_llama(llama, LORA)
    second = tmp_path / "second"
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        adapter_on(model, LORA, second)
    adapters = (NamedAdapter(name="new", path=str(first)), NamedAdapter(name="old", path=str(second)))
    return case_of(llama, first, adapters=adapters)


@pytest.mark.parametrize("drawn", [True, False])
def test_which_adapter_wrote_each_text(two_steps: Case, *, drawn: bool) -> None:
    new = loaded(two_steps)
    old = loaded(case_of(Path(two_steps.base), Path(two_steps.adapters[1].path)))
    texts = [
        *texts_of(new, PROMPTS[:2], drawn=drawn, with_logprobs=drawn),
        *texts_of(old, PROMPTS[2:4], drawn=drawn, with_logprobs=drawn),
    ]
    report = check_text(two_steps, texts)
    assert [result.adapter for result in report.texts] == ["new", "new", "old", "old"]
    assert report.exit_status == 0
    assert "written by: new 2, old 2" in list(report.lines())
    alone = case_of(Path(two_steps.base), Path(two_steps.adapters[0].path))
    assert check_text(alone, texts).exit_status == 1, "the second adapter is not known"


@pytest.mark.parametrize(
    ("dtype", "status"),
    [(torch.float16, 0), pytest.param(torch.float8_e4m3fn, 1, marks=pytest.mark.slow)],
)
def test_keys_and_values_in_another_dtype(llama: Path, dtype: torch.dtype, status: int) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    name = str(dtype).removeprefix("torch.")
    texts = texts_of(loaded(case), PROMPTS[:3], change=lambda _: KeptIn(dtype), drawn=True)
    report = check_text(case, texts)
    assert report.exit_status == status
    lines = "\n".join(report.lines())
    if status == 0:
        assert report.cache == name
        assert f"explained by keys and values in {name}" in lines
    else:
        assert report.logprob_causes == (TextCause.CACHE.value,)
        assert f"computed with keys and values in {name}" in lines
    stated = check_text(case, texts, options=TextOptions(kv_dtype=name))
    assert (stated.exit_status, stated.logprob_causes, stated.cache) == (0, (), "")
    other = case_of(Path(case.base), None)
    assert check_text(other, texts, options=TextOptions(kv_dtype=name)).exit_status == 1, "another model is still one"


def test_a_change_that_repairs_one_token_by_chance_explains_nothing(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    (text,) = texts_of(loaded(case), PROMPTS[:1], drawn=True)
    tokens = Tokens(prompt=PROMPTS[0], ids=[int(one) for one in text.text], is_exact=True, logprobs=text.logprobs)
    judged = JudgedText.of(loaded(case), tokens, None, lambda _: None)
    # the first token is a little outside
    off = judged.allowed_logprobs * torch.tensor([1.5] + [0.0] * (len(tokens.ids) - 1))
    judged = replace(judged, tokens=replace(tokens, logprobs=(judged.exact.logprobs + off).tolist()))
    asked = AskedText(text=text, judged=judged, tokenizer=None)
    assert asked.fits(judged.exact) is None
    moves_all = replace(judged.exact, logprobs=judged.exact.logprobs + 0.7 * judged.allowed_logprobs)
    assert bool(judged.fit_logprobs(moves_all).all()), "each token is within its bound"
    assert asked.fits(moves_all) is None
    moves_the_first = replace(judged.exact, logprobs=judged.exact.logprobs + off)
    assert asked.fits(moves_the_first) is not None


def test_a_mistake_that_makes_more_rounding_is_judged_by_its_own(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    (text,) = texts_of(loaded(case), PROMPTS[:1], drawn=True)
    tokens = Tokens(prompt=PROMPTS[0], ids=[int(one) for one in text.text], is_exact=True, logprobs=text.logprobs)
    right = JudgedText.of(loaded(case), tokens, None, lambda _: None)
    far = (right.exact.logprobs + 1000 * right.allowed_logprobs).tolist()
    judged = replace(right, tokens=replace(tokens, logprobs=far))
    asked = AskedText(text=text, judged=judged, tokenizer=None)
    # three times what rounding makes of the right model, and all of it far from that
    near = replace(right.exact, logprobs=right.exact.logprobs + 997 * right.allowed_logprobs)
    assert asked.fits(near) is None
    assert asked.fits(near, again=lambda: judged) is None, "it is beyond the mistake's own rounding too"
    assert asked.fits(near, again=lambda: right) is not None
    as_far = replace(right.exact, logprobs=right.exact.logprobs + 900 * right.allowed_logprobs)
    assert asked.fits(as_far, again=lambda: right) is None, "too far to be asked"
    same = judged.under(nullcontext)
    torch.testing.assert_close(same.exact.logprobs, right.exact.logprobs)
    torch.testing.assert_close(same.noisy_logprobs, right.noisy_logprobs)


@pytest.mark.parametrize("cause", [TextCause.PREFIX, TextCause.WINDOW, Cause.FREQUENCIES, Cause.ROTARY])
def test_mistakes_that_change_little_accuse_no_text_that_is_right(
    monkeypatch: pytest.MonkeyPatch, cause: Explanation
) -> None:
    """A right text was drawn; a slight mistake may make its few unlikely tokens the most likely ones by chance."""
    explained = Alternative(cause=cause, try_it=lambda: Explained(extent=Extent.TOKENS))
    monkeypatch.setattr(common_causes, "_MISTAKES", (lambda _: iter([explained]),))
    for other in ("merges", "parts", "penalties", "single_tokens"):
        monkeypatch.setattr(AskedText, other, lambda _: iter(()))
    asked: Any = SimpleNamespace(
        tells_apart=lambda: False, judged=SimpleNamespace(tokens=SimpleNamespace(judged_logprobs=None))
    )
    assert common_causes.causes_of([asked]) is not None, "of a wrong text each is named"
    is_named = common_causes.causes_of([asked], greedily=True) is not None
    assert is_named == (cause is Cause.ROTARY)
