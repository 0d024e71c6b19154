"""Compare tensors that captures stored: for captures made apart, from files that differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from consistency.capture.folder import Capture, blob_key
from consistency.errors import CaptureError
from consistency.numerics.measure import Measure
from consistency.numerics.words import Word

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDifference:
    """How two stored tensors differ."""

    # none where either was not stored or could not be read, or where their structure differs
    measure: Measure | None = None
    word: Word | None = None  # none where nothing was compared
    evidence: dict[str, Any] = field(default_factory=dict)
    unread: bool = False  # one of them was stored and cannot be read


def compare_stored(actual: tuple[Capture, str | None], expected: tuple[Capture, str | None]) -> StoredDifference:
    """Measure and name the difference of two stored tensors, each given by its capture and its name there."""
    if actual[1] is None or expected[1] is None:
        return StoredDifference()
    from consistency.numerics.diagnosis_moved import diagnose_moved, diagnose_structure
    from consistency.numerics.distance import measure

    try:
        a, e = read_stored(actual[0], actual[1]), read_stored(expected[0], expected[1])
    except CaptureError as error:
        return StoredDifference(evidence={"kept": error.what}, unread=True)
    structure = diagnose_structure(a, e)
    if structure is not None:
        return StoredDifference(word=structure.word, evidence=structure.evidence)
    found = measure(a, e)
    diagnosis = diagnose_moved(a, e, found)
    return StoredDifference(measure=found, word=diagnosis.word, evidence=diagnosis.evidence)


def read_stored(capture: Capture, name: str) -> torch.Tensor:
    """Read a tensor that a capture stored; raise `CaptureError` if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from consistency.numerics.digest import as_bytes
    from consistency.numerics.dtype import name_of

    path = capture.blob_path(name)
    try:
        tensor = load_file(path, device="cpu")["tensor"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CaptureError("a stored tensor cannot be read", where=path, got=error) from None
    if blob_key(name_of(tensor.dtype), tensor.shape, as_bytes(tensor).numpy().data) != name:
        raise CaptureError(
            "a stored tensor was changed: its bytes do not match its name",
            where=path,
            got=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        )
    return tensor  # type: ignore[no-any-return]  # safetensors has no types here
