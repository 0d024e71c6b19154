"""The documents name files, links, commands and options that exist."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from consistency.capture.version import __version__
from consistency.case.load_path import LoadPath
from consistency.case.options import Edge
from consistency.case.reading import read_options
from consistency.case.stage import Level
from consistency.case.stages import LEVELS, SPECS, run_order
from consistency.case.suite import gather_suite
from consistency.numerics.rules import FALSE_ALARM, HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF, error_factor
from consistency.stages.operators.table import operations
from tests.documents import FENCE, SPAN, commands, refused

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "fixtures/README.md",
    "tests/accelerator/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)

OUTSIDE = {"my_wrapper.py", "test_adapter.py", "models/modeling.py", "llama.cpp"}
"""What a document asks its reader to write, files of an example, and an engine whose name looks like a file."""

GENERATED = {
    "docs/api.md",
    "docs/blind-spots.md",
    "docs/capture-format.md",
    "docs/commands.md",
    "docs/coverage.md",
    "docs/faults-by-architecture.md",
    "docs/faults-by-method.md",
    "docs/glossary.md",
    "docs/options.md",
    "docs/performance.md",
    "docs/report-format.md",
    "docs/sensitivity.md",
}
"""Pages that a benchmark writes, as long as what it finds, and the glossary, in which a word is looked up."""

MOST_LINES = 250

FOREIGN_WORDS = re.compile(r"\b(?:roads?|boxes|nights|mend(?:s|ed|ing)?)\b", re.IGNORECASE)
"""Words of early drafts for a load path, hosts, runs and a fix."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:pyi?|c|cpp|js|css))\b")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def prose_of(document: str) -> str:
    """Return the text of a document without its code blocks and code spans."""
    return SPAN.sub("", FENCE.sub("", text_of(document)))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(FENCE.sub("", text)))
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
    named = [name for span in SPAN.findall(FENCE.sub("", text)) for name in _FILE.findall(span)]
    return [name for name in named if name not in OUTSIDE and not any((place / name).exists() for place in places)]


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
    if document.startswith("docs/extending"):  # the recipes add what they use; `test_recipes.py` runs them
        text = re.sub(r"^\$ .*$", "", text, flags=re.MULTILINE)
    problems = {shlex.join(words): why for words in commands(text) if (why := refused(words)) is not None}
    assert problems == {}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_option_files_and_pytest_options_are_known(document: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    text = text_of(document)
    for number, block in enumerate(block for language, block in FENCE.findall(text) if language == "toml"):
        if (options := pytest_options(block)) is not None:
            assert all(pytestconfig.getini(name) is None for name in options), "known; this project sets none"
            continue
        path = tmp_path / f"{number}.toml"
        path.write_text(block, encoding="utf-8")
        if gather_suite(path, {"adapter": "./my-lora"}, Edge.TOML) is None:  # patterns match nothing here
            read_options(path)
    for name in re.findall(r"--consistency-[a-z-]*[a-z]", text):
        pytestconfig.getoption(name)


def test_a_page_is_read_in_one_sitting() -> None:
    pages = [document for document in DOCUMENTS if document.startswith("docs/")]
    long = {document for document in pages if len(text_of(document).splitlines()) > MOST_LINES}
    assert long - GENERATED == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_thing_has_one_word(document: str) -> None:
    assert FOREIGN_WORDS.findall(prose_of(document)) == []


def rows_of(document: str, section: str) -> list[list[str]]:
    """Return the cells of the tables of a section, heads and rules left out."""
    (text,) = re.findall(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", text_of(document), re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {place for place, line in enumerate(lines) if not line.strip("|-")}
    kept = (line for place, line in enumerate(lines) if not {place, place + 1} & rules)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def test_the_stages_are_those_of_the_code() -> None:
    rows = rows_of("docs/stages.md", "Stages")
    by_name = {name: row for row in rows if (name := row[0].split("`")[1])}
    order = [spec.stage for spec in run_order(SPECS, sees_others=False)]
    assert list(by_name) == [*order, *Level]
    for stage, spec in SPECS.items():
        first = spec.levels[0] if spec.levels else "–"
        assert by_name[stage][3].partition(",")[0] == first
        assert str(spec.rule) in by_name[stage][2]
    for level, plan in LEVELS.items():
        _, inputs, again, safe, runs, _ = by_name[level]
        assert inputs == f"{plan.sequences} × {plan.tokens}"
        assert again.startswith("over NaN") == plan.reload
        assert not plan.sides or str(len(plan.sides)) in again
        assert (safe, runs) == ("yes" if plan.safe_merge else "no", str(plan.repeat))
    counts = [len(operations(level)) for level in (Level.STANDARD, Level.THOROUGH, Level.QUICK)]
    figures = "{} operations on NumPy-generated inputs ({} at `thorough`, {} at `quick`)"
    assert figures.format(*counts) in text_of("docs/stages.md")


def test_the_figures_of_tolerances_are_those_of_the_code() -> None:
    units, subnormals = rows_of("docs/tolerances.md", "Unit roundoff")
    exponents = [int(re.findall(r"-(\d+)", cell)[0]) for cell in units[1:]]
    assert [2.0**-n for n in exponents] == list(UNIT_ROUNDOFF.values())
    least = [2.0 ** -int(re.findall(r"-(\d+)", cell)[0]) for cell in subnormals[1:]]
    assert least == list(HALF_SMALLEST_SUBNORMAL.values())
    for n, m, factor in rows_of("docs/tolerances.md", "The factor"):
        assert f"{error_factor(int(n.split()[0]), int(m.split()[0])):.1f}" == factor
    assert f"10^{{{math.log10(FALSE_ALARM):.0f}}}" in text_of("docs/tolerances.md")
    assert f"There are {len(LoadPath)}." in text_of("docs/load-paths.md")


def test_mistakes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "# A title, of sorts\n`consistency run --no-such-option` and `launch/no_such.py` and `no_such.py`\n"
        "[a](no_such.md) [b](#a-title-of-sorts) [c](#no-such)\n"
        "```\nconsistency no-such-command x\nconsistency nothing x && consistency devices --wrong   # comment\n"
        "srun bash -c \\\n    'consistency capture --nothing'\n```\n"
    )
    assert anchors(text) == {"a-title-of-sorts"}
    assert missing_links("README.md", "[a](no_such.md) [b](#develop) [c](#no-such)") == ["no_such.md", "#no-such"]
    assert missing_files("README.md", text) == ["launch/no_such.py", "no_such.py"]
    found = list(commands(text))
    assert found == [["nothing", "x"], ["devices", "--wrong"], ["capture", "--nothing"], ["run", "--no-such-option"]]
    assert all(refused(words) for words in found)


def test_commands_are_found() -> None:
    assert len(list(commands(text_of("README.md")))) > 10
    assert sum(len(list(commands(text_of(document)))) for document in DOCUMENTS) > 150


@pytest.mark.slow
@pytest.mark.process
def test_the_test_in_the_page_on_pytest_runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for _, block in FENCE.findall(text_of("docs/pytest.md")):
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
