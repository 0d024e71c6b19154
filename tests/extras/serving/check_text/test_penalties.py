"""Texts that were written with penalties: as transformers' `generate` writes them, and by each engine's own rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from consistency.case.case import Case
from consistency.extras.serving.check_text.command import sampling_of
from consistency.extras.serving.check_text.formats import rollout_format
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.options import TextOptions
from consistency.extras.serving.check_text.penalties import penalized
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]

_TOKENS = 24


def generated(case: Case, *, logprobs: str = "", **settings: Any) -> list[Text]:
    """Return what transformers' own `generate` writes, with log probabilities of its logits or of its scores."""
    model = loaded(case)
    texts = []
    for prompt in PROMPTS[:3]:
        torch.manual_seed(3)
        output = model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=_TOKENS, return_dict_in_generate=True, output_logits=True,
            output_scores=True, **settings,
        )  # fmt: skip
        ids = output.sequences[0, len(prompt) :].tolist()
        given = None
        if logprobs:
            logits = output.logits if logprobs == "raw" else output.scores
            given = [float(row[0].double().log_softmax(-1)[token]) for row, token in zip(logits, ids, strict=True)]
        texts.append(Text(prompt=prompt, text=ids, logprobs=given))
    return texts


@pytest.mark.slow
def test_a_greedy_text_with_a_repetition_penalty_is_named_and_right_where_it_is_stated(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    texts = generated(case, do_sample=False, repetition_penalty=1.3)
    report = check_text(case, texts)
    assert report.exit_status == 1
    assert report.causes == (TextCause.PENALTY.value,)
    assert "with a repetition penalty 1.3" in "\n".join(report.lines())
    stated = TextOptions(sampling=sampling_of("temperature=0, repetition_penalty=1.3"))
    assert check_text(case, texts, options=stated).exit_status == 0


@pytest.mark.slow
@pytest.mark.parametrize(("logprobs", "processed"), [("raw", False), ("scores", True)])
def test_log_probabilities_before_and_after_a_penalty(llama: Path, logprobs: str, *, processed: bool) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    texts = generated(case, do_sample=True, top_k=0, repetition_penalty=1.3, logprobs=logprobs)
    stated = sampling_of("repetition_penalty=1.3")
    report = check_text(case, texts, options=TextOptions(sampling=stated, processed=processed))
    assert report.exit_status == 0
    unstated = check_text(case, texts)
    assert unstated.exit_status == int(processed)
    if processed:
        assert {result.logprobs_of for result in unstated.texts} == {"repetition penalty 1.3"}


_BATCH = [[5, 9, 33, 4], [7, 7, 60], [1, 6, 3, 4, 5, 8]]
"""Prompts of unequal lengths, none with the end of a text: in the longest it is not penalized."""


def generated_in_a_batch(case: Case, penalty: float) -> list[Text]:
    """Return what `generate` writes of prompts of unequal lengths, filled up with the end of a text.

    The penalty is given as transformers before 5.23 makes it, which knows of no padding.
    """
    model = loaded(case)
    end, longest = model.generation_config.eos_token_id, max(map(len, _BATCH))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in _BATCH])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in _BATCH])
    output = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=_TOKENS, pad_token_id=end,
        return_dict_in_generate=True, output_scores=True, do_sample=True, top_k=0,
        logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)]),
    )  # fmt: skip
    texts = []
    for number, prompt in enumerate(_BATCH):
        written = output.sequences[number, longest:].tolist()
        written = written[: written.index(end) + 1] if end in written else written
        scores = output.scores[: len(written)]
        given = [float(row[number].double().log_softmax(-1)[token]) for row, token in zip(scores, written, strict=True)]
        texts.append(Text(prompt=prompt, text=written, logprobs=given))
    return texts


@pytest.mark.slow
def test_a_penalty_of_a_batch_is_of_its_padding_too(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    torch.manual_seed(3)
    texts = generated_in_a_batch(case, 1.3)
    assert len({len(text.prompt) for text in texts}) > 1
    without_padding = TextOptions(sampling=sampling_of("repetition_penalty=1.3"), processed=True)
    for options in (TextOptions(), without_padding):
        report = check_text(case, texts, options=options)
        assert report.exit_status == 1
        assert {result.logprobs_of for result in report.texts} == {"repetition penalty 1.3, which padding had too"}
    stated = TextOptions(sampling=sampling_of("repetition_penalty=1.3, penalized_padding=1"), processed=True)
    padded = [text for text in texts if len(text.prompt) < max(len(other.prompt) for other in texts)]
    assert check_text(case, padded, options=stated).exit_status == 0


def by_vllm(logits: torch.Tensor, prompt: list[int], written: list[int], sampling: Sampling) -> torch.Tensor:
    """Return what vLLM's `apply_penalties` makes of the logits of one place."""
    changed = logits.clone()
    for token in {*prompt, *written}:
        changed[token] *= sampling.repetition_penalty if changed[token] <= 0 else 1 / sampling.repetition_penalty
    for token, count in Counter(written).items():
        changed[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return changed


def by_llama_cpp(logits: torch.Tensor, prompt: list[int], written: list[int], sampling: Sampling) -> torch.Tensor:
    """Return what llama.cpp's `llama_sampler_penalties_apply` makes of the logits of one place."""
    changed = logits.clone()
    for token, count in Counter([*prompt, *written][-sampling.penalty_last_n :]).items():
        changed[token] *= sampling.repetition_penalty if changed[token] <= 0 else 1 / sampling.repetition_penalty
        changed[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return changed


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        (Sampling(repetition_penalty=1.1), by_vllm),
        (Sampling(presence_penalty=0.5), by_vllm),
        (Sampling(frequency_penalty=0.3), by_vllm),
        (Sampling(repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=-0.5), by_vllm),
        (Sampling(repetition_penalty=1.1, penalty_last_n=4), by_llama_cpp),
        (Sampling(repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.5, penalty_last_n=4), by_llama_cpp),
    ],
    ids=lambda value: str(value) if isinstance(value, Sampling) else value.__name__,
)
def test_penalties_are_those_of_the_engines(sampling: Sampling, rule: Any) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prompt, ids = [3, 3, 9], [5, 3, 5, 7, 5, 1]
    found = penalized(logits, prompt, ids, [0, 2, 5], sampling)
    for row, place in enumerate((0, 2, 5)):
        torch.testing.assert_close(found[row], rule(logits[row], prompt, ids[:place], sampling))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"temperature": 0.7, "repetition_penalty": 1.1}, Sampling(temperature=0.7, repetition_penalty=1.1)),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.0}, Sampling(frequency_penalty=0.5)),
        # llama.cpp: as it writes them without a penalty, without anything to look back to, and for all
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, Sampling()),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, Sampling()),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, Sampling(repetition_penalty=1.1, penalty_last_n=64)),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, Sampling(repetition_penalty=1.1, penalty_last_n=1 << 30)),
    ],
)
def test_penalties_of_a_record(settings: dict[str, Any], wanted: Sampling) -> None:
    assert rollout_format.sampling_of(settings) == wanted
