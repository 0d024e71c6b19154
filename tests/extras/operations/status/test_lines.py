"""One line and an exit status: what each caller expects, and never more than it takes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import pytest

from consistency.comparison.result import Comparison, Finding
from consistency.extras.operations.status import printed
from consistency.extras.operations.status.printed import MOST_BYTES, nagios_line, no_result_line, state, text_line
from consistency.extras.operations.status.record import Status
from consistency.numerics.real import Real
from tests.extras.operations.status.made_statuses import status
from tests.report.made_comparisons import ALL, HOSTILE, comparison, faulty, hostile, tensor
from tests.report.made_suites import good, lost

HOUR = 3600.0
WARNED = comparison([tensor([ALL])], findings=(Finding(kind="memory", severity="warning", message="cuda:1 is full"),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Said:
    """What is said of a comparison that is two hours old, with a limit of 26."""

    found: Comparison
    text: str
    nagios: str
    word: str


SAID = {
    "consistent": Said(
        found=good(), word="OK",
        text="CONSISTENT llama: the adapter agrees on 4 workers... (2h ago)",
        nagios="CONSISTENCY OK - the adapter agrees on 4 workers... | ratio=0.31;;1 age=7200s",
    ),
    "warned": Said(
        found=WARNED, word="WARNING",
        text="CONSISTENT llama: cuda:1 is full (2h ago)",
        nagios="CONSISTENCY WARNING - cuda:1 is full | age=7200s findings=1",
    ),
    "inconsistent": Said(
        found=faulty(), word="CRITICAL",
        text="INCONSISTENT llama: adapter - cuda:1 - zeros in 3 of 3 lora_B tensors (2h ago)",
        nagios="CONSISTENCY CRITICAL - adapter - cuda:1 - zeros in 3 of 3 lora_B tensors",
    ),
    "incomplete": Said(
        found=lost(), word="CRITICAL",
        text="INCOMPLETE llama: cuda:1 was lost: was killed by SIGKILL... (2h ago)",
        nagios="CONSISTENCY CRITICAL - cuda:1 was lost: was killed by SIGKILL... | age=7200s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_what_each_form_says(said: Said) -> None:
    made = status(said.found)
    forms: dict[Callable[[Status, float, float | None], str], str] = {
        text_line: said.text, nagios_line: said.nagios
    }  # fmt: skip
    for form, line in forms.items():
        assert form(made, 2 * HOUR, 26 * HOUR) == form(made, 2 * HOUR, None) == line
    assert state(made, stale=False) == said.word


@pytest.mark.parametrize("found", [good(), faulty()])
def test_a_stale_result_says_nothing_of_the_devices(found: Comparison) -> None:
    made = status(found)
    assert state(made, stale=True) == "UNKNOWN"
    assert text_line(made, 49 * HOUR, 26 * HOUR) == f"STALE llama: {found.verdict}, but older than 26h (2d ago)"
    unknown = f"CONSISTENCY UNKNOWN - {found.verdict}, but older than 26h"
    assert nagios_line(made, 49 * HOUR, 26 * HOUR).startswith(unknown)
    assert text_line(made, 49 * HOUR, None).startswith(found.verdict.upper())


def test_a_result_from_the_future_is_stale() -> None:
    assert not printed.is_stale(-299.0, HOUR)
    assert printed.is_stale(-301.0, HOUR)
    assert printed.is_stale(HOUR + 1, HOUR)
    assert not printed.is_stale(1e9, None)
    assert "dated in the future: check the clock" in text_line(status(good()), -HOUR, HOUR)


def test_an_unchecked_suite_says_nothing_of_the_devices() -> None:
    assert state(status(good(), verdict="unchecked", exit_status=2), stale=False) == "UNKNOWN"


def test_planted_faults_and_simulated_devices_are_said_first() -> None:
    made = status(faulty(), marks=("planted fault", "simulated"))
    assert text_line(made, 60.0, None).startswith("INCONSISTENT [planted fault] [simulated] llama: ")
    assert nagios_line(made, 60.0, None).startswith("CONSISTENCY CRITICAL - [planted fault] [simulated] adapter")


@pytest.mark.parametrize("age_s", [-1e9, 0.0, 59.0, 3600.0, 1e9])
@pytest.mark.parametrize("found", [hostile(), faulty(), good(), lost()], ids=["hostile", "faulty", "good", "lost"])
def test_no_line_is_longer_than_its_caller_takes(found: Comparison, age_s: float) -> None:
    for name in ("x", "long " * 30, "ü·→" * 20, "a\nb", HOSTILE):
        made = status(found, case=name, reason=f"{name}: {found.findings[0].message}" if found.findings else name)
        for line in (*(form(made, age_s, 1.0) for form in (text_line, nagios_line)),
                     *(form(made, age_s, None) for form in (text_line, nagios_line)),
                     *(no_result_line(name, form) for form in ("text", "nagios"))):  # fmt: skip
            assert len(line.encode()) <= MOST_BYTES
            assert re.fullmatch("[ -~]*", line)


def test_names_cannot_start_performance_data() -> None:
    made = status(lost(), reason="cuda:1 | ratio=0;;1")
    assert nagios_line(made, 0.0, None) == "CONSISTENCY CRITICAL - cuda:1 / ratio=0;;1 | age=0s findings=1"
    assert no_result_line("a|b", "nagios") == "CONSISTENCY UNKNOWN - a/b"


@pytest.mark.parametrize("ratio", [math.nan, math.inf])
def test_what_is_no_number_is_undetermined(ratio: float) -> None:
    assert "ratio=U;;1" in nagios_line(status(good(), ratio=Real(ratio)), 0.0, None)
