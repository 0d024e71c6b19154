"""`--adapter NAME=PATH`: how several adapters of one case are distinguished from those of a suite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from consistency.case.named_adapters import NamedAdapter, as_named_adapters
from consistency.case.options import Edge, add_options
from consistency.case.preflight import prepare_case
from consistency.case.reading import gather_options, make_options
from consistency.case.suite import gather_suite
from consistency.errors import UsageError
from consistency.extras.diagnosis.drill.plantable import several_adapters
from consistency.extras.peft_api.adapters.spec import ADAPTERS

ONE_TWO = (NamedAdapter(name="one", path="./x"), NamedAdapter(name="two", path="org/y"))


def given(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument, Edge.COMMAND_LINE)
    return vars(parser.parse_args(arguments))


def test_names_make_one_case() -> None:
    line = given("--adapter", "one=./x", "--adapter=two=org/y")
    assert gather_suite(None, line, Edge.COMMAND_LINE) is None
    options = gather_options(None, line, Edge.COMMAND_LINE)
    assert (options.adapters, options.adapter) == (ONE_TWO, None)


def test_paths_without_names_make_a_suite() -> None:
    suite = gather_suite(None, given("--adapter", "./x", "--adapter", "./y"), Edge.COMMAND_LINE)
    assert suite is not None
    assert [case.adapter for case in suite.cases] == ["./x", "./y"]


def test_one_path_is_one_case(tmp_path: Path) -> None:
    named = tmp_path / "r=8"
    named.mkdir()
    for path in ("./x", "./r=8", str(named)):
        line = given("--adapter", path)
        assert gather_suite(None, line, Edge.COMMAND_LINE) is None
        assert gather_options(None, line, Edge.COMMAND_LINE).adapter == path


def test_a_folder_whose_name_has_the_form_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r=8").mkdir()
    monkeypatch.chdir(tmp_path)
    assert gather_options(None, given("--adapter", "r=8"), Edge.COMMAND_LINE).adapter == "r=8"


def test_a_table_in_toml_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    file = tmp_path / "case.toml"
    file.write_text('adapters = {one = "x", two = "org/y"}')
    options = gather_options(file, {}, Edge.COMMAND_LINE)
    assert [str(one) for one in options.adapters or ()] == [f"one={tmp_path}/x", "two=org/y"]
    # the command line wins, whichever of the two forms it has
    assert gather_options(file, given("--adapter", "./z"), Edge.COMMAND_LINE).adapters is None


def test_a_table_in_a_case_of_a_suite(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    cases = '[[case]]\nname = "a"\nadapters = {one = "./x", two = "org/y"}\n[[case]]\nname = "b"'
    file.write_text(f'adapter = "./z"\n{cases}')
    suite = gather_suite(file, {}, Edge.COMMAND_LINE)
    assert suite is not None
    assert [(case.adapters, case.adapter) for case in suite.cases] == [(ONE_TWO, None), (None, "./z")]


def test_python_takes_either_form() -> None:
    assert make_options({"adapters": {"one": "./x", "two": "org/y"}}).adapters == ONE_TWO
    assert make_options({"adapter": ["one=./x", "two=org/y"]}).adapters == ONE_TWO


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"one": "./x"}, "only one adapter was given, and it has a name"),
        ({"one": "./x", "default": "./y"}, "cannot be named default"),
        ({"one": "./x", "a.b": "./y"}, "not the name of an adapter"),
        ({"one": "./x", "two": ""}, "two has no path"),
        (["one=./x", "one=./y"], "two adapters have the name one"),
        ("./x", "adapters is not a table"),
    ],
)
def test_what_cannot_be_used_is_named(adapters: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_named_adapters(adapters, where="--adapter")


def test_names_for_some_of_them_are_refused() -> None:
    with pytest.raises(UsageError, match="some adapters have a name"):
        gather_suite(None, given("--adapter", "one=./x", "--adapter", "./y"), Edge.COMMAND_LINE)


def test_the_case_has_the_stage_and_says_what_the_others_leave_out() -> None:
    with several_adapters() as adapters:
        case = prepare_case(make_options({"base": "builtin:llama", "adapters": adapters}))
        assert ADAPTERS in case.stages
        assert case.adapter == case.adapters[0].path
        assert any(
            text.startswith("adapter, merged, ") and " of second (checked for first only)" in text
            for text in case.not_checked()
        )
        assert "routing by create_arrow_model" in case.not_checked()
        alone = prepare_case(make_options({"base": "builtin:llama"}))
        assert ADAPTERS not in alone.stages
        assert not any("adapters" in text for text in alone.not_checked())
        with pytest.raises(UsageError, match="which is not in"):
            prepare_case(make_options({"base": "builtin:llama", "adapters": adapters, "stages": "merged"}))
    with pytest.raises(UsageError, match="needs several adapters"):
        prepare_case(make_options({"base": "builtin:llama", "stages": "adapters"}))
