"""What is said of a value that cannot be used: where, in its caller's words, what is allowed, and what was meant."""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path

import pytest

from consistency.case.options import OPTIONS, Edge, Option, Options, Source
from consistency.case.preflight import prepare_case
from consistency.case.reading import gather_options, make_options, parse
from consistency.case.suite import gather_suite
from consistency.devices.discovery import select
from consistency.errors import ConsistencyError, UsageError
from consistency.workflows.pipeline import prepare

RUBBISH: tuple[object, ...] = (
    3, -1, math.nan, True, "", "x y", "<>", ["x y"], [1], [[]], {"a": 1}, datetime.date(1979, 5, 27),
)  # fmt: skip

OF_A_LIBRARY = re.compile(r"Expected `|Object |<\w+\.|\$[.\[]|Traceback|NoneType|Error:")
"""What a library says to a programmer."""


def refusal(table: dict[str, object], edge: Edge) -> UsageError | None:
    try:
        parse(table, where=edge.spell)
    except UsageError as error:
        return error
    return None


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_rubbish_is_answered_in_the_words_of_the_options(option: Option) -> None:
    found = [refused for value in RUBBISH if (refused := refusal({option.name: value}, Edge.PYTEST)) is not None]
    assert len(found) > 5
    for error in found:
        assert error.where == Edge.PYTEST.spell(option.name)
        assert error.wanted, error
        assert not OF_A_LIBRARY.search(str(error)), error


@pytest.mark.parametrize(
    ("name", "value", "what", "wanted", "hint"),
    [
        ("adaptor", "x", "unknown option: adaptor", "base, adapter, name", "did you mean adapter?"),
        ("device", "cpu", "unknown option: device", "devices", "did you mean devices?"),
        ("base", 3, "base is not a text", "a text: folder, hub id", None),
        ("base", "", "base is empty", "folder, hub id", None),
        ("level", "QUICK", "unknown level: QUICK", "one of quick, standard, thorough", "did you mean quick?"),
        ("dtype", "bf16", "unknown dtype: bf16", "one of auto, float32, bfloat16, float16", "did you mean bfloat16?"),
        ("dtype", "fp32", "unknown dtype: fp32", "one of auto, float32, bfloat16, float16", None),
        ("stages", "merge", "unknown stage: merge", "one of transfer, operators", "did you mean merged?"),
        ("stages", [1], "stages is not a list of texts", "a list of texts, or one text with commas", None),
        ("stages", "", "no stage given", "one of transfer", None),
        ("load_paths", "isolate", "unknown load path: isolate", "isolated or shared", "did you mean isolated?"),
        ("repeat", "2", "repeat is not a whole number", "a whole number", None),
        ("repeat", 0, "repeat is out of range", "a number above 0", None),
        ("threads", 100_000, "threads is out of range", "a number of 1024 at most", None),
        ("keep", 1, "keep is not true or false", "true or false", None),
        ("for", "soon", "not a time", "90s, 10m, 2h, 1h30m", None),
        ("devices", "c p u", "not a device: 'c p u'", "cpu, cuda:0, cpu@avx2", None),
        ("devices", "cpu@avx3", "unknown variant of cpu: avx3", "one of baseline, avx2", "did you mean avx2?"),
        ("set", ["cudnn_benchmrk=true"], "unknown setting: cudnn_benchmrk", "one of", "did you mean cudnn_benchmark?"),
        ("set", "x", "settings are a table or a list", "NAME=VALUE", None),
        ("devices", "cpu:0", "cpu has no index: 'cpu:0'", "cpu", None),
        ("tolerance", [{"atol": 1, "rtol": 1, "layers": "x"}], "a tolerance has no field layers", "arch", "layer?"),
    ],
)  # fmt: skip
def test_messages(name: str, value: object, what: str, wanted: str, hint: str | None) -> None:
    error = refusal({name: value}, Edge.TOML)
    assert error is not None
    assert error.what == what
    assert wanted in (error.wanted or "")
    assert (error.hint or "").endswith(hint) if hint else not error.hint


# --- in the words of the caller ---------------------------------------------------------------------------------------


def said(options: Options) -> str:
    with pytest.raises(ConsistencyError) as caught:
        prepare(options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("edge", "where", "wanted"),
    [
        (Edge.COMMAND_LINE, "--load", "--for with"),
        (Edge.PYTEST, "--consistency-load", "--consistency-for with"),
        (Edge.TOML, "load", "for with"),
    ],
)
def test_an_error_found_later_names_options_as_they_were_given(edge: Edge, where: str, wanted: str) -> None:
    text = said(gather_options(None, {"load": True}, edge))
    assert f"where:  {where}\n" in text
    assert f"wanted: {wanted}" in text
    assert said(gather_options(None, {"load": True}, edge)) == said(Options(load=True, source=Source(edge=edge)))


def test_python_has_the_names_of_its_keywords() -> None:
    assert "where:  load\n" in said(make_options({"load": True}))
    assert "where:  devices\n" in said(make_options({"devices": "cuda:99"}))


def test_an_option_of_a_file_is_named_with_the_file_and_one_beside_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text('base = "not a folder"\ndevices = "cuda:99"\n')
    assert f"where:  base in {path}\n" in said(gather_options(path, {}, Edge.PYTEST))
    assert "where:  --consistency-base\n" in said(gather_options(path, {"base": "<>"}, Edge.PYTEST))
    given = {"base": "builtin:llama"}
    assert f"where:  devices in {path}\n" in said(gather_options(path, given, Edge.COMMAND_LINE))


def test_the_cases_of_a_suite_name_their_own_table(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text('base = "<>"\n[[case]]\nname = "a"\n[[case]]\nname = "b"\nbase = "also <>"\n')
    suite = gather_suite(path, {}, Edge.PYTEST)
    assert suite is not None
    for options, where in zip(suite.cases, (f"base in {path}", f"base in [[case]] 2 of {path}"), strict=True):
        assert f"where:  {where}\n" in said(options)
    with pytest.raises(UsageError) as caught:
        suite.chosen(["c-a"])
    assert caught.value.hint is None


def test_what_looks_like_an_option_and_is_none_stays(tmp_path: Path) -> None:
    error = UsageError("give --adapter or --adapters, not --consistency-adapter", where="a--base, x/--base")
    Source(edge=Edge.PYTEST).reword(error)
    assert error.what == "give --consistency-adapter or --adapters, not --consistency-adapter"
    assert error.where == "a--base, x/--consistency-base"
    assert str(Source(edge=Edge.PYTEST).reword(error)) == str(error)


def test_pickles_are_allowed_by_the_option_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ConsistencyError) as caught:
        prepare_case(Options(base=str(tmp_path), source=Source(edge=Edge.PYTEST)))
    assert "or allow it with --consistency-allow-pickle" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (Options(base="builtin:lama"), "there is no built-in case 'lama'", "did you mean llama?"),
        (Options(device_map="blanced"), "not a device map", "did you mean balanced?"),
    ],
)
def test_names_that_are_looked_up_later_are_offered_too(options: Options, what: str, hint: str) -> None:
    with pytest.raises(ConsistencyError) as caught:
        prepare_case(options)
    assert (caught.value.what, caught.value.hint) == (what, hint)


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [("gpu:0", "cuda:0"), ("gpu0", "cuda:0"), ("nvidia:1", "cuda:1"), ("cuda:7", "cuda:"), ("cud:0", "cuda:0")],
)
def test_a_device_by_another_name_is_understood(given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from consistency.devices import discovery
    from consistency.devices.spec import DeviceInfo, DeviceSpec

    there = tuple(
        DeviceInfo(spec=DeviceSpec(type="cuda", index=i), architecture="Hopper sm_90", model="H100") for i in range(2)
    )
    monkeypatch.setattr(discovery, "accelerators", lambda: there)
    with pytest.raises(UsageError, match="this machine has no device") as caught:
        select([given])
    assert (caught.value.hint or "").startswith(f"did you mean {meant}")
    assert caught.value.got == "cpu, cuda:0, cuda:1"
