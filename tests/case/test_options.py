from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.options import Options, make_options, parse_load_paths, parse_stages, read_options, split_list
from consistency.case.stages import LEVELS, Level, Stage
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
        roads = ["all"]
        level = "thorough"
        repeat = 3
        only = "merged::model.layers.0, adapter"
        keep = true
        timeout = 600
        stall = 30.5
        threads = 2
        """,
    )
    options = make_options(read_options(path))
    assert options == Options(
        base="org/model",
        adapter="org/adapter",
        name="mine",
        devices=("cpu", "cuda:0@tf32"),
        dtype="bfloat16",
        stages=("merged", "adapter"),
        load_paths=("all",),
        level=Level.THOROUGH,
        repeat=3,
        only=("merged::model.layers.0", "adapter"),
        keep=True,
        timeout=600.0,
        stall=30.5,
        threads=2,
    )


def test_an_empty_configuration_is_the_defaults(tmp_path: Path) -> None:
    assert make_options(read_options(toml(tmp_path, ""))) == Options()
    assert Options().allow_pickle is False
    assert Options().trust_remote_code is False


def test_lists_may_be_written_with_commas(tmp_path: Path) -> None:
    table = read_options(toml(tmp_path, 'devices = "cpu, cuda:1"\nstages = "base,adapter"\nroads = "shared"'))
    assert (table["devices"], table["stages"], table["roads"]) == (["cpu", "cuda:1"], ["base", "adapter"], ["shared"])


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
    ("text", "what", "got"),
    [
        ("base = ", "not TOML", "Invalid value"),
        ("bse = 'x'", "cannot be used", "bse"),
        ("base = 3", "cannot be used", "$.base"),
        ("keep = 'yes'", "cannot be used", "$.keep"),
        ("repeat = true", "cannot be used", "$.repeat"),
        ("repeat = 1.5", "cannot be used", "$.repeat"),
        ("dtype = 'float64'", "cannot be used", "float64"),
        ("level = 'night'", "cannot be used", "night"),
        ("stages = [1]", "cannot be used", "$.stages"),
        ("[base]\nx = 1", "cannot be used", "$.base"),
    ],
)
def test_a_bad_configuration_names_the_file_and_the_field(text: str, what: str, got: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(UsageError, match=what) as caught:
        read_options(path)
    assert caught.value.where == str(path)
    assert got in (caught.value.got or "")


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
        ({"repeat": 0}, "repeat counts runs"),
        ({"threads": 0}, "threads counts threads"),
        ({"timeout": 0}, "a time limit"),
        ({"timeout": -1.0}, "a time limit"),
        ({"timeout": float("nan")}, "a time limit"),
        ({"stall": 0}, "a time limit"),
        ({"stall": float("nan")}, "a time limit"),
        ({"devices": []}, "no device given"),
        ({"devices": ["gpu one"]}, "not a device: 'gpu one'"),
        ({"devices": ["cpu@fast"]}, "unknown variant of cpu: fast"),
        ({"stages": []}, "no stage given"),
        ({"stages": ["merge"]}, "unknown stage: merge"),
        ({"roads": []}, "no road given"),
        ({"roads": ["alone"]}, "unknown road: alone"),
        ({"roads": ["all", "shared"]}, "unknown road: all"),
        ({"unknown": 1}, "a setting cannot be used"),
    ],
)
def test_a_bad_option_is_refused(table: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        make_options(table)
    assert caught.value.where
    assert caught.value.exit_status == 2


def test_an_unknown_stage_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        parse_stages(["forwards"])
    assert caught.value.wanted == "one of " + ", ".join(Stage)
    with pytest.raises(UsageError) as caught:
        parse_load_paths(["forwards"])
    assert caught.value.wanted == "isolated or shared, with +cpu, +target or +transformers, with +low-memory; or all"


def test_stages_run_in_the_order_in_which_the_numbers_depend_on_one_another() -> None:
    assert parse_stages(reversed(Stage)) == tuple(Stage)
    for order in itertools.permutations(Stage, 3):
        assert parse_stages(order) == tuple(sorted(order, key=list(Stage).index))
    assert parse_stages(["forward", "base", "base"]) == (Stage.BASE, Stage.FORWARD)
    assert parse_stages(None) is None


def test_all_is_every_road() -> None:
    assert parse_load_paths(["all"]) == tuple(LoadPath)
    assert parse_load_paths(["shared"]) == (LoadPath.SHARED,)
    assert parse_load_paths(["shared", "isolated"]) == (LoadPath.ISOLATED, LoadPath.SHARED)
    assert parse_load_paths(["shared+target+low-memory", "isolated"]) == (
        LoadPath.ISOLATED,
        LoadPath.SHARED_TARGET_LOW_MEMORY,
    )
    assert parse_load_paths(None) is None


def test_a_list_of_an_option_is_split_at_commas() -> None:
    assert split_list(" a, b ,,c ") == ("a", "b", "c")
    assert split_list("") == ()


# --- the case -------------------------------------------------------------------------------------------------------


def test_a_case_survives_json() -> None:
    case = Case(
        name="x", base="/b", adapter=None, stages=(Stage.MERGED,), load_paths=(LoadPath.SHARED,), level=Level.QUICK
    )
    assert decode_json(encode_json(case), Case) == case


def test_a_case_from_elsewhere_has_no_further_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="evil"):
        decode_json(b'{"name": "x", "base": "/b", "evil": 1}', Case)


def test_the_factory_is_what_comes_after_python() -> None:
    assert Case(name="x", base="python:a.b:make").factory == "a.b:make"
    assert Case(name="x", base="/python:a").factory is None


def test_a_report_names_what_was_not_looked_at() -> None:
    quick = Case(name="x", base="/b", level=Level.QUICK, stages=LEVELS[Level.QUICK].stages)
    again = "the adapter loaded again over NaN"
    large = "copies of 256 MiB and more"
    rest = (large, "most operators", "large operators", "safe_merge", again, "a second run on the same device")
    later = ("stage sharding", "stage wrapping")
    assert quick.not_looked_at() == ("stage forward", "stage gradient", "stage memory", *later, *rest)
    widened = Case(name="x", base="/b", level=Level.QUICK)
    assert widened.not_looked_at() == (*later, *rest)
    narrowed = Case(name="x", base="/b", level=Level.STANDARD, stages=(Stage.ADAPTER,), repeat=2)
    others = [stage for stage in Stage if stage is not Stage.ADAPTER]
    assert narrowed.not_looked_at() == tuple(f"stage {stage}" for stage in others)
    thorough = Case(name="x", base="/b", level=Level.THOROUGH, repeat=2, stages=LEVELS[Level.THOROUGH].stages)
    assert thorough.not_looked_at() == ("stage wrapping",), "which needs a wrapper of the user's own"


def test_a_higher_level_looks_at_no_less() -> None:
    plans = [LEVELS[level] for level in Level]
    for less, more in itertools.pairwise(plans):
        assert set(less.stages) <= set(more.stages)
        assert less.safe_merge <= more.safe_merge
        assert (less.sequences, less.tokens, less.repeat) <= (more.sequences, more.tokens, more.repeat)
        assert set(more.not_looked_at) < set(less.not_looked_at)
