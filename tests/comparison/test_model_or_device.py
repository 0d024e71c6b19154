"""What is wrong in a worker's own float64 pass too is the model's code, unless another worker got it right."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.reader import read_capture
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.extras.serving.generation.spec import CACHE_CHANGES_MODEL, WRONG_WITH_CACHE
from consistency.numerics.real import Real
from consistency.numerics.words import Word
from tests.conftest import MakeCapture

OF_MODEL, OF_DEVICE = CACHE_CHANGES_MODEL, WRONG_WITH_CACHE
TF32 = {"products": {"matmul": "tf32", "convolution": "tf32"}, "dtype": "float32"}
FLOAT32, BFLOAT16 = {"dtype": "float32"}, {"dtype": "bfloat16"}


def with_cache(status: RecordStatus = "within", word: Word | None = None) -> list[TensorRecord]:
    share = Real(1e5 if status == "outside" else 0.3)
    return [
        TensorRecord(
            "generation", "layers.0.self_attn", "cache", rule="limit", status=status, word=word, limit_ratio=share
        )
    ]


def wrong(word: Word = OF_MODEL) -> list[TensorRecord]:
    return with_cache("outside", word)


def judged(make_capture: MakeCapture, **workers: tuple[list[TensorRecord], dict[str, Any]]) -> Comparison:
    names = {name.replace("_", "@"): one for name, one in workers.items()}
    info = {
        name: {"environment": environment, "stages_done": ("generation",)} for name, (_, environment) in names.items()
    }
    folder = make_capture("a", {name: records for name, (records, _) in names.items()}, info=info)
    return compare([read_capture(folder)])


def words(comparison: Comparison) -> dict[str, Word | None]:
    (tensor,) = comparison.tensors
    return {name: outcome.word for name, outcome in tensor.by_worker()}


def test_a_device_that_is_wrong_in_every_dtype_is_accused(make_capture: MakeCapture) -> None:
    found = judged(make_capture, cpu=(with_cache(), FLOAT32), cpu_baseline=(wrong(), FLOAT32))
    assert words(found) == {"cpu": None, "cpu@baseline": OF_DEVICE}
    (error,) = (one for one in found.findings if one.severity == "error")
    assert error.kind == OF_DEVICE
    assert error.workers == ("cpu@baseline",)


def test_the_reference_worker_is_accused_as_any_other(make_capture: MakeCapture) -> None:
    found = judged(make_capture, cpu=(wrong(), FLOAT32), cpu_baseline=(with_cache(), FLOAT32))
    assert words(found) == {"cpu": OF_DEVICE, "cpu@baseline": None}


def test_what_is_wrong_everywhere_is_of_the_model(make_capture: MakeCapture) -> None:
    found = judged(make_capture, cpu=(wrong(), FLOAT32), cpu_baseline=(wrong(), FLOAT32))
    assert set(words(found).values()) == {OF_MODEL}


@pytest.mark.parametrize("environment", [TF32, BFLOAT16])
def test_a_worker_with_wider_limits_is_no_witness(make_capture: MakeCapture, environment: dict[str, Any]) -> None:
    """What the model's code changes may be within what rounding makes there."""
    found = judged(make_capture, cpu=(wrong(), FLOAT32), cpu_baseline=(with_cache(), environment))
    assert words(found)["cpu"] == OF_MODEL


def test_a_worker_that_skipped_it_is_no_witness(make_capture: MakeCapture) -> None:
    found = judged(make_capture, cpu=(wrong(), FLOAT32), cpu_baseline=(with_cache("skipped"), FLOAT32))
    assert words(found)["cpu"] == OF_MODEL
