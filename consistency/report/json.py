"""`report.json`: the contract that programs build on, schema `consistency.report/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consistency.capture import write_json
from consistency.comparison import Comparison
from consistency.numbers import encode_json

SCHEMA = "consistency.report/1"
FILE = "report.json"


def write_report(comparison: Comparison, folder: Path) -> Path:
    """Write `report.json` into a folder, whole or not at all."""
    write_json(folder / FILE, as_table(comparison))
    return folder / FILE


def as_bytes(comparison: Comparison) -> bytes:
    """Return `report.json` as bytes."""
    return encode_json(as_table(comparison), indent=1) + b"\n"


def as_table(comparison: Comparison) -> dict[str, Any]:
    """Return the report as a table of JSON values: numbers finite, NaN and infinity as strings."""
    from consistency import __version__

    fields = {name: getattr(comparison, name) for name in comparison.__struct_fields__}
    return {"schema": SCHEMA, "tool": __version__, **fields}
