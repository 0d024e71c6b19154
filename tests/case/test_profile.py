"""Profiles and settings on every edge."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.case.case import Case
from consistency.case.options import Edge, Options
from consistency.case.profile import Switch
from consistency.case.reading import gather_options, make_options, read_options
from consistency.errors import UsageError

HIGH = Switch(name="float32_matmul_precision", value="high")
NO_CUDNN = Switch(name="cudnn_enabled", value=False)
UNSET = Switch(name="cublas_workspace_config", value=None)


@pytest.mark.parametrize(
    "text",
    [
        'set = ["float32_matmul_precision=high", "cudnn_enabled=false", "cublas_workspace_config=none"]',
        '[set]\nfloat32_matmul_precision = "high"\ncudnn_enabled = false\ncublas_workspace_config = "none"',
    ],
)
def test_a_file_has_a_list_or_a_table(text: str, tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text(text)
    assert read_options(tmp_path / "case.toml")["set"] == (HIGH, NO_CUDNN, UNSET)


def test_settings_of_the_command_line_come_after_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "case.toml").write_text('profile = "deployed"\n[set]\ncudnn_enabled = true\nsdpa_flash = true')
    given = {"set": ["cudnn_enabled=false", "float32_matmul_precision=high"], "profile": None}
    found = gather_options(tmp_path / "case.toml", given, Edge.COMMAND_LINE)
    assert found.profile == "deployed"
    assert found.set == (NO_CUDNN, Switch(name="sdpa_flash", value=True), HIGH)


def test_the_default_is_pinned_without_settings() -> None:
    assert (Options().profile, Options().set) == ("pinned", ())
    case = Case(name="x", base="/b")
    assert case.is_pinned
    assert not Case(name="x", base="/b", profile="deployed").is_pinned


def test_settings_from_python() -> None:
    assert make_options({"set": {"cudnn_enabled": False}}).set == (NO_CUDNN,)
    assert make_options({"set": [NO_CUDNN, UNSET, "float32_matmul_precision=high"]}).set == (NO_CUDNN, UNSET, HIGH)


@pytest.mark.parametrize("given", ["cudnn_enabled=1", 3, ["cudnn_enabled"], ["=1"], ["cudnn_enabled="], [3]])
def test_other_forms_are_refused_with_the_right_one(given: object) -> None:
    with pytest.raises(UsageError) as caught:
        make_options({"set": given})
    assert caught.value.wanted == "NAME=VALUE, such as float32_matmul_precision=high"


def test_a_case_with_settings_survives_json_and_its_text_is_what_the_command_line_takes() -> None:
    case = Case(name="x", base="/b", profile="deployed", settings=(HIGH, NO_CUDNN, UNSET))
    assert decode_json(encode_json(case), Case) == case
    texts = [str(switch) for switch in case.settings]
    assert texts == ["float32_matmul_precision=high", "cudnn_enabled=false", "cublas_workspace_config=none"]
    assert make_options({"set": texts}).set == case.settings


def test_a_case_of_an_earlier_version_was_pinned() -> None:
    assert decode_json(b'{"name": "x", "base": "/b"}', Case).is_pinned
