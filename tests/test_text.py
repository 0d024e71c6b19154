"""What a foreign name may contain where it is shown: no control, no line of its own, no command, no credential."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from consistency.capture import origin
from consistency.cli.main import main
from consistency.comparison.result import Finding
from consistency.errors import InputError
from consistency.report.json import as_bytes
from consistency.text import clean, one_line, without_credentials
from tests.conftest import Cli
from tests.report.made_comparisons import comparison, tensor

NASTY = "x\n  CONSISTENT   all is well\n::error file=x::pwn\n  ::stop-commands::y\x1b[31m##[error]z"


def test_a_name_makes_no_line_and_no_command_of_a_log() -> None:
    shown = one_line(NASTY)
    assert "\n" not in shown
    assert "\x1b" not in shown
    assert "##[" not in shown
    assert one_line("::error::x").startswith("\\x3a:")
    assert one_line("  ::error::x").lstrip().startswith("\\x3a:")
    assert one_line("adapter::model.layers.0") == "adapter::model.layers.0"


def test_a_text_of_ours_keeps_its_lines_and_obeys_nothing() -> None:
    assert clean("a\nb") == "a\nb"
    assert not any(line.lstrip().startswith("::") for line in clean(NASTY).splitlines())


def test_an_error_is_no_place_for_lines_of_a_name() -> None:
    lines = str(InputError(NASTY, where=NASTY, got=NASTY, hint=NASTY)).splitlines()
    assert len(lines) == 4
    assert [line.split()[0] for line in lines[1:]] == ["where:", "got:", "hint:"]


@pytest.mark.parametrize("columns", ["40", "80", "140"])
@pytest.mark.parametrize("arguments", [(), ("--verbose",), ("--finding", "1"), ("--layers",)], ids=" ".join)
def test_no_report_is_folded_into_a_command_or_a_verdict(
    arguments: tuple[str, ...], columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name = "q" + " ::error file=x::pwn" * 12 + "z" * 150 + "::error file=x::pwn" * 20 + " CONSISTENT   all is well" * 20
    worst = Finding(kind="mismatch", severity="error", message=name, detail=(name,), workers=(name,), next=name)
    bad = tensor([["cpu"], ["cuda:0"]], layer=name, tensor=name, statuses={"cuda:0": "outside"})
    found = comparison(
        [bad], case=name, base=name, host=name, findings=(worst,), created=name, command=("consistency", "run", name),
    )  # fmt: skip
    (tmp_path / "report.json").write_bytes(as_bytes(found))
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["show", str(tmp_path), *arguments]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert any("\\x3a:error" in line for line in lines)
    assert [line for line in lines if line.lstrip().startswith("::")] == []
    assert len({line for line in lines if re.match(" {0,2}(?:IN)?CONSISTENT ", line)}) <= 1, "the verdict, repeated"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("memory://AKIA:SECRETTOK@bucket/h", "memory://bucket/h"),
        ("--history=s3://AKIA:SEC/RET+=@bucket/h?token=t", "--history=s3://bucket/h"),
        ("https://user@host/x#secret", "https://host/x"),
        ("cannot read https://a:b@c/d?e: no", "cannot read https://c/d no"),
        ("https://user:a/b@c@host/x", "https://host/x"),
        ("https://user:a?b#c@host/x", "https://host/x"),
        ("filecache::s3://AKIA:KEY@bucket/h", "filecache::s3://bucket/h"),
        ("s3://bucket/run/1", "s3://bucket/run/1"),
        ("/home/me/x?y", "/home/me/x?y"),
        ("python:module:function", "python:module:function"),
    ],
)
def test_urls_are_shown_without_credentials(given: str, shown: str) -> None:
    assert without_credentials(given) == shown


def test_a_command_is_recorded_without_credentials(cli_here: Cli, tmp_path: Path) -> None:
    url = "memory://AKIA:SECRETTOK@bucket/h?key=SECRETTOK"
    with origin.running(["consistency", "run", "--history", url]):
        assert origin.command() == ("consistency", "run", "--history", "memory://bucket/h")
    run = ("run", "--devices", "cpu", "--stages", "base", "--history", url, "--out", tmp_path / "out")
    done = cli_here(*run)
    assert done.returncode == 0, done.stderr
    texts = [file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert not any(b"SECRETTOK" in text for text in texts)
    assert "SECRETTOK" not in done.stdout + done.stderr


def test_an_error_within_an_error_is_on_one_line() -> None:
    inner = InputError("no such folder", where="./gone", hint="check the path")
    assert str(InputError("cannot check", got=inner)).splitlines() == [
        "cannot check", "  got:    no such folder; where:  ./gone; hint:   check the path",
    ]  # fmt: skip
