"""Options in the ini file: each means there what it means on a command line, and the command line wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency.case.options import OPTIONS, Edge
from consistency.case.reading import make_options, read_options
from consistency.errors import UsageError
from consistency.pytest_plugin.given import Given, read_given

VALUES = {
    "base": '"builtin:llama"', "adapter": '"adapters/mine"', "adapters": '["one=./x", "two=./y"]',
    "name": '"mine"', "devices": '["cpu", "cpu@baseline"]',
    "dtype": '"bfloat16"', "profile": '"deployed"', "set": '["cudnn_enabled=false"]', "placement": '"offload"',
    "stages": '"adapter,base"', "load_paths": '"isolated"', "level": '"quick"', "inputs": '"inputs.safetensors"',
    "device_map": '"auto"', "wrapper": '"python:a.b:c"', "repeat": "3", "steps": "7", "for": '"1h30m"', "load": "true",
    "tolerance": '["stage=merged,atol=1e-3,rtol=1e-2"]', "keep": "true", "allow_pickle": "true",
    "trust_remote_code": "true", "timeout": "600", "stall": "30.5", "threads": "4",
}  # fmt: skip
"""A value for each option, as TOML."""


@pytest.fixture(autouse=True)
def _no_inherited_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def given(pytester: pytest.Pytester, *arguments: str, **ini: str) -> Given:
    lines = [f"consistency_{name} = {value}" for name, value in ini.items()]
    pytester.makepyprojecttoml("\n".join(["[tool.pytest.ini_options]", *lines]))
    return read_given(pytester.parseconfig(*arguments))


def test_every_option_is_an_ini_option(pytester: pytest.Pytester, tmp_path: Path) -> None:
    assert set(VALUES) == {option.name for option in OPTIONS if Edge.PYTEST_INI not in option.absent}
    found = given(pytester, **VALUES)
    file = tmp_path / "same.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in VALUES.items()))
    assert make_options(found.case_options()) == make_options(read_options(file))
    assert all(getattr(make_options(found.case_options()), o.attribute) for o in OPTIONS if o.name in VALUES)


def test_without_options_nothing_is_given(pytester: pytest.Pytester) -> None:
    assert given(pytester, load="false").case_options() == {}


def test_the_command_line_wins(pytester: pytest.Pytester) -> None:
    ini = {"level": '"quick"', "dtype": '"bfloat16"', "tolerance": '["atol=1,rtol=1"]', "history": '"a"'}
    line = ("--consistency-level=thorough", "--consistency-tolerance=atol=2,rtol=2", "--consistency-history=b")
    assert given(pytester, *line, **ini).case_options() == {
        "level": "thorough",
        "dtype": "bfloat16",
        "tolerance": ["atol=1,rtol=1", "atol=2,rtol=2"],  # the last that matches applies
        "history": "b",
    }


def test_several_adapters_of_one_case(pytester: pytest.Pytester) -> None:
    """One a line, relative to the ini file; a command line that names one replaces them."""
    (pytester.path / "x").mkdir()
    ini = {"adapters": '["one = x", "two=org/y"]'}
    (one, two) = make_options(given(pytester, **ini).case_options()).adapters or ()
    assert [str(one), str(two)] == [f"one={pytester.path / 'x'}", "two=org/y"]
    options = make_options(given(pytester, "--consistency-adapter=./z", **ini).case_options())
    assert (options.adapter, options.adapters) == ("./z", None)
    line = ("--consistency-adapter=one=./z", "--consistency-adapter=two=./y")
    found = make_options(given(pytester, *line, **ini).case_options()).adapters or ()
    assert [str(adapter) for adapter in found] == ["one=./z", "two=./y"]
    with pytest.raises(UsageError, match="consistency_adapters"):
        given(pytester, adapters='["one=x"]')


def test_paths_are_relative_to_the_ini_file(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    (pytester.path / "llama").mkdir()
    (pytester.path / "below").mkdir()
    monkeypatch.chdir(pytester.path / "below")
    found = given(
        pytester, base='"llama"', adapter='"adapters/*"', out='"out"', baseline='"b.json"', history='"s3://h"'
    )
    assert found.options == {"base": str(pytester.path / "llama"), "adapter": str(pytester.path / "adapters" / "*")}
    assert (found.out, found.baseline) == (pytester.path / "out", pytester.path / "b.json")
    assert found.history == "s3://h"
    assert given(pytester, "--consistency-out=out").out == pytester.path / "below" / "out"


def test_a_file_on_the_command_line_replaces_the_case_of_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makefile(".toml", other='base = "builtin:gpt2"')
    found = given(pytester, "--consistency-config=other.toml", "--consistency-level=quick", base='"builtin:llama"')
    assert found.case_options() == {"base": "builtin:gpt2", "level": "quick"}
    found = given(pytester, config='"other.toml"', level='"thorough"')
    assert found.case_options() == {"base": "builtin:gpt2", "level": "thorough"}


@pytest.mark.parametrize(("name", "value"), [("stages", '"merge"'), ("level", '"fast"'), ("threads", '"many"')])
def test_a_wrong_value_is_named_where_it_stands(pytester: pytest.Pytester, name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"consistency_{name} in {pytester.path}/pyproject\.toml"):
        given(pytester, **{name: value})
