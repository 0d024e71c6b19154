"""The `bound` rule of small tensors: each element within its running error bound."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from consistency.capture.records import TensorRecord
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.digest import TensorDigest
from consistency.numerics.error import measure_against_exact
from consistency.numerics.measure import Measure
from consistency.numerics.rules import Rule
from consistency.numerics.running_error import Bounded, measure_tracked
from consistency.worker.recorder import Recorder


def record_bounded(
    record: Recorder,
    stage: str,
    layer: str,
    tensor: str,
    *,
    actual: torch.Tensor,
    exact: Bounded,
    digests: Sequence[TensorDigest] = (),
    in_tf32: Callable[[], Measure] | None = None,
) -> None:
    """Record a tensor on the CPU by its exact value's bound, or by the user's tolerance around the same value.

    Parameters
    ----------
    in_tf32 : callable, optional
        Measures the tensor against its bound with TF32 products, to recognise these where it is outside.
    """
    tolerance = record.tolerance(stage=stage, layer=layer, dtype=actual.dtype)
    value, allowed = torch.from_numpy(exact.value), torch.from_numpy(exact.allowed)
    record.computed(
        TensorRecord(stage, layer, tensor, rule=Rule.BOUND, status="measured"),
        actual,
        digests=digests,
        measure=measure_against_exact(actual, value, tolerance) if tolerance else measure_tracked(actual, exact),
        tolerance=tolerance,
        chunks=lambda: exact_chunks(actual, value, tolerance or allowed),
        diagnose=functools.partial(diagnose_computed, in_tf32=None if tolerance else in_tf32),
        ingredients={"exact": value, "allowed": None if tolerance else allowed},
    )
