"""Texts that a model has written are possible, whoever wrote them; others are not, and what wrote them is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.errors import InputError
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text import explaining, judge_texts
from consistency.extras.serving.check_text.alternatives import Extent
from consistency.extras.serving.check_text.common_causes import Causes
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.options import TextOptions
from consistency.extras.serving.check_text.report import TextReport
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.texts import Text, Tokens, read_texts
from consistency.extras.serving.engine_outputs import explanations
from tests.conftest import Cli
from tests.worker.model.made_models import SIZES, adapter_on, case_of, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while merging

PROMPTS = [[5, 9, 33, 2], [7, 7, 60], [1, 2, 3, 4, 5, 6]]
LORA = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])


def loaded(case: Case) -> Any:
    base = transformers.AutoConfig.from_pretrained(case.base)
    model = getattr(transformers, base.architectures[0]).from_pretrained(case.base, dtype=getattr(torch, case.dtype))
    return peft.PeftModel.from_pretrained(model, case.adapter).eval()


def written(model: Any, tokens: int = 20) -> list[Text]:
    """Return what a model writes, with the log probabilities that its engine would give."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = out.sequences[0, -tokens:].tolist()
        logprobs = [float(one[0].float().log_softmax(-1)[token]) for one, token in zip(out.logits, new, strict=True)]
        found.append(Text(prompt=prompt, text=new, logprobs=logprobs))
    return found


@contextmanager
def scaled(model: Any, factor: float) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    for layer in layers:
        layer.scaling["default"] *= factor
    yield
    for layer in layers:
        layer.scaling["default"] /= factor


def verdicts(report: TextReport) -> list[str]:
    return [one.verdict for one in report.texts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_the_model_writes_is_possible_and_what_others_write_is_not(llama: Path, dtype: str) -> None:
    case = case_of(llama, on_llama(llama, LORA), dtype=dtype)
    model = loaded(case)
    healthy = check_text(case, written(model))
    assert (healthy.verdict, healthy.causes, healthy.base_alone) == ("consistent", (), False)
    assert sum(one.tokens for one in healthy.texts) == 60
    assert all(one.logprobs is not None and one.logprobs <= 1 for one in healthy.texts)
    with model.disable_adapter():
        ignored = check_text(case, written(model))
    assert (ignored.verdict, ignored.causes) == ("inconsistent", ("adapter-ignored",))
    with scaled(model, 2.0):
        assert check_text(case, written(model)).causes == ("adapter-twice",)
    merged = written(model.merge_and_unload())
    assert verdicts(check_text(case, merged)) == ["possible"] * 3, "rounding W + dW is of the dtype"


def test_another_token_is_found_where_it_stands(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    first, *others = written(loaded(case))
    ids = [int(one) for one in first.text]
    ids[7] = (ids[7] + 1) % 64
    report = check_text(case, [*others, Text(prompt=first.prompt, text=ids[:8])])
    assert (verdicts(report), report.causes) == (["possible", "possible", "impossible"], ())
    worst = report.texts[2].worst
    assert worst is not None
    assert (worst.token, worst.id, worst.largest_id) == (8, ids[7], first.text[7])
    assert worst.gap > 10 * worst.allowed > 0
    assert f"text 3: id {ids[7]} at token 8 is" in "\n".join(report.lines())


def test_log_probabilities_that_are_off_are_found_where_the_tokens_are_right(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    texts = written(loaded(case))
    assert texts[0].logprobs is not None
    off = Text(prompt=texts[0].prompt, text=texts[0].text, logprobs=[one - 0.001 for one in texts[0].logprobs])
    report = check_text(case, [off, texts[1]])
    assert verdicts(report) == ["possible", "possible"], "of the tokens"
    assert (report.verdict, report.exit_status) == ("inconsistent", 1)
    first, second, *others = report.lines()
    assert first.startswith("INCONSISTENT   the model could have written all 2 texts: 40 tokens")
    assert second == "log probabilities: those of 1 of 2 texts are not the model's"
    (of_text,) = (line for line in others if line.startswith("text 1: its log probabilities"))
    assert of_text.startswith("text 1: its log probabilities are not the model's: that of token")
    assert "is 0.001 below the model's" in of_text


Sampler = Callable[[torch.Tensor], torch.Tensor]
"""Changes the logits of a token."""


def rollout(
    model: Any, *, taken: Sampler = lambda logits: logits, drawn_by: Sampler | None = None, of_base: bool = False
) -> list[Text]:
    """Return texts with the log probabilities of logits that a sampler has changed.

    Parameters
    ----------
    taken : callable
        What the log probabilities are taken from, of the logits of a token.
    drawn_by : callable, optional
        What a token is drawn from, in place of the most likely one.
    of_base : bool
        Log probabilities of the base alone.
    """
    texts, generator = [], torch.Generator().manual_seed(3)
    for prompt in PROMPTS:
        ids, logprobs = list[int](), list[float]()
        for _ in range(12):
            given = torch.tensor([[*prompt, *ids]])
            with torch.no_grad():
                logits = model(given).logits[0, -1].double()
                with model.disable_adapter() if of_base else nullcontext():
                    answered = model(given).logits[0, -1].double()
            if drawn_by is None:
                ids.append(int(without_end(logits).argmax()))
            else:
                ids.append(int(torch.multinomial(drawn_by(logits).softmax(-1), 1, generator=generator)))
            logprobs.append(float(taken(answered).log_softmax(-1)[ids[-1]]))
        texts.append(Text(prompt=prompt, text=ids, logprobs=logprobs))
    return texts


def without_end(logits: torch.Tensor) -> torch.Tensor:
    masked = logits.clone()
    masked[2] = -torch.inf
    return masked


def eight_largest(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(8).values[-1], -torch.inf)


def twenty_largest(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)


def most_likely(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Leave the most likely tokens that have this probability together, as a sampler does."""
    values, order = logits.softmax(-1).sort(descending=True)
    left = order[(values.cumsum(0) - values) < top_p]
    return torch.full_like(logits, -torch.inf).index_copy(0, left, logits[left])


def of_least(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Leave the tokens that have this share of the most likely one's probability."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.max(), -torch.inf)


@pytest.mark.parametrize(
    ("taken", "way"),
    [
        (lambda logits: logits / 0.7, "temperature 0.7"),
        (without_end, "the end of the text masked"),
        pytest.param(
            lambda logits: without_end(logits) / 1.25,
            "temperature 1.25 and the end of the text masked",
            marks=pytest.mark.slow,
        ),
        (eight_largest, "top-k 8"),
        (lambda logits: most_likely(logits, 0.8), "top-p 0.8"),
        (lambda logits: of_least(logits, 0.3), "min-p 0.3"),
        (lambda logits: eight_largest(logits / 0.7), "temperature 0.7 and top-k 8"),
        pytest.param(
            lambda logits: most_likely(twenty_largest(logits / 0.7), 0.9),
            "temperature 0.7 and top-k 20 and top-p 0.9",
            marks=pytest.mark.slow,
        ),
        (lambda logits: logits + logits.sin(), ""),
    ],
)
def test_log_probabilities_after_a_sampler_say_nothing_against_the_tokens(
    llama: Path, taken: Sampler, way: str
) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    report = check_text(case, rollout(loaded(case), taken=taken))
    assert (verdicts(report), report.exit_status) == (["possible"] * 3, 1)
    assert [one.logprobs_of for one in report.texts] == [way] * 3
    lines = "\n".join(report.lines())
    assert "could not have written" not in lines
    assert f"those of 3 of 3 texts were taken with {way}" in lines if way else "are not the model's" in lines
    assert (report.tokens_verdict, report.logprobs_verdict) == ("possible", "explained" if way else "wrong")
    assert (report.causes, report.logprob_causes) == ((), ())


def test_a_sampled_text_is_known_by_its_log_probabilities(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    own = check_text(case, rollout(model, drawn_by=lambda logits: logits))
    assert (set(verdicts(own)), own.exit_status, own.base_alone) == ({"sampled"}, 0, False)
    assert (own.tokens_verdict, own.logprobs_verdict) == ("sampled", "right")
    lines = "\n".join(own.lines())
    assert "not the most likely ones: sampled" in lines
    assert "log probabilities: the model's, in 3 texts" in lines
    of_base = check_text(case, rollout(model, drawn_by=lambda logits: logits, of_base=True))
    assert (of_base.exit_status, of_base.causes, of_base.logprob_causes) == (1, (), ("adapter-ignored",))
    lines = "\n".join(of_base.lines())
    assert "the log probabilities were computed as the base alone: the adapter is not applied" in lines
    assert "could not have written" not in lines
    at_half = rollout(model, drawn_by=lambda logits: logits / 0.5, taken=lambda logits: logits / 0.5)
    assert {one.logprobs_of for one in check_text(case, at_half).texts} == {"temperature 0.5"}
    without = [Text(prompt=one.prompt, text=one.text) for one in at_half]
    assert "impossible" in verdicts(check_text(case, without)), "nothing tells that it was sampled"


def test_tokens_and_log_probabilities_of_one_sampler(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    report = check_text(case, rollout(loaded(case), drawn_by=eight_largest, taken=eight_largest))
    assert (set(verdicts(report)), report.exit_status) == ({"sampled"}, 1)
    assert {one.logprobs_of for one in report.texts} == {"top-k 8"}
    assert "could not have written" not in "\n".join(report.lines())
    stated = TextOptions(sampling=Sampling(top_k=8), processed=True)
    report = check_text(case, rollout(loaded(case), drawn_by=eight_largest, taken=eight_largest), options=stated)
    assert (report.exit_status, report.logprobs_verdict) == (0, "right"), "as it is stated"


def test_a_sampled_text_without_log_probabilities_is_judged_by_its_sampler(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    drawn = rollout(loaded(case), drawn_by=eight_largest)
    texts = [Text(prompt=one.prompt, text=one.text) for one in drawn]
    healthy = check_text(case, texts, options=TextOptions(sampling=Sampling(top_k=8)))
    assert (healthy.exit_status, healthy.tokens_verdict) == (0, "sampled")
    narrower = check_text(case, texts, options=TextOptions(sampling=Sampling(top_k=2)))
    assert (narrower.exit_status, narrower.tokens_verdict) == (1, "impossible")
    assert "is none of those that top-k 2 leaves" in "\n".join(narrower.lines())


def test_draws_that_are_less_likely_than_draws_are(llama: Path) -> None:
    """Of many tokens without log probabilities another model's are told by how likely they are."""
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    generator = torch.Generator().manual_seed(3)
    stated = TextOptions(sampling=Sampling())
    found = {}
    for name, logits_times in (("healthy", 1.0), ("unlikely", -1.0)):
        texts = []
        for prompt in PROMPTS:
            ids = list[int]()
            for _ in range(40):
                with torch.no_grad():
                    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1].double() * logits_times
                ids.append(int(torch.multinomial(without_end(logits).softmax(-1), 1, generator=generator)))
            texts.append(Text(prompt=prompt, text=ids))
        found[name] = check_text(case, texts, options=stated)
    assert found["healthy"].exit_status == 0
    assert found["healthy"].surprise is not None
    assert abs(found["healthy"].surprise) < 4
    assert found["unlikely"].exit_status == 1
    assert "less likely than draws from this model" in "\n".join(found["unlikely"].lines())


def test_what_a_mistake_writes_greedily_was_not_sampled(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a half type log probabilities may be within tolerance where a token is not."""
    case = case_of(llama, on_llama(llama, LORA))
    texts = rollout(loaded(case), drawn_by=lambda logits: logits)
    monkeypatch.setattr(explaining, "_MOST_UNLIKELY", 1.0)

    def by_base(asked: object, *, greedily: bool = False) -> Causes:
        assert greedily
        return Causes(about={Cause.IGNORED: ""}, extent=Extent.TOKENS)

    monkeypatch.setattr(explaining, "causes_of", by_base)
    report = check_text(case, texts)
    assert (set(verdicts(report)), report.causes) == ({"impossible"}, ("adapter-ignored",))
    assert "the model could not have written 3 of 3 texts" in "\n".join(report.lines())


def test_a_temperature_is_not_told_from_three_tokens(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    whole = rollout(loaded(case), taken=lambda logits: logits / 0.7)[0]
    assert whole.logprobs is not None
    short = Text(prompt=whole.prompt, text=[int(one) for one in whole.text[:3]], logprobs=whole.logprobs[:3])
    assert [one.logprobs_of for one in check_text(case, [short]).texts] == [""]


def test_a_text_that_the_base_writes_as_well_says_nothing_of_the_adapter(llama: Path) -> None:
    lora = peft.LoraConfig(r=8, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"])
    case = case_of(llama, on_llama(llama, lora))
    model = loaded(case)
    own = written(model)
    with model.disable_adapter():
        of_base = written(model)
    first, same = next(
        (text, at)
        for text, other in zip(own, of_base, strict=True)
        for at, (one, two) in enumerate(zip(text.text, other.text, strict=True))
        if at and one != two and text.text[:at] == other.text[:at]
    )
    report = check_text(case, [Text(prompt=first.prompt, text=[int(one) for one in first.text[:same]])])
    assert (report.verdict, report.base_alone) == ("consistent", True)
    assert "does not tell whether the adapter is on" in "\n".join(report.lines())
    assert not check_text(case, [first]).base_alone, "the whole text, which the base would not write"


def test_a_text_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        forced_eos_token_id=None, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=64,
    )  # fmt: skip
    kind = transformers.BartForConditionalGeneration
    base = saved(kind(config), tmp_path / "bart")
    lora = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj", "v_proj"])
    adapter = adapter_on(kind.from_pretrained(base), lora, tmp_path / "adapter")
    case = case_of(base, adapter)
    texts = written(loaded(case), tokens=8)
    assert check_text(case, texts).verdict == "consistent"
    ids = [(int(texts[0].text[0]) + 1) % 64, *texts[0].text[1:]]
    assert check_text(case, [Text(prompt=texts[0].prompt, text=ids)]).verdict == "inconsistent"


def test_where_a_router_chooses_what_no_mistake_explains_is_not_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    base = saved(transformers.MixtralForCausalLM(config), tmp_path / "base")
    lora = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj", "v_proj"])
    adapter = adapter_on(transformers.MixtralForCausalLM.from_pretrained(base), lora, tmp_path / "adapter")
    case = case_of(base, adapter)
    model = loaded(case)
    texts = written(model)
    assert check_text(case, texts).verdict == "consistent"
    wrong = Text(prompt=texts[0].prompt, text=[(int(texts[0].text[0]) + 1) % 64])
    report = check_text(case, [wrong])
    assert (report.verdict, report.exit_status) == ("incomplete", 3)
    with scaled(model, 2.0):
        report = check_text(case, written(model))
    assert (report.verdict, report.causes) == ("inconsistent", ("adapter-twice",))


def test_a_text_in_words_may_have_been_written_in_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes the two halves of a word as two tokens, which the tokenizer makes one of."""
    base = builtin_folder("llama") / "base"
    case = Case(name="x", base=str(base), adapter=str(builtin_folder("llama") / "adapter"), dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = loaded(case)
    prompt = "The quick brown fox"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, min_new_tokens=12,
        pad_token_id=0,
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    text = tokenizer.decode(new)
    assert check_text(case, [Text(prompt=prompt, text=text)]).verdict == "consistent"
    at, letters = next(
        (at, tokenizer(list(word), add_special_tokens=False)["input_ids"])
        for at, word in enumerate(map(tokenizer.decode, new)) if len(word) > 1
    )  # fmt: skip
    divided = [*new[:at], *(one for (one,) in letters), *new[at + 1 :]]
    assert tokenizer.decode(divided) == text
    tokens = Tokens(prompt=ids[0].tolist(), ids=divided, is_exact=False)
    monkeypatch.setattr(judge_texts, "encoded", lambda *_: tokens)
    assert check_text(case, [Text(prompt="", text="")]).verdict == "consistent"
    exact = Tokens(prompt=tokens.prompt, ids=divided, is_exact=True)
    monkeypatch.setattr(judge_texts, "encoded", lambda *_: exact)
    assert check_text(case, [Text(prompt="", text="")]).verdict == "inconsistent", "the writer's own tokens"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no text"),
        ('{"prompt": "a"}', "line 2 is no text"),
        ('{"prompt": [1], "text": [2, 70000]}', "the model has no logit for"),
        ('{"prompt": [], "text": [2]}', "a text needs a token"),
        ('{"prompt": [1], "text": [2], "logprobs": []}', "each token has a log probability"),
        ('{"prompt": "a", "text": "b"}', "the base has no tokenizer"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused(
    llama: Path, tmp_path: Path, cli_here: Cli, line: str, message: str
) -> None:
    adapter = on_llama(llama, LORA)
    file = tmp_path / "texts.jsonl"
    file.write_text('{"prompt": [1], "text": [2]}\n' + line + "\n")
    done = cli_here("check-text", file, "--base", llama, "--adapter", adapter)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_command(llama: Path, tmp_path: Path, cli_here: Cli) -> None:
    adapter = on_llama(llama, LORA)
    model = loaded(case_of(llama, adapter))
    file = tmp_path / "texts.jsonl"
    with model.disable_adapter():
        texts = written(model)
    file.write_text("".join(json.dumps({"prompt": one.prompt, "text": one.text}) + "\n\n" for one in texts))
    options = ("--base", llama, "--adapter", adapter, "--dtype", "float32")
    done = cli_here("check-text", file, *options)
    assert done.returncode == 1
    assert "INCONSISTENT   the model could not have written" in done.stdout
    assert "written as the base alone: the adapter is not applied" in done.stdout
    assert "next: name the adapter in every request" in done.stdout
    announced = done.stderr.splitlines()
    assert len(announced) <= 2 * len(texts) + 1, "no line for each pass"
    done = cli_here(
        "check-text", file, "--base", llama, "--adapter", adapter, "--dtype", "float32", "--json", "--quiet"
    )
    found = json.loads(done.stdout)
    assert (found["schema"], found["verdict"], found["causes"]) == (
        "consistency.text/3", "inconsistent", ["adapter-ignored"],
    )  # fmt: skip
    assert done.stderr == ""


def test_a_file_without_a_text(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no text"):
        read_texts(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(tmp_path / "gone.jsonl")


def test_merges_of_a_large_model_are_not_tried(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(case_of(llama, on_llama(llama, LORA)))
    assert explanations.merges(model)
    monkeypatch.setattr(explanations, "_MOST_MERGED", 0)
    assert explanations.merges(model) == {}
