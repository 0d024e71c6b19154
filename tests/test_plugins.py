"""Extras are found and named nowhere; another distribution adds a command, a name and words, or costs itself alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import consistency
from consistency import plugins
from consistency.cli.main import COMMANDS, build_parser
from consistency.cli.parser import statuses_by_command

PLUGIN = """
import enum
from consistency.plugins import Plugin, Statement

class OurKind(enum.StrEnum):
    OURS = "of-our-own"

def say(comparison):
    return Statement(heading="OURS", sentence=f"{len(comparison.tensors)} tensors of ours")

def greet():
    return "hello from ours"

PLUGIN = Plugin(
    name="ours",
    commands={"greet": "ours.command"},
    kinds=("ours.plugin:OurKind",),
    statements={"our_files": "ours.plugin:say"},
    api={"greet": "ours.plugin"},
)
"""
COMMAND = """
def add(command):
    parser = command("greet", lambda _: print("hello from ours") or 0, "greet somebody", statuses={0: "greeted"})
    parser.add_argument("--loud", action="store_true", help="as loud as one can")
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Path:
    """Return a folder with an installed distribution that registers a plug-in."""
    package, info = tmp_path / "ours", tmp_path / "ours-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN)
    (package / "command.py").write_text(COMMAND)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[consistency.plugins]\nours = ours.plugin:PLUGIN\n")
    return tmp_path


def python(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script where a folder is on the path."""
    paths = [str(folder), str(Path(consistency.__file__).parents[1])]
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


CLI = "import sys; from consistency.cli.main import main; sys.exit(main({words!r}))"


def test_every_command_is_of_the_frame_or_of_one_extra() -> None:
    of_frame = [name for names in COMMANDS.values() for name in names]
    of_extras = [name for plugin in plugins.own() for name in plugin.commands]
    assert {"check-merged", "diff", "check-text", "inputs", "engine"} <= {*of_extras}
    assert sorted([*of_frame, *of_extras]) == sorted(statuses_by_command(build_parser()))


def test_the_names_of_extras_are_there_and_typed() -> None:
    for plugin in plugins.own():
        for name in plugin.api:
            assert name in consistency.__all__, "a name that type checkers do not know"
            assert getattr(consistency, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = consistency.no_such_name


def test_a_command_of_an_extra_is_built_alone() -> None:
    assert {*statuses_by_command(build_parser("check-merged"))} == {"check-merged"}


@pytest.mark.process
def test_finding_extras_imports_neither_torch_nor_what_lists_distributions(tmp_path: Path) -> None:
    done = python(tmp_path, """
        import sys
        from consistency import plugins
        assert {plugin.name for plugin in plugins.own()} >= {"merging", "peft_api", "serving"}
        plugins.commands(), list(plugins.kinds()), plugins.api()
        print(sorted({"torch", "importlib.metadata", "numpy"} & {*sys.modules}))
    """)  # fmt: skip
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.process
def test_a_distribution_adds_a_command_a_name_and_words(distribution: Path) -> None:
    done = python(distribution, CLI.format(words=["greet", "--loud"]))
    assert (done.returncode, done.stdout) == (0, "hello from ours\n"), done.stderr
    helped = python(distribution, CLI.format(words=["--help"]))
    assert "greet somebody" in helped.stdout
    assert "check-merged" in helped.stdout
    done = python(distribution, """
        import consistency
        from consistency import plugins
        from types import SimpleNamespace
        print(consistency.greet())
        print("of-our-own" in set(plugins.kinds()))
        print(plugins.statement_of(SimpleNamespace(load_paths=("our_files",), tensors=[1, 2])))
    """)  # fmt: skip
    assert done.stdout.splitlines() == [
        "hello from ours", "True", "Statement(sentence='2 tensors of ours', heading='OURS')",
    ]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("PLUGIN = 3", "TypeError: not a consistency.plugins.Plugin, but int"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_distribution_that_fails_costs_itself_alone_and_is_named(distribution: Path, content: str, said: str) -> None:
    (distribution / "ours" / "plugin.py").write_text(content)
    told = f"consistency: the plug-in ours of ours cannot be used: {said}\n"
    done = python(distribution, CLI.format(words=["--help"]))
    assert done.returncode == 0
    assert "check-merged" in done.stdout
    assert told in done.stderr
    done = python(distribution, CLI.format(words=["greet"]))
    assert done.returncode == 2
    assert told in done.stderr
    done = python(distribution, CLI.format(words=["explain", "merge-overflow"]))
    assert (done.returncode, done.stderr) == (0, ""), "and who does not need it is told nothing"


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("def add(command):\n    command('show', print, 'a name that is taken', statuses={0: 'shown'})", "conflicting"),
    ],
)
def test_a_command_that_fails_costs_itself_alone_and_is_named(distribution: Path, content: str, said: str) -> None:
    (distribution / "ours" / "command.py").write_text(content)
    done = python(distribution, CLI.format(words=["--help"]))
    assert done.returncode == 0
    assert "check-merged" in done.stdout
    assert "consistency: the command greet of ours.command cannot be used: " in done.stderr
    assert said in done.stderr
