from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consistency.case.case import Case
from consistency.case.fit import Fit
from consistency.worker.stages.gradient import runs


@pytest.mark.parametrize("rows", [None, 1])
def test_a_backward_pass_has_no_more_sequences_than_fit(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def parts_of(inputs: object, *, rows: int | None = None) -> list[object]:
        asked.append(rows)
        return [inputs]

    monkeypatch.setattr(runs, "parts_of", parts_of)
    case = Case(name="x", base="b", fit=Fit(micro_batch=rows))
    context: Any = SimpleNamespace(job=SimpleNamespace(case=case), events=None)
    assert runs.Runs(context, torch.nn.Linear(1, 1), ["weight"], {}).counts == {"weight": 1}
    assert asked == [rows]
