"""Records made by hand, and what a comparison of them found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison, Finding
from consistency.numerics import words
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError


def digest(text: str) -> str:
    return text.encode().hex().ljust(32, "0")


def measured(**changes: Any) -> Measure:
    fields: dict[str, Any] = {
        "elements": 4, "mismatched": 2, "max_abs": Real(1e-7), "mean_abs": Real(1e-8), "rms": Real(1e-8),
        "max_rel": Real(1e-6), "max_ulp": 3, "ratio": Real(0.5), "worst_index": (0, 1),
        "worst_actual": Real(1.0), "worst_expected": Real(2.0), "worst_actual_bits": "0x1",
        "worst_expected_bits": "0x2", "flipped_bits": {}, "first_byte": None, "last_byte": None,
        "magnitude": Real(1.0),
    }  # fmt: skip
    return Measure(**{**fields, **changes})


def moved(held: str = "file", file: str = "file", tensor: str = "lora_B", **changes: Any) -> TensorRecord:
    equal = held == file
    fields: dict[str, Any] = {
        "stage": "adapter", "layer": "layers.0.q", "tensor": tensor, "shape": (2, 2), "dtype": "float32",
        "rule": "bitwise", "digest": digest(held), "reference_digest": digest(file), "reference": "file",
        "status": "equal" if equal else "outside",
        "measure": None if equal else measured(ratio=None),
        "word": None if equal else words.BIT_FLIP,
    }  # fmt: skip
    return TensorRecord(**{**fields, **changes})


def computed(bits: str = "a", ratio: float = 0.5, **changes: Any) -> TensorRecord:
    fields: dict[str, Any] = {
        "stage": "merged", "layer": "layers.0.q", "tensor": "weight", "shape": (2, 2), "dtype": "float32",
        "rule": "bound", "digest": digest(bits), "status": "within" if ratio <= 1 else "outside",
        "measure": measured(ratio=Real(ratio)), "word": words.ACCUMULATION_ORDER,
    }  # fmt: skip
    return TensorRecord(**{**fields, **changes})


MANY = 2**14
"""Independent errors of which the largest is exceeded at most twice."""


def rounding(largest: float, samples: int = MANY, drawn: int | None = None) -> RoundingError:
    return RoundingError(largest=Real(largest), samples=samples, drawn=drawn or samples)


def forward(bits: str = "a", error: float = 1e-7, made: RoundingError | None = rounding(1e-7)) -> TensorRecord:  # noqa: B008 - frozen
    return computed(
        bits, stage="forward", layer="logits", tensor="adapter_on", rule="relative", status="measured",
        shape=(2**14, 4), measure=measured(ratio=None, max_abs=Real(error)), word=None, rounding=made,
    )  # fmt: skip


def compared(*folders: Path) -> Comparison:
    return compare([read_capture(folder) for folder in folders])


def errors(comparison: Comparison) -> list[Finding]:
    return [finding for finding in comparison.findings if finding.severity == "error"]


def only_row(comparison: Comparison, worker: str) -> Any:
    (tensor,) = comparison.tensors
    row = tensor.outcome(worker)
    assert row is not None
    return row
