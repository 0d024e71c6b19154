"""What is concluded from merges where PEFT refuses one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from consistency.extras.serving.causes import Cause
from consistency.extras.serving.engine_outputs import explanations
from consistency.worker.model.merging import MergeRefusedError

BOTH = {Cause.MERGED_BFLOAT16: ["bfloat16"], Cause.MERGED_FLOAT16: ["float16"]}


@pytest.mark.parametrize("refused", ["bfloat16", "float16", None])
def test_no_merge_is_named_where_peft_refuses_one(monkeypatch: pytest.MonkeyPatch, refused: str | None) -> None:
    """A merge alone is a cause only if the others were tried, whichever of them comes first."""

    def ratio_of(_: Any, way: str) -> float:
        if way == refused:
            raise MergeRefusedError("Cannot merge this adapter")
        return 0.5 if way == "bfloat16" else 3.0

    monkeypatch.setattr(explanations, "merges", lambda _: BOTH)
    monkeypatch.setattr(explanations, "no_merges", lambda _: "")
    monkeypatch.setattr(explanations, "_ratio_of_merge", ratio_of)
    question: Any = SimpleNamespace(passes=SimpleNamespace(model=None))
    fits, not_tried = explanations._explain_by_merges(question)
    if refused is None:
        assert (fits, not_tried) == ({Cause.MERGED_BFLOAT16: ("", 0.5)}, "")
    else:
        assert (fits, not_tried) == ({}, "merges in a narrower dtype")
