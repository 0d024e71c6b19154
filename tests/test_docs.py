"""The documents name files, links, commands and options that exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.capture.version import __version__
from consistency.case.options import Edge
from consistency.case.reading import read_options
from consistency.case.suite import gather_suite
from consistency.cli.main import build_parser
from consistency.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "fixtures/README.md",
    "tests/accelerator/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)

OUTSIDE = {"my_wrapper.py", "test_adapter.py"}
"""What a document asks its reader to write."""

_FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:pyi?|c|cpp|js|css))\b")
_SEPARATORS = {"|", "||", "&&", ";", ">", "2>&1", "#"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(_FENCE.sub("", text)))
    return {title.replace(" ", "-") for title in titles}


def missing_links(document: str, text: str) -> list[str]:
    found = []
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / document).parent / name) if name else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def missing_files(document: str, text: str) -> list[str]:
    """Return the modules that are named in prose and are not in the repository.

    A name is relative to the root, to the package, or to the document's folder.
    """
    places = (ROOT, ROOT / "consistency", (ROOT / document).parent)
    named = [name for span in _SPAN.findall(_FENCE.sub("", text)) for name in _FILE.findall(span)]
    return [name for name in named if name not in OUTSIDE and not any((place / name).exists() for place in places)]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every `consistency …` command line, in code blocks and in code spans."""
    for _, block in _FENCE.findall(text):
        joined = re.sub(r"\\\n\s*|\n\s+(?=--)", " ", block)  # continued by a backslash, or folded in YAML
        for line in joined.splitlines():
            yield from _commands_of(line)
    for span in _SPAN.findall(_FENCE.sub("", text)):
        yield from _commands_of(span)


def _commands_of(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose or output with an apostrophe
        return
    first = True
    for at, word in enumerate(words):
        if " " in word.strip() and word.startswith("consistency "):  # bash -c '…'
            yield from _commands_of(word)
        elif word.endswith("bin/consistency") or (first and word == "consistency"):
            rest = words[at + 1 :]
            stop = next((n for n, w in enumerate(rest) if w in _SEPARATORS), len(rest))
            if rest and re.fullmatch(r"[a-z]+", rest[0]) and rest[1:2] != ["·"]:  # otherwise output
                yield rest[:stop]
        first = word in ("&&", "||", ";", "$")


def refused(arguments: list[str]) -> str | None:
    """Parse a command line without running it; return why it is refused."""
    if len(arguments) == 1 or (arguments[0] == "baseline" and len(arguments) == 2):
        arguments = [*arguments, "--help"]  # a command that is only mentioned
    try:
        build_parser().parse_args(arguments)
    except SystemExit as done:
        return f"exit status {done.code}" if done.code else None
    except UsageError as error:
        return str(error)
    return None


def pytest_options(block: str) -> dict[str, object] | None:
    """Return the options of a `pyproject.toml` for pytest, None for another file."""
    found: dict[str, object] | None = tomllib.loads(block).get("tool", {}).get("pytest", {}).get("ini_options")
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_files_exist(document: str) -> None:
    text = text_of(document)
    assert missing_links(document, text) == []
    assert missing_files(document, text) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_parse(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(document)
    if document == "docs/extending.md":  # its recipes add what they use; `test_recipes.py` runs them
        text = re.sub(r"^\$ .*$", "", text, flags=re.MULTILINE)
    problems = {shlex.join(words): why for words in commands(text) if (why := refused(words)) is not None}
    assert problems == {}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_option_files_and_pytest_options_are_known(document: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    text = text_of(document)
    for number, block in enumerate(block for language, block in _FENCE.findall(text) if language == "toml"):
        if (options := pytest_options(block)) is not None:
            assert all(pytestconfig.getini(name) is None for name in options), "known; this project sets none"
            continue
        path = tmp_path / f"{number}.toml"
        path.write_text(block, encoding="utf-8")
        if gather_suite(path, {"adapter": "./my-lora"}, Edge.TOML) is None:  # patterns match nothing here
            read_options(path)
    for name in re.findall(r"--consistency-[a-z-]*[a-z]", text):
        pytestconfig.getoption(name)


def test_mistakes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "# A title, of sorts\n`consistency run --no-such-option` and `launch/no_such.py` and `no_such.py`\n"
        "[a](no_such.md) [b](#a-title-of-sorts) [c](#no-such)\n"
        "```\nconsistency no-such-command x\nconsistency nothing x && consistency devices --wrong   # comment\n"
        "srun bash -c \\\n    'consistency capture --nothing'\n```\n"
    )
    assert anchors(text) == {"a-title-of-sorts"}
    assert missing_links("README.md", "[a](no_such.md) [b](#tests) [c](#no-such)") == ["no_such.md", "#no-such"]
    assert missing_files("README.md", text) == ["launch/no_such.py", "no_such.py"]
    found = list(commands(text))
    assert found == [["nothing", "x"], ["devices", "--wrong"], ["capture", "--nothing"], ["run", "--no-such-option"]]
    assert all(refused(words) for words in found)


def test_the_readme_has_commands() -> None:
    assert len(list(commands(text_of("README.md")))) > 15


@pytest.mark.process
def test_the_readmes_test_runs_as_it_stands(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for _, block in _FENCE.findall(text_of("README.md")):
        if named := re.match(r"# (pyproject\.toml|test_adapter\.py)\n", block):
            (pytester.path / named[1]).write_text(block, encoding="utf-8")
    assert {path.name for path in pytester.path.iterdir()} == {"pyproject.toml", "test_adapter.py"}
    done = pytester.runpytest_subprocess("--strict-markers", "--strict-config", "--consistency-devices=cpu")
    done.assert_outcomes(passed=1)
    assert (pytester.path / ".pytest_cache").is_dir()


def test_the_changelog_has_the_version_and_says_when() -> None:
    headings = re.findall(r"^## (.+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
