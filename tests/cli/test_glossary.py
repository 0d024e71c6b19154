"""Every word that a report can show has an entry with all fields, and no entry is without a word."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import get_args

import pytest

from consistency import plugins
from consistency.capture.adapter_remarks import AdapterFlaw
from consistency.capture.records import RecordStatus, WorkerStatus
from consistency.case.load_path import LoadPath
from consistency.case.stage import Level, Model, Stage
from consistency.case.stages import LEVELS, SPECS
from consistency.cli.glossary import GlossaryEntry, explained, glossary, known_words
from consistency.cli.main import build_parser
from consistency.cli.parser import OF_EVERY_COMMAND, statuses_by_command
from consistency.comparison import kinds
from consistency.comparison.kinds import SuiteVerdict
from consistency.comparison.outcomes import Status
from consistency.comparison.result import Severity, Verdict
from consistency.errors import UsageError
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.operations.history.changes import ChangeKind
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.numerics import words
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word

EXIT_STATUS = statuses_by_command(build_parser())

assert SPECS, "with them come the words that stages declare"
DECLARED = words.declared()

WORDS: dict[str, Iterable[str]] = {
    "word of a diagnosis": DECLARED,
    "kind of finding": {*kinds.declared()} | {*plugins.kinds()} - {*Cause, *MergeCause},
    "mistake of an inference engine": {*Cause, *TextCause},
    "mistake of a merge": MergeCause,
    "flaw of an adapter": AdapterFlaw,
    "verdict": {*get_args(Verdict), *get_args(SuiteVerdict)},
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


def entry_of(family: str, word: object) -> GlossaryEntry:
    (found,) = (entry for entry in explained(str(word)) if entry.family.name == family)
    return found


@pytest.mark.parametrize("word", DECLARED)
def test_a_word_has_its_phrases_of_moved_and_computed_tensors_and_of_copies(word: Word) -> None:
    computed = words.phrase_of(word, computed=True)
    phrases = [words.phrase_of(word).replace("{}", "tensors")]
    phrases += [f"of results: {computed}"] if computed != words.phrase_of(word) else []
    phrases += [f"copies that {words.of_copies(word)}"] if word not in words.of_copies(word) else []
    entry = entry_of("word of a diagnosis", word)
    assert (entry.headline, entry.summary) == (phrases[0], "; ".join(phrases))


ABOUT = {
    Cause.WEIGHTS: ("few bits", "few bits", "float8_e4m3fn by row"),
    Cause.ROTARY: (*["other rotary positions"] * 2, "rotary positions of base 10,000 (here 100,000)"),
    Cause.FREQUENCIES: ("a half type", "a half type", "bfloat16"),
}
"""What stands in a sentence for what a mistake is about, where that is no layer: in headline, meaning and example."""


@pytest.mark.parametrize("cause", Cause)
def test_a_mistake_of_an_engine_has_its_sentence_and_its_advice(cause: Cause) -> None:
    entry = entry_of("mistake of an inference engine", cause)
    headline, meaning, example = ABOUT.get(cause, ("layers or modules", "some layers", "layers 2–3"))
    assert entry.summary == cause.sentence(headline)
    assert entry.meaning.endswith(f": {cause.sentence(meaning)}.")
    assert entry.action == f"{cause.todo[0].upper()}{cause.todo[1:]}."
    assert entry.example.endswith(f": {cause.sentence(example)}")


@pytest.mark.parametrize("cause", TextCause)
def test_what_wrote_a_text_has_its_sentence_and_its_advice(cause: TextCause) -> None:
    entry = entry_of("mistake of an inference engine", cause)
    assert entry.summary.startswith("this text was written ")
    assert entry.action == f"{cause.todo[0].upper()}{cause.todo[1:]}."
    assert entry.example.startswith("written ")


@pytest.mark.parametrize("cause", MergeCause)
def test_a_mistake_of_a_merge_has_its_sentence_and_its_advice(cause: MergeCause) -> None:
    entry = entry_of("mistake of a merge", cause)
    assert cause.phrase == "{}" or entry.summary == cause.sentence("tensors")
    assert entry.action == f"{cause.todo[0].upper()}{cause.todo[1:]}."


@pytest.mark.parametrize("flaw", AdapterFlaw)
def test_a_flaw_of_an_adapter_has_its_advice(flaw: AdapterFlaw) -> None:
    assert entry_of("flaw of an adapter", flaw).action == f"{flaw.todo[0].upper()}{flaw.todo[1:]}."


@pytest.mark.parametrize("stage", SPECS)
def test_a_stage_has_its_kind_its_rule_and_its_levels(stage: Stage) -> None:
    spec = SPECS[stage]
    levels = ", ".join(spec.levels) or "none unless asked for"
    needs = "" if spec.model is Model.REQUIRED else "; it needs no model"
    facts = f" It {spec.kind.value}. Rule `{spec.rule}`; levels: {levels}{needs}."
    assert entry_of("stage", stage).meaning.endswith(facts)


@pytest.mark.parametrize("level", Level)
def test_a_level_has_its_stages_and_what_it_does_not_check(level: Level) -> None:
    plan = LEVELS[level]
    left = f" Not checked: {', '.join(plan.not_checked)}." if plan.not_checked else ""
    assert entry_of("level", level).meaning.endswith(f" Stages: {', '.join(plan.stages)}.{left}")


@pytest.mark.parametrize("status", sorted(WORDS["exit status"]))
def test_an_exit_status_has_its_meaning_to_each_command(status: str) -> None:
    assert entry_of("exit status", status).summary == "; ".join(meanings_of(int(status)))


def meanings_of(status: int) -> Iterator[str]:
    """Yield each meaning of a status with its commands."""
    if status in OF_EVERY_COMMAND:
        yield f"{OF_EVERY_COMMAND[status]} (every command)"
    commands: dict[str, list[str]] = {}
    for command, statuses in EXIT_STATUS.items():
        if status in statuses:
            commands.setdefault(statuses[status], []).append(command)
    for meaning, names in commands.items():
        others = [command for command in EXIT_STATUS if command not in names]
        which = f"every command but {', '.join(others)}" if len(names) > 8 else ", ".join(names)
        yield f"{meaning} ({which})"


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
