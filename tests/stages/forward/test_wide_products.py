"""A module that is to multiply in float32 and does not is named, however small the error is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consistency.capture.records import TensorRecord
from consistency.numerics import words
from consistency.stages.forward import wide_products
from tests.worker.conftest import Look
from tests.worker.model.made_models import a_llama, saved


def products(look: Look, base: Path) -> list[TensorRecord]:
    rows = look(base, None, stages=("forward",), dtype="bfloat16")
    return [row for row in rows if row.tensor == "products"]


def test_a_healthy_model_has_one_row(look: Look, llama: Path) -> None:
    (row,) = products(look, llama)
    assert (row.layer, row.status) == ("model", "equal")


def test_a_module_that_the_cpu_computes_in_float32_is_named(
    look: Look, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "consistency.stages.forward.reference.product_types", lambda *_: {"model.layers.0.mlp.up_proj": "float32"}
    )
    (row,) = products(look, llama)
    assert (row.layer, row.status, row.word) == ("model.layers.0.mlp.up_proj", "outside", words.ROUNDED_TO_BF16)
    assert row.reason == (
        "model.layers.0.mlp.up_proj multiplies in bfloat16 here, and the CPU computes it in float32 by the same code"
    )


def test_a_module_that_its_class_keeps_is_named_on_every_worker(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_llama()
    base = saved(model.to(torch.bfloat16), tmp_path / "half")
    monkeypatch.setattr(wide_products, "kept_wide", lambda _, modules: {name for name in modules if "up_proj" in name})
    (row,) = products(look, base)
    assert row.status == "outside"
    assert str(row.reason).endswith("and its class keeps it in float32")
