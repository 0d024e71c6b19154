"""Tables that no file holds: right where the model's own class makes them so, and wrong where a cast rounded them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from consistency.capture.records import TensorRecord
from consistency.numerics import words
from consistency.numerics.rules import judge_relative
from tests.worker.conftest import Look
from tests.worker.model.made_models import a_llama, saved

Change = Callable[[torch.Tensor], torch.Tensor]


def table_of(look: Look, base: Path, monkeypatch: pytest.MonkeyPatch, change: Change | None) -> TensorRecord:
    """Return the row of the rotary frequencies of a model in bfloat16, changed after loading."""
    real = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = real(cls, *args, **kwargs)
        rotary = (loaded[0] if isinstance(loaded, tuple) else loaded).model.rotary_emb
        if change is not None:
            rotary.inv_freq = change(rotary.inv_freq)
        return loaded

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    rows = look(base, None, stages=("base",), dtype="bfloat16")
    return next(row for row in rows if row.tensor == "inv_freq")


def status_of(row: TensorRecord) -> str:
    assert row.measure is not None
    assert row.rounding is not None
    return judge_relative(row.measure, row.dtype, row.rounding).status


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_a_table_that_its_class_made_is_right_in_every_kind(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rope: str
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
    }
    more = {"original_max_position_embeddings": 32} if rope != "default" else {}
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **kinds[rope], **more}
    row = table_of(look, saved(a_llama(rope_parameters=parameters), tmp_path / "base"), monkeypatch, None)
    assert status_of(row) in ("equal", "within")
    assert row.dtype == "float32"
    assert row.word != words.ROUNDED_TO_BF16


@pytest.mark.parametrize("stays_wide", [False, True])
def test_a_table_that_was_cast_with_the_model_is_named(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays_wide: bool
) -> None:
    def cast(table: torch.Tensor) -> torch.Tensor:
        rounded = table.to(torch.bfloat16)
        return rounded.to(torch.float32) if stays_wide else rounded

    row = table_of(look, saved(a_llama(), tmp_path / "base"), monkeypatch, cast)
    assert status_of(row) == "outside"
    assert row.word == words.ROUNDED_TO_BF16
    assert row.evidence["table"].endswith("float32 where its class makes it")


def test_another_table_has_no_such_name(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = table_of(look, saved(a_llama(), tmp_path / "base"), monkeypatch, lambda table: table * 1.01)
    assert status_of(row) == "outside"
    assert row.word is None


def test_a_model_whose_class_makes_the_table_in_its_dtype_is_not_accused(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    real = kind.__init__

    def init(module: Any, *args: Any, **kwargs: Any) -> None:
        real(module, *args, **kwargs)
        module.inv_freq = module.inv_freq.to(torch.get_default_dtype())

    monkeypatch.setattr(kind, "__init__", init)
    row = table_of(look, saved(a_llama(), tmp_path / "base"), monkeypatch, None)
    assert row.dtype == "bfloat16"
    assert row.word is None
    assert row.measure is None, "it has no table in float64, and is compared with the other workers"
