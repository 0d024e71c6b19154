"""The page of a suite without a browser."""

from __future__ import annotations

import re

import jinja2
import pytest

from consistency.report import html as report_html
from tests.report.made_comparisons import HOSTILE, SAFE, hostile
from tests.report.made_suites import case, good, many, suite, unusable, zeros
from tests.report.parsed_page import Page
from tests.report.printed import suite_as_html


def test_one_row_per_case_with_a_link_to_its_report() -> None:
    page = Page(suite_as_html(suite(case("alice", good()), case("bob", zeros(3)), unusable("gone"))))
    assert "INCONSISTENT 1 of 3 cases is inconsistent, 1 could not be checked and 1 is consistent" in page.text
    assert "cases/alice/report.html" in page.links()
    assert "cases/bob/report.html" in page.links()
    assert "cases/gone/report.html" not in page.links(), "it has no report"
    assert page.text.index("mismatch in 3 of 3 tensors") < page.text.index("alice"), "what failed comes first"
    assert "no such folder for the adapter" in page.text


def test_many_consistent_cases_are_folded() -> None:
    few = Page(suite_as_html(suite(*(case(f"{i}", good()) for i in range(5)))))
    assert "details" not in [tag for tag, _ in few.elements]
    page = Page(suite_as_html(many(), "run"))
    assert "41 of 100 cases consistent" in page.text
    assert page.text.count("mismatch in") == 57
    assert page.text.index("lora-096") > page.text.index("41 of 100 cases consistent")
    assert "56 of 100 cases · adapter · cuda:1 · zeros where the file is nonzero in lora_B tensors" in page.text
    assert "consistency reproduce run/cases/lora-000 --finding 1 --out repro" in page.text


def test_it_fetches_nothing_and_has_no_script() -> None:
    page = Page(suite_as_html(many()))
    (policy,) = [of["content"] for tag, of in page.elements if of.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe"}


def test_hostile_names_stay_text() -> None:
    name = "javascript:alert(1)//\u2028\"'>{{7*7}}"
    page = Page(suite_as_html(suite(case(name, hostile()), case(HOSTILE, hostile()))))
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert SAFE in page.text
    assert "49" not in page.text.replace("{{7*7}}", "")
    inside = re.compile(r"cases/.*|#findings|#finding-\d+")
    assert all(link is not None and inside.fullmatch(link) for link in page.links())
    assert not re.search("[\u2028\u202e]", "".join(page.texts))


def test_without_escaping_the_names_break_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    plain = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **of: plain(**{**of, "autoescape": False}))
    for name in ("_template", "_environment"):
        monkeypatch.setattr(report_html, name, getattr(report_html, name).__wrapped__)
    assert "img" in [tag for tag, _ in Page(suite_as_html(suite(case(HOSTILE, hostile())))).elements]


def test_a_thousand_cases_stay_a_page() -> None:
    assert len(suite_as_html(suite(*(case(f"case-{i}", zeros(2)) for i in range(1000)))).encode()) < 2_000_000
