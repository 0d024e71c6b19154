"""What one format of a report says, all say: the facts are derived from the comparison, and looked for in each."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from consistency.comparison import kinds
from consistency.comparison.result import Comparison, Finding, Status
from consistency.report import github, junit
from consistency.report import json as report_json
from consistency.report.documents import suite_document
from consistency.report.findings import findings_of, is_command
from consistency.report.formats import View
from consistency.report.html import as_html
from consistency.report.junit import suite_as_junit
from consistency.report.markdown import as_markdown
from consistency.workflows.report_folder import read_comparison, read_redacted
from tests.report.made_comparisons import ALL, comparison, tensor, worker
from tests.report.made_suites import case, suite
from tests.report.printed import printed, suite_as_html, suite_as_markdown
from tests.report.printed import printed as printed_suite

FOLDER = "out"


def everything() -> Comparison:
    """Return a comparison with a fact of every kind."""
    within: dict[str, Status] = {**dict.fromkeys(ALL, "within"), "cuda:1": "outside"}
    tensors = [
        tensor([ALL], stage="merged", layer=f"layers.{i}", tensor="weight", statuses=within, ratio=3.5) for i in (0, 1)
    ]
    tensors += [tensor([ALL], stage="memory", statuses=dict.fromkeys(ALL, "skipped"))]
    reason = "was killed by SIGKILL during merged"
    findings = (
        Finding(
            kind="wrong-scale", severity="error", message="merged · cuda:1 · values off by one constant factor",
            workers=("cuda:1",), tensors=tuple(one.name for one in tensors[:2]), load_paths=("isolated",),
            detail=("layers.0.weight[1, 2] · got 2, wanted 1", "layers.1.weight[0, 1] · got 4, wanted 2", "line 3"),
            next="consistency run --base ./my-base --devices cpu,cuda:1 --repeat 2",
        ),
        Finding(
            kind="lost-worker", severity="error", message=f"worker cuda:2 died: {reason}", workers=("cuda:2",),
            detail=("File a.py, line 1 in merge", "File b.py, line 2 in main"), next="check dmesg for the OOM killer",
        ),
        Finding(
            kind="stage-failed", severity="error", message="gradient · cuda:0 · backward fails: RuntimeError: in-place",
            workers=("cuda:0",), tensors=("gradient::layers.0.lora_A",), detail=("Traceback of the exception",),
        ),
        Finding(kind="tolerance", severity="warning", message="tolerance forward:*: atol=10 applied to 3 tensors"),
        Finding(kind="tolerance", severity="warning", message="tolerance base:*: matched nothing", next="leave it out"),
        *(
            Finding(kind="many", severity="warning", message=f"finding number {n}", detail=(f"its line {n}",))
            for n in range(4)
        ),
        Finding(
            kind=kinds.SKIPPED, severity="note",
            message="memory · 1 tensor skipped on cpu: this host does not tell",
            workers=("cpu",), tensors=("memory::layers.0.lora_B",), detail=("first seen in layers.0",),
        ),
        Finding(kind="planted", severity="note", message="the fault merge-off was planted in cuda:1 on purpose"),
    )  # fmt: skip
    lost = worker("cuda:2", status="lost", reason=reason, stack="File a.py, line 1 in merge")
    return comparison(
        tensors, verdict="incomplete", findings=findings, not_checked=("stage sharding", "copies of 256 MiB"),
        workers=(worker("cpu", "x86-64", environment={"torch": "2.13.0"}), worker("cuda:0"), worker("cuda:1"), lost),
    )  # fmt: skip


def facts_of(found: Comparison) -> Iterator[str]:
    """Yield each fact of a comparison, as its words."""
    for finding in findings_of(found, FOLDER):
        yield finding.message
        yield from finding.detail
        yield finding.next or ""
    yield from found.not_checked
    yield from (one.reason or "" for one in found.workers)
    yield from (one.model for one in found.workers)
    yield from (one.architecture for one in found.workers)


def as_text(found: Comparison) -> str:
    return printed(found, folder=FOLDER, width=400)


def as_issue(found: Comparison) -> str:
    return re.sub(r"\\(?=\W)", "", html.unescape(as_markdown(found, View(folder=FOLDER))))


def as_page(found: Comparison) -> str:
    return html.unescape(as_html(found, View(folder=FOLDER)))


def as_xml(found: Comparison) -> str:
    return _texts(junit.as_junit(found, folder=FOLDER))


def as_json(found: Comparison) -> str:
    """Return the texts of `report.json`, and what its figures and its place give: the worst elements, the commands."""
    table = json.loads(report_json.as_bytes(found))
    made = (text for one in findings_of(found, FOLDER) for text in (*one.detail, one.next or ""))
    named = ("worst layers.0.weight[1, 2]", "again: ", "consistency reproduce", "which setting: ")
    return "\n".join([*_strings(table), *(text for text in made if any(word in text for word in named))])


def _texts(root: ElementTree.Element) -> str:
    return "\n".join(text for one in root.iter() for text in (*one.attrib.values(), one.text or ""))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def on_github(found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the summary of the step: the log is what `as_text` has."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    b"".join(github.render(found, View(folder=FOLDER)))
    return re.sub(r"\\(?=\W)", "", html.unescape((tmp_path / "summary.md").read_text()))


FORMS = [as_text, as_issue, as_page, as_xml, as_json]


def missing(found: Comparison, text: str) -> list[str]:
    """Return the facts that a text does not have; blanks do not count."""
    flat = " ".join(text.split())
    return [fact for fact in facts_of(found) if " ".join(fact.split()) not in flat]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_every_fact(form: Callable[[Comparison], str]) -> None:
    assert len([*facts_of(everything())]) > 30
    assert missing(everything(), form(everything())) == []


def test_the_summary_on_github_says_every_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(everything(), on_github(everything(), tmp_path, monkeypatch)) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_fact_that_is_left_out_is_seen(form: Callable[[Comparison], str]) -> None:
    """Prove that the tests above can fail."""
    found = everything()
    kinds = [("findings", found.findings[:-1]), ("not_checked", ()), ("findings", found.findings[1:])]
    for field, less in kinds:
        assert missing(found, form(msgspec.structs.replace(found, **{field: less})))


@pytest.mark.parametrize("form", FORMS)
def test_redaction_takes_names_and_leaves_facts(form: Callable[[Comparison], str], tmp_path: Path) -> None:
    found = everything()
    secret = "/home/alice-secret/base"
    first, *others = found.findings
    first = msgspec.structs.replace(first, next=f"consistency run --base {secret} --repeat 2")
    found = msgspec.structs.replace(found, findings=(first, *others), base=secret)
    (tmp_path / "report.json").write_bytes(report_json.as_bytes(found))
    assert read_comparison(tmp_path)[0].findings == found.findings
    redacted, _ = read_redacted(tmp_path)
    text = form(redacted)
    assert "alice" not in text
    assert missing(redacted, text) == []
    assert missing(found, text), "the path is gone"


def test_every_form_of_a_suite_says_the_findings_of_its_cases() -> None:
    """But for the commands in XML, whose findings are those of the cases."""
    made = suite(case("alice", everything()))
    found = [entry.finding for entry in suite_document(made, View(folder=FOLDER)).entries]
    facts = [text for one in found for text in (one.message.removeprefix("case alice · "), *one.detail, one.next or "")]
    assert len(facts) > 20
    page, issue = suite_as_html(made, FOLDER), suite_as_markdown(made, FOLDER)
    forms = {
        "text": printed_suite(made, width=400, folder=FOLDER), "page": html.unescape(page),
        "issue": re.sub(r"\\(?=\W)", "", html.unescape(issue)), "xml": _texts(suite_as_junit(made)),
    }  # fmt: skip
    for name, text in forms.items():
        flat = " ".join(text.split())
        left = [one for one in facts if " ".join(one.split()) not in flat]
        assert [one for one in left if name != "xml" or not is_command(one)] == [], name
