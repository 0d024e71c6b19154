"""Texts that engines wrote of SmolLM2 in float32, as they were recorded (docs/engines/arithmetic.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consistency.case.case import Case
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.options import TextOptions
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

RECORDED = Path(__file__).with_name("engine_texts.jsonl")


def texts_by(writer: str) -> list[Text]:
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    return [Text(**{key: r[key] for key in ("prompt", "text", "logprobs")}) for r in records if r["by"] == writer]


@pytest.fixture
def case(smollm2: Path) -> Case:
    return Case(name="x", base=str(smollm2 / "base"), adapter=str(smollm2 / "adapter"), dtype="float32")


@pytest.mark.parametrize("engine", ["llama.cpp", "ctranslate2", "onnxruntime", "vllm", "mlx"])
def test_a_healthy_engine_is_consistent_in_its_own_arithmetic(case: Case, engine: str) -> None:
    report = check_text(case, texts_by(engine), options=TextOptions(engine=engine))
    assert (report.exit_status, report.cache, report.computed_in) == (0, "", "")


def test_a_cache_in_float16_is_no_excuse_for_an_engine_that_has_none(case: Case) -> None:
    texts = texts_by("llama.cpp")
    report = check_text(case, texts, options=TextOptions(engine="ctranslate2"))
    assert (report.exit_status, report.logprobs_verdict) == (1, "explained")
    assert report.about == {TextCause.CACHE.value: "float16"}


def test_the_rotary_positions_of_mlx_are_named(case: Case) -> None:
    """It reads `rope_theta` in config.json, where transformers 5 writes `rope_parameters`."""
    report = check_text(case, texts_by("mlx, other rope"), options=TextOptions(engine="mlx"))
    assert (report.exit_status, report.causes) == (1, (Cause.ROTARY.value,))
    assert "rotary positions of base 10,000 (here 100,000)" in "\n".join(report.lines())
