"""Extras are found and named nowhere; another distribution adds a command, a name and words, or costs itself alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import consistency
from benchmarks.extras_index import FILES, FOLDER
from consistency import plugins
from consistency.case import preflight, reading
from consistency.case.options import Options
from consistency.case.reading import make_options
from consistency.case.stages import SPECS
from consistency.cli.main import COMMANDS, build_parser, main
from consistency.cli.parser import statuses_by_command
from consistency.errors import UsageError
from consistency.workflows.past import NO_PAST, opened_past

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
            assert name in consistency.__all__
            assert getattr(consistency, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = consistency.no_such_name  # type: ignore[attr-defined]


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
    done = python(distribution, CLI.format(words=["show", "--help"]))
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


# --- an extra that is not installed -----------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that takes an extra away."""

    def take(name: str) -> None:
        rest = tuple(plugin for plugin in plugins.own() if plugin.name != name)
        monkeypatch.setattr(plugins, "own", lambda: rest)
        plugins.absent.cache_clear()

    yield take
    plugins.absent.cache_clear()


@pytest.mark.parametrize("name", FILES)
def test_what_extras_add_is_written_down(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == FILES[name](), "run: python -m benchmarks.extras_index --write"


def test_nothing_is_absent_here() -> None:
    assert [plugins.absent(part) for part in ("commands", "stages", "options", "api")] == [{}] * 4


@pytest.mark.parametrize("command", ["check-merged", "diff"])
def test_a_command_of_an_absent_extra_is_named(
    without: Callable[[str], None], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    without("merging")
    assert main([command, "a", "b"]) == 2
    said = capsys.readouterr().err
    assert f"consistency {command} is a part of the extra merging, which is not installed here" in said
    assert "pip install" in said
    assert f"    {command} " not in build_parser().format_help()


def test_a_name_of_an_absent_extra_is_named(without: Callable[[str], None]) -> None:
    without("merging")
    with pytest.raises(AttributeError, match=r"consistency\.diff is a part of the extra merging, which is not inst"):
        consistency.diff  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        consistency.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("extra", "option"),
    [("training", "steps"), ("operations", "soak"), ("peft_api", "wrapper"), ("serving", "engine_outputs")],
)
def test_an_option_of_an_absent_extra_is_refused_and_not_ignored(
    without: Callable[[str], None], extra: str, option: str
) -> None:
    given = {"steps": 3, "soak": 60.0, "wrapper": "python:a:b", "engine_outputs": ("vllm=a.safetensors",)}
    options = dataclasses.replace(Options(base="builtin:llama"), **{option: given[option]})  # type: ignore[arg-type]
    without(extra)
    with pytest.raises(UsageError, match=f"is a part of the extra {extra}, which is not installed here"):
        preflight.prepare_case(options)


@pytest.mark.parametrize("option", ["history", "baseline"])
def test_what_a_result_is_held_against_is_refused_and_not_ignored(without: Callable[[str], None], option: str) -> None:
    without("operations")
    with pytest.raises(UsageError, match=f"--{option} is a part of the extra operations, which is not installed here"):
        opened_past(**{"history": None, "baseline": None, option: "a"})
    assert opened_past(None, None) is NO_PAST


def test_a_stage_of_an_absent_extra_is_named(without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    without("training")
    monkeypatch.setattr(reading, "SPECS", {stage: spec for stage, spec in SPECS.items() if stage != "trajectory"})
    with pytest.raises(
        UsageError, match="the stage trajectory is a part of the extra training, which is not installed"
    ):
        make_options({"stages": "base,trajectory"})
    with pytest.raises(UsageError, match="unknown stage: nothing"):
        make_options({"stages": "base,nothing"})


class _Broken:
    """What another distribution offers, and which raises whenever it is asked."""

    def is_asked(self, case: object) -> bool:
        raise RuntimeError(f"nothing known of {case}")


def test_who_cannot_say_whether_a_case_wants_it_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SimpleNamespace(is_asked=lambda _: True)
    theirs = [
        ("theirs:BROKEN", _Broken()),
        ("theirs:JUDGE", asked),
        ("theirs:OTHER", SimpleNamespace(is_asked=lambda _: False)),
    ]
    monkeypatch.setattr(plugins, "offered", lambda _: iter(theirs))
    monkeypatch.setattr(plugins, "_failures", [])
    assert [*plugins.asked("output_judges", "llama")] == [asked]
    (failure,) = plugins.failures()
    assert failure.sentence == (
        "theirs:BROKEN, asked whether a case wants it, cannot be used: RuntimeError: nothing known of llama"
    )


def test_what_is_meant_for_the_user_and_what_is_our_own_passes() -> None:
    with pytest.raises(UsageError), plugins.at_own_cost("theirs:check", "a check", passes=(UsageError,)):
        raise UsageError("no such case")
    with pytest.raises(ZeroDivisionError), plugins.at_own_cost("consistency.extras.ours:check", "a check"):
        _ = 1 / 0
