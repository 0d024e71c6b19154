"""Many texts: a sample in float64, the rest by a screen; the figures of all, and what they cannot tell."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import msgspec
import peft
import pytest
import torch

from consistency.errors import InputError
from consistency.extras.serving.check_text import screening
from consistency.extras.serving.check_text.differences import differences_of
from consistency.extras.serving.check_text.judge_texts import check_rollouts, check_text
from consistency.extras.serving.check_text.judged_text import JudgedText
from consistency.extras.serving.check_text.judging import SAMPLE
from consistency.extras.serving.check_text.processing import Processing
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.screening import plain_text
from consistency.extras.serving.check_text.summary import LogprobSummary
from consistency.extras.serving.check_text.texts import Text, encoded
from consistency.extras.serving.engine_outputs.passes import Room
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded, texts_of
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]

MANY = [[5 + number, 9, 33 - number, 2 * number + 1] for number in range(14)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_many_texts_a_sample_is_judged_in_float64(llama: Path, dtype: str) -> None:
    case = case_of(llama, on_llama(llama, LORA), dtype=dtype)
    texts = texts_of(loaded(case), MANY, tokens=8, drawn=True)
    report = check_text(case, texts)
    assert (report.exit_status, report.logprobs_verdict) == (0, "right")
    assert sum(result.in_dtype for result in report.texts) >= 3, "the screen spares most of those outside the sample"
    assert report.summary is not None
    found, healthy = report.summary.found, report.summary.healthy
    assert found.tokens == 14 * 8
    assert found.mean_abs <= report.summary.threshold
    assert sum(report.summary.histogram) == found.tokens
    assert healthy.mean_abs > 0


def test_one_wrong_text_of_many_is_found_and_others_are_not(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    texts = texts_of(model, MANY, tokens=8, drawn=True)
    with model.disable_adapter():
        texts[4] = texts_of(model, MANY[4:5], tokens=8, drawn=True)[0]
    report = check_text(case, texts)
    wrong = [number for number, result in enumerate(report.texts) if result.has_other_logprobs]
    assert (wrong, report.exit_status, report.logprob_causes) == ([4], 1, ("adapter-ignored",))
    assert not report.texts[4].in_dtype, "who is accused was judged in float64"


def test_of_many_wrong_texts_no_more_are_judged_in_float64_than_causes_are_tried_on(llama: Path) -> None:
    """All are far outside: those of the sample are enough to say why, and each is said to be wrong."""
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    with model.disable_adapter():
        texts = texts_of(model, MANY, tokens=8, drawn=True)
    report = check_text(case, texts)
    assert all(result.has_other_logprobs for result in report.texts)
    assert (report.exit_status, report.logprob_causes) == (1, ("adapter-ignored",))
    assert sum(not result.in_dtype for result in report.texts) == SAMPLE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_are_kept_say_what_those_say_that_are_computed_again(llama: Path, dtype: str) -> None:
    model = loaded(case_of(llama, on_llama(llama, LORA), dtype=dtype))
    (text,) = texts_of(model, PROMPTS[:1], drawn=True)
    cooler = Processing(sampling=Sampling(temperature=0.9))
    own = JudgedText.of(model, encoded(text, None, "text"), None, list[str]().append)
    text = msgspec.structs.replace(text, logprobs=cooler.logprobs(own.logits(), own.chosen)[:, 0].tolist())
    ratios, passes_with_noise = [], []
    for room in (0, 1 << 30):
        steps: list[str] = []
        judged = JudgedText.of(model, encoded(text, None, "text"), None, steps.append, room=Room(room))
        ratios.append(judged.ratio_of_processing(cooler, steps.append))
        passes_with_noise.append(sum("noise" in step for step in steps))
    assert ratios[0] <= 1
    assert ratios[1] == pytest.approx(ratios[0], rel=1e-5)
    assert passes_with_noise == [6, 3]


def test_texts_whose_log_probabilities_a_sampler_took_are_computed_once(llama: Path) -> None:
    """The sample says how they were taken, before all others are computed."""
    case = case_of(llama, on_llama(llama, LORA))
    cooler = Processing(sampling=Sampling(temperature=0.7))
    model = loaded(case)
    texts = []
    for text in texts_of(model, MANY, tokens=8, drawn=True):
        plain = plain_text(model, encoded(text, None, "text"), also_by=cooler)
        texts.append(msgspec.structs.replace(text, logprobs=plain.by_processing[cooler].tolist()))
    with mock.patch.object(screening, "plain_logits", wraps=screening.plain_logits) as computed:
        report = check_text(case, texts)
    assert {result.logprobs_of for result in report.texts} == {"temperature 0.7"}
    assert computed.call_count == len(texts)


def test_what_adds_a_little_to_each_log_probability_is_off_as_a_whole(llama: Path) -> None:
    """In a half type each is within rounding by itself."""
    case = case_of(llama, on_llama(llama, LORA), dtype="bfloat16")
    texts = texts_of(loaded(case), MANY, tokens=12, drawn=True)
    healthy = check_text(case, texts)
    assert healthy.summary is not None
    added = 3 * healthy.summary.mean_threshold
    assert added < 0.5
    moved = [msgspec.structs.replace(text, logprobs=[value + added for value in text.logprobs or []]) for text in texts]
    report = check_text(case, moved)
    assert healthy.exit_status == 0
    assert (report.exit_status, report.logprobs_verdict) == (1, "wrong")


def test_the_trainers_log_probabilities_are_judged_beside_the_engines(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    texts = texts_of(model, PROMPTS[:3], drawn=True)
    both = [msgspec.structs.replace(text, trainer_logprobs=text.logprobs) for text in texts]
    healthy = check_text(case, both)
    assert (healthy.exit_status, healthy.logprobs_verdict, healthy.trainer_verdict) == (0, "right", "right")
    at_half = [
        msgspec.structs.replace(text, trainer_logprobs=[value / 2 for value in text.logprobs or []]) for text in texts
    ]
    report = check_text(case, at_half)
    assert (report.exit_status, report.logprobs_verdict, report.trainer_verdict) == (1, "right", "wrong")
    assert "the trainer's log probabilities: those of 3 of 3 texts are not the model's" in list(report.lines())


def test_tokens_that_a_tool_wrote_are_not_judged(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    (text,) = texts_of(loaded(case), PROMPTS[:1])
    ids = [int(token) for token in text.text]
    changed = [*ids[:6], 50, 51, 52]
    (after,) = texts_of(loaded(case), [[*PROMPTS[0], *changed]], tokens=5)
    whole = [*changed, *(int(token) for token in after.text)]
    judged = [True] * 6 + [False] * 3 + [True] * 5
    assert check_text(case, [Text(prompt=PROMPTS[0], text=whole, judged=judged)]).exit_status == 0
    assert check_text(case, [Text(prompt=PROMPTS[0], text=whole)]).exit_status == 1


def test_a_model_in_training_is_judged_and_left_as_it_is(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    model = loaded(case)
    texts = texts_of(model, PROMPTS[:3], drawn=True)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_rollouts(model, texts)
    assert (report.exit_status, report.logprobs_verdict) == (0, "right")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1.5)
    assert check_rollouts(model, texts).exit_status == 1, "the engine has an older step"
    with pytest.raises(InputError, match="no tokenizer"):
        check_rollouts(model, [Text(prompt="in words", text="and words")])


def test_how_many_tokens_more_would_tell_the_adapter(llama: Path) -> None:
    """The more an adapter does, the fewer tokens tell whether it is on."""
    needed = {}
    for scale in (0.02, 0.2):
        lora = peft.LoraConfig(r=8, lora_alpha=12 * scale, target_modules=["q_proj", "v_proj", "down_proj"])
        case = case_of(llama, on_llama(llama, lora), dtype="bfloat16")
        report = check_text(case, texts_of(loaded(case), PROMPTS[:2], tokens=3, drawn=True))
        assert report.exit_status == 0
        needed[scale] = report.told[0].tokens if report.told else 0
    assert needed[0.02] is not None
    assert needed[0.2] is not None
    assert needed[0.02] > needed[0.2]
    assert needed[0.02] > 6


@pytest.mark.parametrize(
    ("threshold", "mean_threshold", "wanted"),
    [
        (0.1, 0.02, "these texts: mean |difference| 0.1, mean 0.02"),
        (0.1, math.inf, "these texts: mean |difference| 0.1, too few texts for one of the mean"),
        (3.3, math.inf, "these texts: too few texts for one of the mean |difference| and the mean"),
    ],
)
def test_a_threshold_that_rules_nothing_out_is_not_told(threshold: float, mean_threshold: float, wanted: str) -> None:
    figures = differences_of(torch.tensor([0.1, -0.1], dtype=torch.float64))
    summary = LogprobSummary(found=figures, healthy=figures, threshold=threshold, mean_threshold=mean_threshold)
    assert list(summary.lines("float32"))[-1].endswith(wanted)


def test_log_probabilities_that_are_all_infinite_are_wrong_and_no_error(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    texts = texts_of(loaded(case), PROMPTS[:3], drawn=True)
    rubbish = [msgspec.structs.replace(text, logprobs=[-math.inf] * len(text.text)) for text in texts]
    report = check_text(case, rubbish)
    assert (report.exit_status, report.logprobs_verdict) == (1, "wrong")
