"""What a case from a file may ask: nothing that runs code, no folder but its own, unless the person here says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.folder import MANIFEST
from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.received import check_received, received
from consistency.case.stage import Level
from consistency.errors import InputError
from consistency.extras.peft_api.wrapping.spec import WRAPPING
from consistency.workflows import pipeline
from tests.capture.resealing import reseal
from tests.conftest import Cli

OWN = str(builtin_folder("llama") / "base")

ASKING: dict[str, tuple[dict[str, Any], Options, str]] = {
    "a function": ({"base": "python:faulthandler:_sigabrt"}, Options(base="b"), "--base python:faulthandler:_sigabrt"),
    "a base elsewhere": ({"base": "/private/model"}, Options(base="b"), "--base /private/model"),
    "a base above": ({"base": "../model"}, Options(base="b"), "--base ../model"),
    "an adapter": ({"base": OWN, "adapter": "/private/a b"}, Options(adapter="a"), "--adapter '/private/a b'"),
    "code": ({"base": OWN, "trust_remote_code": True}, Options(trust_remote_code=True), "--trust-remote-code"),
    "pickles": ({"base": OWN, "allow_pickle": True}, Options(allow_pickle=True), "--allow-pickle"),
    "a wrapper": (
        {"base": OWN, "wrapper": "python:os:abort", "stages": (WRAPPING,)},
        Options(wrapper="python:os:abort"),
        "--wrapper python:os:abort",
    ),
    "inputs": ({"base": OWN, "inputs": "/private/ids"}, Options(inputs="x"), "--inputs /private/ids"),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_is_asked_for_is_refused_with_the_option_that_allows_it(name: str, tmp_path: Path) -> None:
    fields, given, option = ASKING[name]
    case = Case(name="x", **fields)
    with pytest.raises(InputError, match="what only you can allow") as refused:
        check_received(case, Options(), folder=tmp_path)
    assert str(refused.value.hint).endswith(f"add {option}")
    check_received(case, given, folder=tmp_path)


def test_a_link_out_of_the_folder_is_no_way_around(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "private").mkdir()
    (tmp_path / "report" / "base").symlink_to(tmp_path / "private")
    with pytest.raises(InputError, match="another folder"):
        check_received(Case(name="x", base=str(tmp_path / "report" / "base")), Options(), folder=tmp_path / "report")


def test_a_case_of_the_package_needs_nothing(tmp_path: Path) -> None:
    folder = builtin_folder("llama")
    case = Case(name="x", base=str(folder / "base"), adapter=str(folder / "adapter"), level=Level.QUICK)
    assert received(case, Options(), folder=tmp_path) == case


@pytest.mark.slow
def test_bisect_runs_nothing_that_a_report_brings(tmp_path: Path, cli_here: Cli, monkeypatch: Any) -> None:
    out = tmp_path / "run"
    options = Options(
        devices=("cpu", "cpu@baseline"), stages=(standard.MERGED,), only=("merged::model.layers.0.self_attn",)
    )
    pipeline.run(pipeline.prepare(options), out, watch=lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = out / "captures" / MANIFEST
    manifest = msgspec.json.decode(path.read_bytes())
    for changes in ({"base": "python:payload:made"}, {"trust_remote_code": True}):
        path.write_bytes(msgspec.json.encode({**manifest, "case": {**manifest["case"], **changes}}))
        reseal(out / "captures")
        name = "merged::model.layers.0.self_attn.q_proj.delta"
        done = cli_here("bisect", out, "--tensor", name, "--worker", "cpu@baseline")
        assert done.returncode == 2, done.stdout
        assert "what only you can allow" in done.stderr
    assert "payload" not in sys.modules
    assert not (tmp_path / "PWNED").exists()
