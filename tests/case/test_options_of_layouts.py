"""`--wrapper` and `--device-map`: checked before any worker starts, and what they do to the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.reading import make_options, read_options
from consistency.case.stage import Level
from consistency.errors import ConsistencyError, InputError, UsageError
from consistency.extras.peft_api.sharding.spec import SHARDING
from consistency.extras.peft_api.wrapping.spec import WRAPPING

FACTORY = "python:package.module:wrap"


def case(**options: Any) -> Case:
    return prepare_case(make_options({"base": "builtin:gpt2", **options}))


def test_stages_that_an_option_makes_possible() -> None:
    plain = case()
    assert not {SHARDING, WRAPPING} & set(plain.stages)
    assert {"stage sharding", "stage wrapping"} <= set(plain.not_checked())
    assert SHARDING in case(level=Level.THOROUGH).stages
    assert "stage wrapping" in case(level=Level.THOROUGH).not_checked()
    assert set(case(wrapper=FACTORY).stages) == {*plain.stages, WRAPPING}
    assert set(case(device_map="auto").stages) == {*plain.stages, SHARDING}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stages": ("wrapping",)}, UsageError, "nothing wraps the base"),
        ({"wrapper": "module:wrap"}, UsageError, "not a wrapper"),
        ({"wrapper": FACTORY, "stages": ("base",)}, UsageError, "wrapper is for the stage wrapping"),
        ({"device_map": "auto", "stages": ("base",)}, UsageError, "device_map is for the stage sharding"),
        ({"device_map": "everywhere"}, UsageError, "not a device map"),
        ({"device_map": "missing.json"}, InputError, "no missing.json"),
        ({"device_map": "empty.json"}, InputError, "the device map is empty"),
        ({"device_map": "odd.json"}, InputError, "a device map maps modules to devices"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[ConsistencyError], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "odd.json").write_text('{"lm_head": true}')
    with pytest.raises(error, match=words):
        case(**options)


def test_a_map_beside_the_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"": 0, "lm_head": "cpu"}')
    (tmp_path / "case.toml").write_text('base = "builtin:gpt2"\ndevice_map = "map.json"')
    options = Options(**read_options(tmp_path / "case.toml"))
    assert prepare_case(options).device_map == str((tmp_path / "map.json").resolve())
