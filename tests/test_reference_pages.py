"""The reference pages are those that the code makes, and say something of everything that they list."""

from __future__ import annotations

import re

import pytest

import consistency
from benchmarks.reference_pages import DOCS, PAGES, text_of
from benchmarks.reference_pages.fields import meanings, type_text
from benchmarks.reference_pages.markdown import prose
from consistency.case.options import OPTIONS
from consistency.cli.main import build_parser
from consistency.cli.parser import statuses_by_command
from consistency.comparison.outcomes import Judgement, Outcome
from consistency.report.json import schema
from tests.versions import made_with_constraints


@made_with_constraints
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    current = (DOCS / name).read_text(encoding="utf-8")
    assert current == text_of(name), "run: python -m benchmarks.reference_pages --write"


@pytest.mark.parametrize("name", ["report-format.md", "capture-format.md"])
def test_every_field_has_a_meaning(name: str) -> None:
    lines = text_of(name).splitlines()
    assert [line for line in lines if re.fullmatch(r"\| `.*` \| .* \|\s*\|", line)] == []


def test_the_site_has_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    reference = index[index.index(":caption: Reference") :].partition("```")[0]
    listed = re.findall(r"^[a-z-]+$", reference, re.MULTILINE)
    assert sorted(listed) == sorted(["glossary", *(name[:-3] for name in PAGES)])


def test_nothing_is_left_out() -> None:
    texts = {name: text_of(name) for name in PAGES}
    listed = {
        "commands.md": [f"## consistency {command}\n" for command in statuses_by_command(build_parser())],
        "options.md": [f"\n| TOML | `{option.name} = " for option in OPTIONS],
        "report-format.md": [f"\n| `{field}` | " for field in schema()["$defs"]["ReportFile"]["properties"]],
        "capture-format.md": ["## capture.json: ", "## worker.json: ", "## records.jsonl: ", "## events.jsonl: "],
        "api.md": [f"`{name}`" for name in consistency.__all__],
    }
    assert {name: [text for text in wanted if text not in texts[name]] for name, wanted in listed.items()} == {
        name: [] for name in PAGES
    }


def test_fields_have_the_meanings_of_their_docstrings_and_of_their_bases() -> None:
    assert meanings(Judgement)["max_ulp"] == "The largest difference in units in the last place of the dtype."
    assert (
        meanings(Outcome)["max_abs"]
        == meanings(Outcome)["rms"]
        == "Figures of the difference from the reference, in the tensor's own unit."
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"type": "string"}}, "list of string"),
        ({"anyOf": [{"$ref": "#/$defs/Finding"}, {"type": "null"}]}, "[Finding](#finding) or null"),
        ({"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}, "number, `nan`, `inf` or `-inf`"),
        ({"enum": ["ok", ""]}, '`ok` or `""`'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "object of integer"),
        ({}, "any"),
    ],
)
def test_types_are_words(schema: dict[str, object], text: str) -> None:
    assert type_text(schema) == text


def test_what_markdown_would_read_is_escaped_outside_of_code() -> None:
    assert prose("*a* <b> [c] $d$ `*e*` ``f``") == r"\*a\* \<b\> \[c\] \$d\$ `*e*` `f`"
