"""The fields of `report.json` that scripts may rely on."""

from __future__ import annotations

from typing import Any

ROW = {
    "worker", "reference", "status", "elements", "mismatched", "max_abs", "mean_abs", "max_rel", "rms", "max_ulp",
    "ratio", "worst_index", "word", "evidence",
}  # fmt: skip
TENSOR = {"stage", "load_path", "layer", "tensor", "shape", "dtype", "rule", "classes", "rows"}
LAYER = {"layer", "tensor", "stage", "architectures"}
LAYER_CELL = {"workers", "status", "max_abs", "allowed", "ratio", "max_ulp", "classes"}
HEAD = ("schema", "tool", "created", "host", "command", "elapsed_s", "versions", "simulated", "planted", "verdict")
"""The first fields, in this order; `command` is a list of words."""
SOURCE = {"name", "created", "host", "tool", "command"}
WORKER = {"name", "architecture", "model", "uuid", "status", "reason", "environment"}


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")
