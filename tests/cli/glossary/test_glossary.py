"""Every word that a report can show has an entry with all fields, and no entry is without a word."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import get_args

import pytest

from consistency.capture.engine_causes import Cause
from consistency.capture.records import RecordStatus, WorkerStatus
from consistency.case.load_path import LoadPath
from consistency.case.stages import SPECS, Level
from consistency.cli.exit_status import EXIT_STATUS, OF_EVERY_COMMAND
from consistency.cli.glossary import GlossaryEntry, explained, glossary, known_words
from consistency.comparison.history.changes import ChangeKind
from consistency.comparison.kinds import FindingKind
from consistency.comparison.outcomes import Status
from consistency.comparison.result import Severity, Verdict
from consistency.errors import UsageError
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word
from consistency.report.status.record import StatusVerdict

WORDS: dict[str, Iterable[str]] = {
    "word of a diagnosis": Word,
    "kind of finding": FindingKind,
    "mistake of an inference engine": Cause,
    "verdict": {*get_args(Verdict), *get_args(StatusVerdict)},
    "severity of a finding": get_args(Severity),
    "status of a row": {*get_args(Status), *get_args(RecordStatus)},
    "outcome of a worker": get_args(WorkerStatus),
    "stage": SPECS,
    "rule": Rule,
    "level": Level,
    "load path": LoadPath,
    "change in a history": ChangeKind,
    "exit status": {str(status) for statuses in (*EXIT_STATUS.values(), OF_EVERY_COMMAND) for status in statuses},
}
"""What may be shown, by the name of its family."""


@pytest.mark.parametrize("family", WORDS)
def test_every_word_has_an_entry_and_every_entry_a_word(family: str) -> None:
    listed = [entry.word for entry in glossary() if entry.family.name == family]
    assert sorted(listed) == sorted(map(str, WORDS[family]))


def test_there_is_no_other_family() -> None:
    assert {entry.family.name for entry in glossary()} == {*WORDS}


@pytest.mark.parametrize("entry", glossary(), ids=lambda entry: f"{entry.family.name}-{entry.word}")
def test_an_entry_is_complete(entry: GlossaryEntry) -> None:
    texts = {
        field.name: getattr(entry, field.name) for field in dataclasses.fields(entry) if field.name not in ("family",)
    }
    assert [name for name, text in texts.items() if not text.strip() or text != text.strip()] == []
    assert len(entry.headline) <= 110, "a line of the list"
    for text in (entry.meaning, entry.cause, entry.action):
        assert text.endswith("."), text
        assert ".." not in text
        assert not re.search(r"  |{}", text)


def test_words_in_backquotes_are_words_settings_or_commands() -> None:
    """A word that an entry refers to can be looked up."""
    code = {"weight = weight + delta", ".clone()", ".half()", "__getattr__", "base_model.model.", "cuda:0@tf32"}
    details = {"holds …", "…× the reference", "could also be", "digest_only"}
    values = {"meta", "deployed", "auto", "status"}
    for entry in glossary():
        for text in re.findall(r"`([^`]+)`", f"{entry.meaning} {entry.cause} {entry.action}"):
            is_known = text in known_words() or text in code | details | values
            assert is_known or text.startswith(("consistency ", "--")) or text == "low_cpu_mem_usage", (
                entry.word,
                text,
            )


def test_a_word_of_several_families_has_an_entry_of_each() -> None:
    assert [entry.family.name for entry in explained("drift")] == [
        "word of a diagnosis",
        "kind of finding",
        "change in a history",
    ]


@pytest.mark.parametrize("written", ["wrong-scale", "WRONG_SCALE", " Wrong-Scale "])
def test_a_word_is_found_however_it_is_written(written: str) -> None:
    assert [entry.word for entry in explained(written)] == ["wrong-scale"]


def test_an_unknown_word_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError) as raised:
        explained("wrong-scael")
    assert raised.value.hint == "did you mean wrong-scale?"
    with pytest.raises(UsageError) as raised:
        explained("qqqqqq")
    assert raised.value.hint == "`consistency explain` lists all words"
