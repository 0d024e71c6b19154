"""The verdict in one sentence names what was compared, and nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Callable

import pytest

from consistency.comparison.layers import layers_of
from consistency.comparison.result import Comparison, Finding, Source, Status, TensorComparison
from consistency.extras.operations.status.make import of_comparison
from consistency.report import json as report_json
from consistency.report.formats import View
from consistency.report.html import as_html
from consistency.report.junit import as_junit
from consistency.report.layers import summary_lines
from consistency.report.markdown import as_markdown
from consistency.report.sentences import sentence, time_text
from tests.report.made_comparisons import ALL, comparison, tensor
from tests.report.made_suites import case, suite
from tests.report.printed import printed

WITHIN: dict[str, Status] = dict.fromkeys(ALL, "within")
SKIPPED: dict[str, Status] = dict.fromkeys(ALL, "skipped")


def base() -> TensorComparison:
    return tensor([ALL], stage="base", tensor="weight")


def test_without_an_adapter_the_base_alone_matches() -> None:
    tensors = [base(), tensor([ALL], statuses=SKIPPED), tensor([ALL], stage="merged", statuses=SKIPPED)]
    assert sentence(comparison(tensors, base="llama", adapter=None)) == (
        "the base agrees on 4 workers; no adapter was given"
    )


def test_stages_without_a_compared_tensor_are_said_to_be_not_compared() -> None:
    tensors = [base(), tensor([ALL]), tensor([ALL], stage="forward", statuses=SKIPPED)]
    assert sentence(comparison(tensors)) == "base and adapter agree on 4 workers; forward not compared"
    assert sentence(comparison([tensor([ALL], stage="operators")])) == "no mismatch in operators on 4 workers"
    assert sentence(comparison([tensor([ALL], statuses=SKIPPED)])) == "nothing was compared; adapter not compared"


def test_an_adapter_that_some_workers_checked_is_not_claimed_of_all() -> None:
    some: dict[str, Status] = {"cuda:1": "skipped", "cuda:2": "skipped"}
    assert sentence(comparison([base(), tensor([ALL], statuses=some)])) == (
        "agree: the base on 4 of 4 workers and the adapter on 2 of 4 workers"
    )


def test_a_mismatch_that_is_the_same_on_every_device_is_no_match() -> None:
    wrong = tensor([ALL], statuses=dict.fromkeys(ALL, "outside"))
    warning = Finding(kind="zeros", severity="warning", message="zeros on every device")
    assert sentence(comparison([base(), wrong], findings=(warning,))) == (
        "the base agrees on 4 workers; mismatch in adapter, the same on every device: see the warnings"
    )


def test_the_worst_error_is_a_number_of_the_table_with_its_stage() -> None:
    """Operators and limits have numbers of their own; a ratio of a tensor that is equal is in no cell."""
    tensors = [
        tensor([ALL], stage="operators", ratio=1.0, statuses=WITHIN),
        tensor([ALL], stage="base", ratio=0.95),
        tensor([ALL], stage="merged", ratio=0.314, statuses=WITHIN),
        tensor([ALL], stage="forward", ratio=0.21, statuses=WITHIN),
        tensor([ALL], stage="memory", ratio=0.88, statuses=WITHIN, rule="limit"),
    ]
    found = comparison(tensors)
    assert sentence(found).endswith("the model's worst error/tolerance is 0.31 (merged)")
    assert "≤ 0.31" in printed(found)
    assert "0.95" not in printed(found)


def test_a_correctly_rounded_value_is_exact_however_much_of_its_tolerance_that_takes() -> None:
    rounded = [tensor([ALL], stage=stage, ratio=0.998, statuses=WITHIN, max_ulp=0) for stage in ("operators", "merged")]
    found = comparison([base(), *rounded], dtype="bfloat16")
    assert "error/tolerance" not in sentence(found)
    assert of_comparison(found).ratio is None
    text = printed(found)
    assert "0.99" not in text
    assert "1.00" not in text
    assert list(summary_lines(layers_of(found)))[-1][1].startswith("Ampere sm_86  merged: = 0 ULP")
    table = json.loads(b"".join(report_json.render(suite(case("x", found)), View())))
    assert {stage["worst_ratio"] for stage in table["cases"][0]["stages"]} == {None}


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", True), ("float32", False)])
def test_a_half_type_says_what_one_rounding_takes(dtype: str, said: bool) -> None:
    found = comparison([tensor([ALL], stage="merged", ratio=0.998, statuses=WITHIN, max_ulp=1)], dtype=dtype)
    assert "error/tolerance is 1.00 (merged" in sentence(found)
    assert (f"where one rounding to {dtype} alone may take 1.00)" in sentence(found)) is said
    assert "≤ 1.00 correct rounding alone may use the whole tolerance of a half type" in printed(found)


def of_a_run() -> Comparison:
    sources = tuple(
        Source(name=name, created=f"2025-01-0{day}T08:00:00+00:00", host=f"host-{name}", tool="0.1.0")
        for day, name in enumerate("ab", start=1)
    )
    return comparison(
        [tensor([ALL])], created="2025-01-03T09:05:59+02:00", host="node-7", elapsed_s=41.4,
        command=("consistency", "compare", "a", "my b"), versions={"python": "3.11.7", "torch": "2.13.0"},
        planted=("adapter-zeros in cuda:1",), sources=sources,
    )  # fmt: skip


@pytest.mark.parametrize("form", [printed, as_markdown, as_html])
def test_every_form_begins_with_when_where_by_what_and_for_what_purpose(form: Callable[[Comparison], str]) -> None:
    text = html.unescape(form(of_a_run())).replace("\\", "")
    head = text[: text.index("Ampere sm_86")]
    for part in (
        "2025-01-03 07:05 UTC", "node-7", "41 s", "torch 2.13.0", "consistency compare a 'my b'",
        "capture b: 2025-01-02 08:00 UTC · host-b", "planted fault: adapter-zeros in cuda:1",
    ):  # fmt: skip
        assert part in head


def test_reports_without_an_origin_show_none() -> None:
    assert printed(comparison([tensor([ALL])])).splitlines()[1] == ""
    assert time_text("yesterday") == "yesterday"


def test_junit_states_time_host_and_what_was_planted() -> None:
    suite = as_junit(of_a_run())
    assert (suite.get("timestamp"), suite.get("hostname")) == ("2025-01-03T09:05:59+02:00", "node-7")
    found = {str(one.get("name")): one.get("value") for one in suite.iter("property")}
    assert found["planted"] == "adapter-zeros in cuda:1"
    assert found["command"] == "consistency compare a 'my b'"
    assert found["torch"] == "2.13.0"


def test_a_run_without_a_model_has_no_dtype() -> None:
    found = comparison([tensor([ALL], stage="operators")], dtype="auto")
    for form in (printed, as_markdown, as_html):
        assert "auto ·" not in form(found)
        assert "· auto" not in form(found)


def test_a_file_of_a_stranger_need_not_say_why() -> None:
    assert sentence(comparison([tensor([ALL])], verdict="inconsistent")) == "no finding says why"
