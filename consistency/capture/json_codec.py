"""Write and read JSON with every floating-point number: finite ones as numbers, NaN and infinity as strings.

JSON has no NaN. Encoders write `null`, which is how a NaN that was the worst number of a run gets lost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from consistency.errors import CaptureError
from consistency.numerics.real import Real

T = TypeVar("T")

_MOST_TEXT = 300  # characters of one that cannot be written


def json_number(value: float) -> float | str:
    """Return `value` if it is finite, otherwise its name."""
    if math.isfinite(value):
        return float(value)
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def encode_json(value: object, *, indent: int = 0) -> bytes:
    """Encode dataclasses, structs and containers of them as JSON.

    Raises
    ------
    CaptureError
        A text, such as the path of a folder above, is not UTF-8.
    """
    try:
        raw = msgspec.json.encode(value, enc_hook=_encode_hook)
    except UnicodeEncodeError as error:
        raise CaptureError(
            "a text that is not UTF-8 cannot be written as JSON",
            got=os.fsencode(error.object).decode(errors="backslashreplace")[:_MOST_TEXT],
            hint="rename the file or folder, or set TMPDIR to another one",
        ) from None
    return msgspec.json.format(raw, indent=indent) if indent else raw


def decode_json(raw: bytes | str, kind: type[T]) -> T:
    """Decode JSON into `kind`, checking every field; raise `msgspec.ValidationError` or `msgspec.DecodeError`."""
    return msgspec.json.decode(raw, type=kind, dec_hook=_decode_hook)


def _encode_hook(value: Any) -> Any:
    if isinstance(value, Real):
        return json_number(value)
    if isinstance(value, Sequence):
        return tuple(value)
    raise NotImplementedError(f"cannot write a {type(value).__name__} as JSON")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is Real:
        if type(value) is float:
            return Real(value)
        if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
            raise ValueError(f"expected a number, 'nan', 'inf' or '-inf', got {value!r}")
        try:
            return Real(value)
        except OverflowError:
            raise ValueError("an integer too large for a float64") from None
    raise NotImplementedError(f"cannot read a {kind.__name__} from JSON")
