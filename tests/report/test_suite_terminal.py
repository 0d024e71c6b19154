"""The suite in a terminal: verdict, findings once, one line per case, equal ones folded."""

from __future__ import annotations

import msgspec
import pytest

from consistency.capture.merge_effect import MergeEffect
from consistency.capture.version import __version__
from consistency.comparison import kinds
from consistency.comparison.merging import judged
from consistency.comparison.result import Finding
from consistency.numerics.real import Real
from consistency.report.summarize import summarize
from tests.report.made_comparisons import ALL, comparison, hostile, tensor
from tests.report.made_suites import case, good, lost, many, suite, unusable, zeros, zeros_finding
from tests.report.printed import printed, suite_as_html, suite_as_markdown


def test_one_cause_in_many_cases_is_told_once_with_its_next_command() -> None:
    text = printed(many(), folder="out dir")
    assert text.count("zeros where the file is nonzero") == 2, "among the findings, and where the report ends"
    lines = [line.strip() for line in text.splitlines()]
    first = lines.index("1  56 of 100 cases · adapter · cuda:1 · zeros where the file is nonzero in lora_B tensors")
    assert lines[first + 1] == "cases: lora-000, lora-001, lora-002, lora-003, lora-007 and 51 more"
    assert lines[first + 3] == "next: consistency reproduce 'out dir/cases/lora-000' --finding 1 --out repro"


def test_cases_with_one_outcome_share_a_line_where_there_are_more_than_a_screen() -> None:
    text = printed(many())
    lines = text.splitlines()
    assert len(lines) < 40
    labels = ["killer ", "lora-000 and 55 more ", "plain ", "gone ", "41 of 100 cases "]
    places = [next(i for i, line in enumerate(lines) if line.startswith(f"  {label}")) for label in labels]
    assert places == sorted(places)
    assert "inconsistent" in lines[places[1]]
    assert "✗ 111/111" in lines[places[1]], "the sum of their tensors"
    assert "-v shows a line for every case" in text


def test_verbose_shows_every_case() -> None:
    text = printed(many(), verbose=True)
    assert all(f"\n  lora-{i:03} " in text for i in range(97))
    assert "-v shows" not in text


def test_more_outcomes_than_a_screen_share_lines_by_verdict() -> None:
    found = zeros(1)
    cases = []
    for i in range(30):
        finding = msgspec.structs.replace(found.findings[0], general=f"cause {i}")
        cases.append(case(f"c-{i:02}", msgspec.structs.replace(found, findings=(finding,))))
    text = printed(suite(*cases, case("fine", good())))
    rows = [line.split("  ")[1] for line in text.splitlines() if "inconsistent   " in line or " consistent   " in line]
    assert len(rows) == 20
    assert rows[-2:] == ["12 of 31 cases", "1 of 31 cases"]
    assert "and 10 more findings: -v shows all" in text


def test_what_cannot_be_reproduced_names_no_reproducer() -> None:
    drifted = msgspec.structs.replace(zeros_finding(2), kind=kinds.DRIFT, next="run again")
    found = msgspec.structs.replace(zeros(2), findings=(drifted,))
    text = printed(suite(case("killer", lost()), unusable("gone"), case("aged", found)), folder="run")
    assert "killer · cuda:1 was lost" in text
    assert "next: run again" in text
    assert "reproduce" not in text


def test_simulated_devices_are_told() -> None:
    assert "SIMULATED" not in printed(suite(case("a", good())))
    found = good()
    first, *others = found.workers
    simulated = msgspec.structs.replace(found, workers=(msgspec.structs.replace(first, simulated=True), *others))
    assert "SIMULATED DEVICES" in printed(suite(case("a", simulated)))


@pytest.mark.parametrize("verbose", [False, True])
def test_hostile_names_are_shown_not_obeyed(verbose: bool) -> None:
    text = printed(suite(case("\x1b[31mred\r", hostile())), verbose=verbose)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\u2028" not in text
    assert "\\x1b[31mred\\x0d" in text


def test_a_drill_is_told_before_other_notes() -> None:
    notes = [Finding(kind="skipped", severity="note", message=f"stage {i} was skipped") for i in range(24)]
    planted = Finding(kind="planted", severity="note", message="a fault was planted in cuda:1 on purpose")
    found = suite(case("a", msgspec.structs.replace(good(), findings=(*notes, planted))))
    text = printed(found)
    assert "note: case a · a fault was planted in cuda:1 on purpose" in text
    assert "and 5 more notes: -v shows all" in text
    assert "**A drill: case a · a fault was planted in cuda:1 on purpose.**" in suite_as_markdown(found)


def test_what_merging_does_has_a_column() -> None:
    effect = MergeEffect(
        dtype="bfloat16", computed=Real(0.02), unmerged_error=Real(0.01), moved=Real(0.004), must=Real(0.004),
        exact=Real(1e-15), float32=Real(5e-8), adapter=Real(0.5),
    )  # fmt: skip
    merging = (judged("cpu", effect),)
    found = suite(case("alice", msgspec.structs.replace(good(), merging=merging)), case("bob", good()))
    text = printed(found)
    (alice,) = [line.split() for line in text.splitlines() if line.startswith("  alice ")]
    assert alice == ["alice", "consistent", "=", "≤", "0.31", "1.00×", "merge", "1.5", "s"]
    assert "merging: change of the outputs over what rounding W + ΔW makes unavoidable" in " ".join(text.split())
    assert "| 1.00× merge |" in suite_as_markdown(found)
    assert "<td>1.00× merge</td>" in suite_as_html(found)
    assert "merging" not in printed(suite(case("bob", good())))


def test_the_head_has_the_versions_of_all_cases() -> None:
    """As the report of a case has; where cases differ in one, all of them are there, each once."""
    versions: list[dict[str, str]] = [{"torch": "2.13.0", "peft": "0.21.2"}, {"torch": "2.12.0, 2.13.0"}]
    cases = [msgspec.structs.replace(case(f"{n}", good()), versions=found) for n, found in enumerate(versions)]
    ran = msgspec.structs.replace(suite(*cases, unusable("gone")), host="node-7", command=("consistency", "run"))
    assert ran.versions == {"torch": "2.13.0, 2.12.0", "peft": "0.21.2"}
    head = f"2026-03-01 02:00 UTC · node-7 · consistency {__version__}, torch 2.13.0, 2.12.0, peft 0.21.2"
    for text in (printed(ran, width=200), suite_as_markdown(ran), suite_as_html(ran)):
        assert head in text
    found = msgspec.structs.replace(good(), versions=versions[0])
    assert summarize("one", "cases/one", found, 1.0).versions == versions[0]


def test_a_stage_that_another_case_checked_for_the_host_is_no_gap() -> None:
    first = case("first", comparison([tensor([ALL], stage="operators"), tensor([ALL])]))
    second = comparison([tensor([ALL])], checked_elsewhere={"operators": "first"})
    text = printed(suite(first, case("second", second)))
    lines = [line.split() for line in text.splitlines()]
    rows = {words[0]: words[2:-2] for words in lines if words[:1] in (["first"], ["second"])}
    assert rows == {"first": ["=", "="], "second": ["″", "="]}
    assert "″ checked in another case, for the whole host" in " ".join(text.split())


def test_what_a_case_says_of_a_stage_is_not_read_by_the_table() -> None:
    said = comparison([tensor([ALL])], not_checked=("stage operators (checked in case first)",))
    first = case("first", comparison([tensor([ALL], stage="operators"), tensor([ALL])]))
    assert "″" not in printed(suite(first, case("second", said)))
