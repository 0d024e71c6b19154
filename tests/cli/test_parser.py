"""What the parser answers to what it does not know, and the examples at the end of every help."""

from __future__ import annotations

import argparse
import shlex

import pytest

from consistency.cli.main import build_parser
from consistency.errors import UsageError


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found.choices)


def examples(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Return the command lines at the end of a help text, each below the line that says what it does."""
    lines = parser.format_help().partition("\nexamples:\n")[2].splitlines()
    assert all(line.startswith("  # ") for line in lines[::2]), lines
    return [shlex.split(line.partition(" > ")[0]) for line in lines[1::2]]


@pytest.mark.parametrize(
    ("line", "what", "wanted", "hint"),
    [
        ("run --adaptor x", "consistency run has no option --adaptor", "", "did you mean --adapter?"),
        ("run --adaptor=x", "consistency run has no option --adaptor", "", "did you mean --adapter?"),
        ("run --allow_pickle", "consistency run has no option --allow_pickle", "", "did you mean --allow-pickle?"),
        ("devices --xyz", "consistency devices has no option --xyz", "--help, --json", "`consistency devices --help`"),
        ("devices x", "consistency devices takes no such argument: x", "", "`consistency devices --help`"),
    ],
)
def test_what_is_not_known_is_named_with_what_is(line: str, what: str, wanted: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_parser().parse_args(line.split())
    assert caught.value.what == what
    assert wanted in (caught.value.wanted or "")
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "names", "hint"),
    [
        ("rnu", ("COMMAND", "rnu", "run"), "`consistency --help`"),
        ("--xyz", ("COMMAND",), "`consistency --help`"),
        ("run --dtype float61", ("--dtype", "float61", "float16"), "`consistency run --help`"),
        ("run --repeat often", ("--repeat", "often"), "`consistency run --help`"),
        ("run --dtype", ("--dtype",), "`consistency run --help`"),
        ("compare", ("DIR",), "`consistency compare --help`"),
    ],
)
def test_what_argparse_refuses_is_said_in_its_words(line: str, names: tuple[str, ...], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_parser().parse_args(line.split())
    assert [name for name in names if name not in caught.value.what] == []
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("name", commands())
def test_each_help_has_examples_of_its_own(name: str) -> None:
    own = examples(commands()[name])
    assert own
    assert any(words[1] == name for words in own)
    others = {tuple(words) for other, parser in commands().items() if other != name for words in examples(parser)}
    assert not {tuple(words) for words in own if words[1] == name} & others


@pytest.mark.parametrize("name", commands())
def test_no_help_breaks_inside_a_word(name: str) -> None:
    room = 80 - 24 - 2  # of the column of texts
    words = [word for a in commands()[name]._actions if a.help not in (None, argparse.SUPPRESS)
             for word in str(a.help).replace("%%", "%").split()]  # fmt: skip
    assert [word for word in words if len(word) > room] == []


def test_the_usage_of_a_run_is_one_line_and_its_levels_name_their_stages() -> None:
    text = " ".join(commands()["run"].format_help().split())
    assert text.startswith("usage: consistency run [options] [CONFIG.toml] Check a case")
    assert (
        "standard (default, some minutes): also forward, gradient, memory; thorough (overnight): also sharding" in text
    )


def test_only_commands_that_take_a_suite_tell_of_suites() -> None:
    told = {name for name, parser in commands().items() for a in parser._actions
            if "--adapter" in a.option_strings and "suite" in str(a.help)}  # fmt: skip
    assert told == {"run", "capture"}


@pytest.mark.parametrize("name", ["", *commands()])
def test_examples_parse(name: str) -> None:
    for words in examples(commands()[name] if name else build_parser()):
        assert words[0] == "consistency"
        if words[-1] != "--help":
            build_parser().parse_args(words[1:])
