"""Tensors that captures kept, held against one another: for captures made apart, with files that differ."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from consistency.capture.folder import Capture, blob_key
from consistency.capture.records import TensorMeasure
from consistency.errors import CaptureError
from consistency.numerics.words import Word

if TYPE_CHECKING:
    import torch


def measure_kept(
    actual: tuple[Capture, str | None], expected: tuple[Capture, str | None]
) -> tuple[TensorMeasure | None, Word | None, dict[str, Any]]:
    """Measure two kept tensors and name their difference.

    Parameters
    ----------
    actual, expected : tuple of Capture and str or None
        Where each lies.

    Returns
    -------
    TensorMeasure or None
        None where either was not kept, or their structure differs.
    Word or None
        Of the diagnosis.
    dict
        Its evidence.
    """
    if actual[1] is None or expected[1] is None:
        return None, None, {}
    from consistency.numerics.diagnosis_moved import diagnose_moved, diagnose_structure
    from consistency.numerics.distance import measure

    a, e = _read(actual[0], actual[1]), _read(expected[0], expected[1])
    structure = diagnose_structure(a, e)
    if structure is not None:
        return None, structure.word, structure.evidence
    found = measure(a, e)
    diagnosis = diagnose_moved(a, e, found)
    return TensorMeasure.of(found), diagnosis.word, diagnosis.evidence


def _read(capture: Capture, name: str) -> torch.Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from consistency.numerics.digest import as_bytes
    from consistency.numerics.dtype import name_of

    path = capture.blob_path(name)
    try:
        tensor = load_file(path, device="cpu")["tensor"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CaptureError("a kept tensor cannot be read", where=path, got=error) from None
    if blob_key(name_of(tensor.dtype), tensor.shape, as_bytes(tensor).numpy().data) != name:
        raise CaptureError(
            "a kept tensor is not the one that was kept: its bytes do not give its name",
            where=path,
            got=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        )
    return tensor  # type: ignore[no-any-return]  # safetensors has no types here
