"""Every stage that draws passes with noise counts the independent errors of the tensors that it judges by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest

from consistency.devices.products import Products
from consistency.worker import cpu_error
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama

Compute = Callable[[], Any]
Count = Callable[[Any], Mapping[str, int]]


def test_a_stage_counts_the_errors_of_all_tensors_that_it_judges(
    look: Look, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = cpu_error.draw
    counted: set[str] = set()

    def watched(products: Products, passes: range, compute: Compute, count: Count) -> list[Any]:
        def counts(drawn: Any) -> Mapping[str, int]:
            found = count(drawn)
            assert min(found.values()) > 0, found
            counted.update(name.removeprefix("base_model.model.").removesuffix(".default.weight") for name in found)
            return found

        return draw(products, passes, compute, counts)

    monkeypatch.setattr(cpu_error, "draw", watched)
    # its merge has no closed form
    adapter = on_llama(llama, peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj", "down_proj"]))
    records = look(llama, adapter, stages=("merged",))
    assert not [r for r in records if r.status in ("outside", "blocked")]
    judged = {f"{r.layer}.{r.tensor}" for r in records if r.stage == "merged" and r.rule == "relative"}
    assert judged
    assert not [name for name in judged if not name.startswith(tuple(counted))], counted
