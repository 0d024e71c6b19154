from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.case.options import Edge, Options
from consistency.case.reading import gather_options, make_options, read_options
from consistency.case.stage import Level
from consistency.case.stages import SPECS
from consistency.case.tolerance import Override
from consistency.errors import UsageError


def toml(folder: Path, text: str) -> Path:
    path = folder / "consistency.toml"
    path.write_text(text, encoding="utf-8")
    return path


# --- TOML -----------------------------------------------------------------------------------------------------------


def test_a_whole_configuration_is_read(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        base = "org/model"
        adapter = "org/adapter"
        name = "mine"
        devices = ["cpu", "cuda:0@tf32"]
        dtype = "bfloat16"
        stages = ["merged", "adapter"]
        load_paths = ["all"]
        level = "thorough"
        repeat = 3
        only = "merged::model.layers.0, adapter"
        keep = true
        timeout = 600
        stall = 30.5
        threads = 2
        """,
    )
    assert gather_options(path, {}, Edge.COMMAND_LINE) == Options(
        base="org/model",
        adapter="org/adapter",
        name="mine",
        devices=("cpu", "cuda:0@tf32"),
        dtype="bfloat16",
        stages=(standard.ADAPTER, standard.MERGED),
        load_paths=tuple(LoadPath),
        level=Level.THOROUGH,
        repeat=3,
        only=("merged::model.layers.0", "adapter"),
        keep=True,
        timeout=600.0,
        stall=30.5,
        threads=2,
    )


def test_an_empty_configuration_is_the_defaults(tmp_path: Path) -> None:
    assert gather_options(toml(tmp_path, ""), {"base": None}, Edge.PYTEST) == make_options({}) == Options()
    assert Options().allow_pickle is False
    assert Options().trust_remote_code is False


def test_lists_may_be_written_with_commas(tmp_path: Path) -> None:
    table = read_options(toml(tmp_path, 'devices = "cpu, cuda:1"\nstages = "base,adapter"\nload_paths = "shared"'))
    assert (table["devices"], table["stages"]) == (("cpu", "cuda:1"), (standard.BASE, standard.ADAPTER))
    assert table["load_paths"] == (LoadPath.SHARED,)
    assert make_options({"only": " a, b ,,c ", "devices": "cpu"}).only == ("a", "b", "c")
    assert make_options({"only": ""}).only == ()


def test_paths_are_relative_to_the_file_where_they_are_paths(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "in.safetensors").touch()
    table = read_options(
        toml(tmp_path, 'base = "base"\nadapter = "org/adapter"\ninputs = "in.safetensors"\nname = "base"')
    )
    assert table["base"] == str(tmp_path / "base")
    assert table["inputs"] == str(tmp_path / "in.safetensors")
    assert table["adapter"] == "org/adapter"
    assert table["name"] == "base"


@pytest.mark.parametrize("base", ["python:package.module:function", "builtin:llama"])
def test_a_factory_and_a_built_in_case_are_no_paths(base: str, tmp_path: Path) -> None:
    (tmp_path / base).mkdir(parents=True)
    assert read_options(toml(tmp_path, f'base = "{base}"'))["base"] == base


@pytest.mark.parametrize(
    ("text", "what", "field"),
    [
        ("base = ", "not TOML.*Invalid value", ""),
        ("bse = 'x'", "unknown option: bse", "bse"),
        ("base = 3", "base is not a text.*3, a whole number.*wanted: a text: folder, hub id", "base"),
        ("keep = 'yes'", "keep is not true or false.*'yes', a text.*wanted: true or false", "keep"),
        ("repeat = true", "repeat is not a whole number.*True, a boolean", "repeat"),
        ("repeat = 1.5", "repeat is not a whole number.*1.5, a number", "repeat"),
        ("dtype = 'float64'", "unknown dtype: float64.*one of auto, float32, bfloat16, float16", "dtype"),
        ("level = 'night'", "unknown level: night.*one of quick, standard, thorough", "level"),
        ("stages = [1]", "stages is not a list of texts.*\\[1\\], a list", "stages"),
        ("stages = 'merge'", "unknown stage: merge", "stages"),
        ("load_paths = 'alone'", "unknown load path: alone", "load_paths"),
        ("[base]\nx = 1", "base is not a text.*{'x': 1}, a table", "base"),
    ],
)
def test_a_bad_configuration_names_the_file_and_the_field(text: str, what: str, field: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(UsageError, match=f"(?s){what}") as caught:
        read_options(path)
    assert caught.value.where == (f"{field} in {path}" if field else str(path))


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file") as caught:
        read_options(tmp_path / "none.toml")
    assert caught.value.where == str(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot read the configuration file"):
        read_options(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'base = "\xe9"')
    with pytest.raises(UsageError, match="cannot read the configuration file"):
        read_options(tmp_path / "latin.toml")


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"repeat": 0}, "repeat is out of range"),
        ({"threads": 0}, "threads is out of range"),
        ({"threads": 1025}, "threads is out of range"),
        ({"threads": 10**30}, "threads is out of range"),
        ({"repeat": 100_000}, "repeat is out of range"),
        ({"steps": 10**12}, "steps is out of range"),
        ({"for": "9999999d"}, "for is out of range"),
        ({"timeout": float("inf")}, "timeout is out of range"),
        ({"stall": 1e300}, "stall is out of range"),
        ({"timeout": 0}, "timeout is out of range"),
        ({"timeout": -1.0}, "timeout is out of range"),
        ({"timeout": float("nan")}, "timeout is out of range"),
        ({"stall": 0}, "stall is out of range"),
        ({"stall": float("nan")}, "stall is out of range"),
        ({"devices": []}, "no device given"),
        ({"devices": ["gpu one"]}, "not a device: 'gpu one'"),
        ({"devices": ["cpu@fast"]}, "unknown variant of cpu: fast"),
        ({"stages": []}, "no stage given"),
        ({"stages": ["merge"]}, "unknown stage: merge"),
        ({"load_paths": []}, "no load path given"),
        ({"load_paths": ["alone"]}, "unknown load path: alone"),
        ({"load_paths": ["all", "shared"]}, "unknown load path: all"),
        ({"unknown": 1}, "unknown option: unknown"),
        ({"for": "1h", "soak": "1h"}, "for is given twice"),
    ],
)
def test_a_bad_option_is_refused(table: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        make_options(table)
    assert caught.value.where
    assert caught.value.exit_status == 2


def test_stages_run_in_the_order_in_which_the_numbers_depend_on_one_another() -> None:
    assert make_options({"stages": list(reversed(SPECS))}).stages == tuple(SPECS)
    for order in itertools.permutations(SPECS, 3):
        assert make_options({"stages": order}).stages == tuple(sorted(order, key=list(SPECS).index))
    assert make_options({"stages": "forward,base,base"}).stages == (standard.BASE, standard.FORWARD)


def test_all_is_every_load_path() -> None:
    assert make_options({"load_paths": ["all"]}).load_paths == tuple(LoadPath)
    assert make_options({"load_paths": ["shared"]}).load_paths == (LoadPath.SHARED,)
    assert make_options({"load_paths": ["shared", "isolated"]}).load_paths == (LoadPath.ISOLATED, LoadPath.SHARED)
    assert make_options({"load_paths": ["shared+target+low-memory", "isolated"]}).load_paths == (
        LoadPath.ISOLATED,
        LoadPath.SHARED_TARGET_LOW_MEMORY,
    )


def test_options_given_on_a_command_line_win_over_those_of_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'name = "file"\nlevel = "quick"\nload_paths = "shared"\n[[tolerance]]\natol = 0\nrtol = 0')
    given = {"name": "line", "load_paths": "isolated", "keep": None, "tolerance": ["atol=1,rtol=1"]}
    assert gather_options(path, given, Edge.COMMAND_LINE) == Options(
        name="line",
        level=Level.QUICK,
        load_paths=(LoadPath.ISOLATED,),
        tolerance=(Override(atol=0.0, rtol=0.0), Override(atol=1.0, rtol=1.0)),
    )


@pytest.mark.parametrize("text", [f"timeout = {'9' * 5000}", f"stages = {'[' * 2000}{']' * 2000}"])
def test_what_the_parser_cannot_hold_is_no_configuration(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not TOML"):
        read_options(toml(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        r'base = "a\u0000b"', r'adapter = "a\u0000b"', r'inputs = "a\u0000.safetensors"', r'wrapper = "a\u0000:b"',
        r'devices = ["cpu\u0000"]', r'adapters = {one = "a\u0000"}', r'name = "\u0000"',
    ],
)  # fmt: skip
def test_no_text_holds_a_nul(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds a NUL character"):
        read_options(toml(tmp_path, text))
