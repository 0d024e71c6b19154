"""The fields of `report.json` that scripts may rely on."""

from __future__ import annotations

from typing import Any

OUTCOME = {
    "stage", "load_path", "layer", "tensor", "shape", "dtype", "rule", "cohort", "bits", "status", "reference",
    "max_abs", "allowed", "ratio", "max_ulp", "mismatched", "worst_index", "word", "evidence", "reason",
}  # fmt: skip
LAYER = {"layer", "tensor", "stage", "architectures"}
LAYER_CELL = {"workers", "status", "max_abs", "allowed", "ratio", "max_ulp", "classes"}
HEAD = ("schema", "tool", "created", "host", "command", "elapsed_s", "versions", "simulated", "planted", "verdict")
"""The first fields, in this order; `command` is a list of words."""
FINDING = {"kind", "severity", "message", "workers", "tensors", "cause", "consequences", "next"}
SOURCE = {"name", "created", "host", "tool", "command"}
WORKER = {"name", "architecture", "model", "device", "uuid", "status", "reason", "environment"}


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")
