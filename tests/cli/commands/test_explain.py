"""`consistency explain` as a user calls it."""

from __future__ import annotations

import json

import pytest

from consistency.cli.glossary import glossary
from consistency.cli.main import main


def test_a_word_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "wrong-scale", "3"]) == 0
    printed = capsys.readouterr().out
    assert "wrong-scale · word of a diagnosis\n  values off by one constant factor\n" in printed
    assert "3 · exit status\n  incomplete (a worker was lost) (run, capture, compare, doctor, fleet);" in printed
    assert [printed.count(f"\n  {label} ") for label in ("meaning", "cause", "what to do", "example")] == [2] * 4
    assert max(map(len, printed.splitlines())) <= 80


def test_without_a_word_every_word_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = {entry.family.title for entry in glossary()}
    listed = [line.split()[0] for line in lines if line and line not in titles]
    assert listed == [entry.word for entry in glossary()]
    assert titles <= {*lines}


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "zeros", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert list(entry) == ["word", "family", "summary", "meaning", "cause", "action", "example", "known"]
    (fault,) = entry["known"]
    assert "A merge into a parametrized weight is lost" in fault
    assert (entry["word"], entry["family"]) == ("zeros", "word of a diagnosis")


def test_a_word_that_entries_only_mention_leads_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "KV cache"]) == 2
    assert "these have to do with it: forward" in capsys.readouterr().err


def test_an_unknown_word_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "wrong_scael"]) == 2
    assert "did you mean wrong-scale?" in capsys.readouterr().err
