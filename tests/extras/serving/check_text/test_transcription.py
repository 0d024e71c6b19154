"""What became of log probabilities after they were taken is named: another base, another token's, fewer digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.texts import Text
from tests.extras.serving.check_text.made_texts import LORA, PROMPTS, loaded, texts_of
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]


def _rounded(logprobs: list[float], dtype: torch.dtype) -> list[float]:
    return list(torch.tensor(logprobs).to(dtype).tolist())


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(
    ("written", "name"),
    [
        (lambda given: [each / math.log(10) for each in given], "logarithms of base 10"),
        (lambda given: [each / math.log(2) for each in given], "logarithms of base 2"),
        (lambda given: [-1.0, *given[:-1]], "a delay of one token"),
        (lambda given: [*given[1:], -1.0], "a lead of one token"),
        (lambda given: _rounded(given, torch.bfloat16), "rounding to bfloat16"),
        (lambda given: _rounded(given, torch.float16), "rounding to float16"),
    ],
)
def test_log_probabilities_that_were_written_otherwise(
    llama: Path, written: Callable[[list[float]], list[float]], name: str, *, drawn: bool
) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    texts = texts_of(loaded(case), PROMPTS * 2, drawn=drawn)
    assert check_text(case, texts).verdict == "consistent"

    def changed(text: Text) -> Text:
        assert text.logprobs is not None
        return msgspec.structs.replace(text, logprobs=written(text.logprobs))

    # more texts than are judged in float64: the others are held against one pass in the same way
    report = check_text(case, [changed(text) for text in texts])
    assert report.verdict == "inconsistent"
    assert f"those of 12 of 12 texts were taken with {name}" in "\n".join(report.lines())


def test_a_small_error_is_no_rounding(llama: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    texts = texts_of(loaded(case), PROMPTS, drawn=True)
    wrong = [msgspec.structs.replace(text, logprobs=[1.002 * each for each in text.logprobs or []]) for text in texts]
    report = check_text(case, wrong)
    assert report.verdict == "inconsistent"
    assert "rounding" not in report.texts[0].logprobs_of
