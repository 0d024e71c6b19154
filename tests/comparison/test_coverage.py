"""What counts as compared."""

from __future__ import annotations

from consistency.comparison.by_worker import coverage
from consistency.comparison.result import Outcome, Status, TensorComparison


def tensor(stage: str, *rows: tuple[str, str | None, Status]) -> TensorComparison:
    return TensorComparison(
        stage=stage, load_path="isolated", layer="l", tensor="w", shape=(1,), dtype="float32", rule="bitwise",
        classes=(), outcomes=tuple(Outcome(workers=(name,), reference=of, status=status) for name, of, status in rows),
    )  # fmt: skip


def test_a_stage_counts_where_a_file_an_exact_value_a_limit_or_another_worker_judged_it() -> None:
    for reference in ("file", "float64", None, "cuda:0"):
        (stage,) = coverage([tensor("base", ("cpu", reference, "equal"))]).items()
        assert stage[0] == "base"
        assert list(stage[1].workers) == ["cpu"]


def test_a_worker_that_is_its_own_reference_alone_is_not_compared() -> None:
    assert coverage([tensor("base", ("cpu", "cpu", "equal"))]) == {}
    both = coverage([tensor("base", ("cpu", "cpu", "equal"), ("cuda:0", "cpu", "equal"))])
    assert list(both["base"].workers) == ["cpu", "cuda:0"], "compared with each other"


def test_what_is_skipped_or_blocked_is_not_compared() -> None:
    rows: list[tuple[str, str | None, Status]] = [("cpu", "file", "skipped"), ("cuda:0", None, "blocked")]
    assert coverage([tensor("adapter", *rows)]) == {}
    assert list(coverage([tensor("adapter", *rows, ("cuda:1", "file", "outside"))])["adapter"].wrong) == ["cuda:1"]
