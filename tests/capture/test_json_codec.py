from __future__ import annotations

import json
import math
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.capture.json_codec import decode_json, encode_json, json_number
from consistency.errors import CaptureError
from consistency.numerics.real import Real


class Row(msgspec.Struct, frozen=True, kw_only=True):
    error: Real
    bound: Real | None = None
    name: str = ""


@dataclass(frozen=True)
class Plain:
    error: Real


@given(st.floats(allow_nan=False))
@settings(deadline=None)
def test_every_number_survives_bit_by_bit(value: float) -> None:
    raw = encode_json(Row(error=Real(value), bound=Real(value)))
    back = decode_json(raw, Row)
    assert repr(float(back.error)) == repr(float(value))
    assert type(back.error) is Real
    assert back.bound == value


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_what_is_not_finite_is_written_as_a_string(value: float, text: str) -> None:
    raw = encode_json(Row(error=Real(value)))
    assert json.loads(raw)["error"] == text
    assert repr(float(decode_json(raw, Row).error)) == repr(value)
    assert json_number(value) == text


def test_a_dataclass_is_written_too() -> None:
    assert encode_json(Plain(error=Real("nan"))) == b'{"error":"nan"}'


def test_what_is_written_is_json_that_every_reader_reads() -> None:
    raw = encode_json({"rows": [Row(error=Real("inf"), bound=Real("nan")), Row(error=Real(0.5))]}, indent=1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    table = json.loads(raw, parse_constant=refuse)
    assert [row["error"] for row in table["rows"]] == ["inf", 0.5]
    assert [row["bound"] for row in table["rows"]] == ["nan", None]
    assert raw.count(b"\n") > 4


def test_a_finite_number_stays_a_number() -> None:
    assert json_number(Real(2)) == 2.0
    assert type(json_number(Real(2))) is float
    assert encode_json(Row(error=Real(-0.0)))[:13] == b'{"error":-0.0'


@pytest.mark.parametrize("raw", ["1", "-3", "0.25", '"nan"', '"-inf"'])
def test_integers_and_names_are_read_as_numbers(raw: str) -> None:
    found = decode_json(raw, Real)
    assert type(found) is Real
    assert repr(float(found)) == repr(float(json.loads(raw)))


@pytest.mark.parametrize("raw", ['"NaN"', '"infinity"', '"1.5"', '""', "null", "[1]", "{}", "1e999", "1" + "0" * 400])
def test_anything_else_is_refused(raw: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_json(raw, Real)


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "{", "", "{'error': 1}"])
def test_what_is_no_json_is_refused(raw: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(raw, Real)


@pytest.mark.parametrize("raw", ['{"error": "x"}', '{"name": "a"}', '{"error": 1, "name": 2}'])
def test_every_field_is_checked(raw: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_json(raw, Row)


def test_other_objects_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="cannot write a object"):
        encode_json({"x": object()})
    with pytest.raises(NotImplementedError, match="cannot read a complex"):
        decode_json("1", complex)


def test_text_that_is_not_utf8_gets_one_sentence() -> None:
    """Such as the path of a folder, which Python holds with surrogates."""
    with pytest.raises(CaptureError, match="not UTF-8") as caught:
        encode_json({"out": ["/data/\udcff/run"]}, indent=1)
    assert caught.value.got == r"/data/\xff/run"
