"""Many cases from one file: defaults and overrides, patterns, matrices, and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from consistency.case.options import Edge, Options
from consistency.case.stage import Level
from consistency.case.suite import SuiteOptions, folder_name, gather_suite
from consistency.errors import UsageError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("b", "a", "nested/x/final", "nested/y/final"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters" / "notes").mkdir()
    return tmp_path


def suite(home: Path, text: str, given: Mapping[str, object] | None = None) -> SuiteOptions:
    (home / "night.toml").write_text(text)
    found = gather_suite(home / "night.toml", given or {}, Edge.COMMAND_LINE)
    assert found is not None
    return found


def cases(home: Path, text: str, given: Mapping[str, object] | None = None) -> dict[str, Options]:
    return {str(case.name): case for case in suite(home, text, given).cases}


def test_a_file_without_cases_is_one_case(home: Path) -> None:
    (home / "one.toml").write_text('base = "builtin:llama"\nadapter = "adapters/a"\ndtype = "float32"')
    assert gather_suite(home / "one.toml", {}, Edge.COMMAND_LINE) is None
    assert gather_suite(None, {"adapter": "adapters/a", "dtype": None}, Edge.COMMAND_LINE) is None


def test_options_at_the_top_are_those_of_every_case(home: Path) -> None:
    found = suite(
        home,
        """
        base = "builtin:llama"
        devices = "cpu,cpu@avx2"
        stall = 40
        level = "quick"
        tolerance = [{atol = 1.0, rtol = 0}]
        set = {cudnn_enabled = false}
        [[case]]
        name = "first"
        adapter = "adapters/a"
        [[case]]
        name = "second"
        level = "thorough"
        tolerance = [{stage = "merged", atol = 2.0, rtol = 0}]
        load_paths = "shared"
        set = {float32_matmul_precision = "high"}
        """,
    )
    assert (found.name, found.shared.devices, found.shared.stall) == ("night", ("cpu", "cpu@avx2"), 40)
    first, second = found.cases
    assert (first.name, first.base, first.level) == ("first", "builtin:llama", Level.QUICK)
    assert first.adapter == str(home / "adapters/a")
    assert (second.level, second.adapter, second.load_paths) == (Level.THOROUGH, None, ("shared",))
    # as between a file and a command line: the last one that matches applies, and of a setting the last value
    assert [one.atol for one in second.tolerance] == [1.0, 2.0]
    assert {one.name for one in second.set} == {"cudnn_enabled", "float32_matmul_precision"}
    assert [one.atol for one in first.tolerance] == [1.0]


def test_the_command_line_wins_over_every_case(home: Path) -> None:
    text = 'base = "builtin:llama"\n[[case]]\nname = "x"\nlevel = "quick"\n[[case]]\nname = "y"'
    given = {"level": "thorough", "devices": "cpu", "timeout": 7.0}
    found = suite(home, text, given)
    assert {case.level for case in found.cases} == {Level.THOROUGH}
    assert (found.shared.devices, found.shared.timeout) == (("cpu",), 7.0)


def test_a_pattern_takes_every_adapter_and_a_list_makes_a_matrix(home: Path) -> None:
    found = cases(home, 'base = "builtin:llama"\nadapter = "adapters/*"\ndtype = ["float32", "bfloat16"]')
    assert list(found) == ["a-float32", "a-bfloat16", "b-float32", "b-bfloat16"]
    assert found["b-bfloat16"].adapter == str(home / "adapters/b")
    assert found["b-bfloat16"].dtype == "bfloat16"
    listed = cases(home, '[[case]]\nname = "pair"\nadapter = ["adapters/b", "adapters/a"]')
    assert {name: case.adapter for name, case in listed.items()} == {
        "pair-b": str(home / "adapters/b"), "pair-a": str(home / "adapters/a"),
    }  # fmt: skip
    one = cases(home, '[[case]]\nadapter = "adapters/a"\n[[case]]\nbase = "models/base"')
    assert list(one) == ["a", "models"]


def test_a_pattern_on_the_command_line_is_a_suite_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    found = gather_suite(None, {"adapter": "adapters/*", "base": "builtin:llama"}, Edge.COMMAND_LINE)
    assert found is not None
    assert [(case.name, case.base) for case in found.cases] == [("a", "builtin:llama"), ("b", "builtin:llama")]
    again = cases(home, 'adapter = ["adapters/a", "adapters/b"]', {"adapter": "adapters/nested/*/final"})
    assert list(again) == ["x-final", "y-final"], "folders with one name are told apart by the path to them"


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ('adapter = "adapters/none*"', "no adapter matches the pattern", "adapter in"),
        ('[[case]]\nadapter = "models/*"', "no adapter matches the pattern", "[[case]] 1 of"),
        ('[[case]]\n[[case]]\ndevices = "cpu"', "devices is for all cases", "[[case]] 2 of"),
        ('[[case]]\ntimeout = 3', "timeout is for all cases", "[[case]] 1 of"),
        ('[[case]]\nlevle = "quick"', "unknown option: levle", "[[case]] 1 of"),
        ('[[case]]\ndtype = ["float31"]', "unknown dtype: float31", "dtype in [[case]] 1 of"),
        ('[[case]]\nname = "x"\n[[case]]\nname = "x"', "two cases have the same name", "name"),
        ('[[case]]\nname = "a b"\n[[case]]\nname = "a/b"', "two cases have the same name", "name"),
        ('case = "x"', "case is not a list of tables", "case in"),
        ("adapter = []", "no adapter given", "adapter in"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(home: Path, text: str, what: str, where: str) -> None:
    with pytest.raises(UsageError) as error:
        suite(home, text)
    assert error.value.what == what
    assert where in str(error.value.where)


def test_cases_are_chosen_by_name(home: Path) -> None:
    found = suite(home, 'adapter = ["adapters/a", "adapters/b"]\ndtype = ["float32", "bfloat16"]')
    names = [case.name for case in found.chosen(["a-*", "*-bfloat16"]).cases]
    assert names == ["a-float32", "a-bfloat16", "b-bfloat16"]
    assert found.chosen([]) is found
    with pytest.raises(UsageError, match="no case has such a name"):
        found.chosen(["a-*", "c*"])


def test_a_name_cannot_lead_out_of_the_folder_of_cases() -> None:
    assert folder_name("../../etc/passwd") == "etc-passwd"
    assert folder_name("Llama 3 · q_proj@v2") == "Llama-3-q_proj@v2"
    assert folder_name("..") == "case"


def test_the_time_of_a_soak_is_divided_over_the_cases(home: Path) -> None:
    text = """
        base = "builtin:llama"
        for = "1h"
        [[case]]
        adapter = "adapters/[ab]"
        [[case]]
        name = "longer"
        for = "2h"
    """
    times = {name: case.soak for name, case in cases(home, text).items()}
    assert times == {"a": 1800, "b": 1800, "longer": 7200}
    times = {name: case.soak for name, case in cases(home, text, {"for": "30m"}).items()}
    assert times == {"a": 600, "b": 600, "longer": 600}
