"""The table of options: each exists on every edge under the same name, or its row says why not."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from consistency.case.options import OPTIONS, Edge, Option, Options, add_options
from consistency.case.reading import gather_options, read_options
from consistency.case.stages import SPECS
from consistency.cli.main import build_parser
from consistency.pytest_plugin import plugin

TEXTS = {
    "devices": "cpu", "dtype": "bfloat16", "stages": "base", "load_paths": "shared", "level": "quick", "repeat": "2",
    "profile": "deployed", "steps": "7", "for": "1h30m", "set": "cudnn_enabled=false",
    "placement": "offload", "tolerance": "atol=1,rtol=1", "timeout": "2", "stall": "3", "threads": "4",
    "engine_outputs": "vllm=outputs.safetensors",
}  # fmt: skip
"""A value that is not the default, as a command line takes it; any text will do for the others."""


def actions(edge: Edge, command: str = "run") -> dict[str, argparse.Action]:
    """Return what an edge itself declares, by the spelling of the option."""
    if edge is Edge.COMMAND_LINE:
        (commands,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
        found = commands.choices[command]._actions
    else:
        own = argparse.ArgumentParser()
        group = SimpleNamespace(addoption=own.add_argument)
        parser = SimpleNamespace(getgroup=lambda *_: group, addini=lambda *_, **__: None)
        plugin.pytest_addoption(cast("pytest.Parser", parser))
        found = own._actions
    return {text: action for action in found for text in action.option_strings}


def given(option: Option, edge: Edge) -> object:
    """Give one option on an edge; return its parsed value."""
    text = TEXTS.get(option.name, "x")
    own = argparse.ArgumentParser()
    add_options(own.add_argument, edge)
    arguments = [edge.spell(option.name), *([] if option.type is bool else [text])]
    return getattr(gather_options(None, vars(own.parse_args(arguments)), edge), option.attribute)


def in_file(option: Option, folder: Path) -> object:
    text = TEXTS.get(option.name, "x")
    value = text if option.type in (int, float) else "true" if option.type is bool else f'["{text}"]'
    value = f'"{text}"' if option.type is str and not option.repeatable else value
    (folder / "case.toml").write_text(f"{option.name} = {value}")
    return read_options(folder / "case.toml")[option.attribute]


@pytest.mark.parametrize("edge", [Edge.COMMAND_LINE, Edge.PYTEST])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_on_both_command_lines_or_says_why_not(option: Option, edge: Edge) -> None:
    action = actions(edge).get(edge.spell(option.name))
    if edge in option.absent:
        assert action is None
        assert len(option.absent[edge]) > 20, "a reason"
    else:
        assert action is not None
        assert (action.help, action.metavar) == (option.help, option.metavar)


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if Edge.COMMAND_LINE not in o.absent], ids=lambda option: option.name
)
def test_every_option_means_the_same_in_a_file_and_on_a_command_line(option: Option, tmp_path: Path) -> None:
    values = [given(option, edge) for edge in (Edge.COMMAND_LINE, Edge.PYTEST) if edge not in option.absent]
    assert Edge.TOML not in option.absent, "or expect it to be refused there"
    assert {repr(value) for value in values} == {repr(in_file(option, tmp_path))}
    assert values[0] != getattr(Options(), option.attribute)


def test_run_and_capture_have_the_same_options() -> None:
    run, capture = (actions(Edge.COMMAND_LINE, command) for command in ("run", "capture"))
    for option in (o for o in OPTIONS if Edge.COMMAND_LINE not in o.absent):
        assert run["--" + option.name.replace("_", "-")].help == capture["--" + option.name.replace("_", "-")].help


def test_the_help_names_every_stage() -> None:
    (stages,) = [option for option in OPTIONS if option.name == "stages"]
    assert all(stage in stages.help for stage in SPECS)
