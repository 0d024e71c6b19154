"""One line of detail per tensor: what differs, where, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from consistency.capture.soak import ChangedTensor
from consistency.capture.wording import counted
from consistency.case import standard
from consistency.comparison.result import Outcome, TensorComparison
from consistency.numerics.rules import Rule

_EVIDENCE = {
    "offset_bytes": "from byte {}",
    "length_bytes": "{} bytes long",
    "tf32_bound_ratio": "{}× the tolerance of TF32 products",
    "when": "when {}",
    "also": "could also be {}",
    "unit": "counted in {}: torch has no such dtype",
}
"""How other evidence is shown, by its name."""

_OF_A_PEAK = {
    "layers": "peak is {}× the layer's weight",
    "adding_peak_bytes": "{} bytes while the delta was added",
    "adding_allowed_bytes": "{} allowed",
    "kept_bytes": "{} bytes still allocated at the end",
    "kept_allowed_bytes": "{} allowed",
}
"""The same of memory, whose names mean something else elsewhere."""

CORRECTLY_ROUNDED = "the exact values correctly rounded: the tolerance is below one rounding of "
"""What a user's tolerance fails, and no device could compute better; a dtype follows."""


def describe(tensor: TensorComparison, row: Outcome) -> str:
    """Describe one wrong tensor in one line: its worst element, both values, and both bit patterns.

    Evidence may come from a stranger's capture: it is shown as it is, and nothing relies on it.
    """
    evidence = row.evidence
    place = f"{tensor.layer}.{tensor.tensor}" + (f"{list(row.worst_index)}" if row.worst_index is not None else "")
    parts = [place, row.reason or ""]
    if "tolerance" in evidence and row.mismatched == 0:
        parts.append(CORRECTLY_ROUNDED + tensor.dtype)
    parts += _element(evidence, row.worst_index, f"{row.reference} has" if row.own_file else "wanted")
    if row.mismatched:
        parts.append(f"{row.mismatched} of {row.elements} elements")
    if row.ratio is not None:
        # a tolerance may be for some architectures only: what judged this row is in its own evidence
        allowed = "the limit" if tensor.rule == Rule.LIMIT else "tolerance"
        allowed = "the user tolerance" if "tolerance" in evidence else allowed
        parts.append(f"{_number(row.ratio)}× {allowed}")
    parts.append(str(evidence.get("kept", "")))
    names = {"got": "got", "wanted": f"{row.reference} has" if row.own_file else "wanted", "holds": "holds"}
    parts += [f"{text} {_counted(evidence[name])}" for name, text in names.items() if name in evidence]
    parts.append(str(evidence.get("own_file", "")))
    if evidence.get("ratio") is not None:
        of = f"{evidence['of']} is " if "of" in evidence else ""
        parts.append(f"{of}{_number(evidence['ratio'])}× the reference")
    shown = _OF_A_PEAK | _EVIDENCE if tensor.stage == standard.MEMORY else _EVIDENCE
    parts += [text.format(_number(evidence[k])) for k, text in shown.items() if evidence.get(k) is not None]
    blocks = evidence.get("blocks")
    if blocks and isinstance(blocks, list) and row.worst_index is None:
        parts.append(f"blocks {blocks[:8]} of 256 KiB")
    if evidence.get("inactive"):
        parts.append(f"inactive: {_listed(evidence['inactive'])}")
    return " · ".join(part for part in parts if part)


def describe_change(change: ChangedTensor) -> str:
    """Describe one tensor that changed during a soak in one line, as `describe` does."""
    evidence, found = change.evidence, change.measure
    index = None if found is None else found.worst_index
    parts = [f"{change.layer}.{change.tensor}" + (f"{list(index)}" if index is not None else "")]
    parts += _element(evidence, index, "wanted")
    if found is not None:
        parts.append(f"{found.mismatched} of {found.elements} elements")
    parts.append(f"in {change.occurrences.count} repeats" if change.occurrences.count > 1 else "in one repeat")
    return " · ".join(parts)


def _element(evidence: Mapping[str, Any], index: Sequence[int] | None, wanted: str) -> Iterator[str]:
    """Yield both values of the worst element with their bit patterns, and the bits that differ."""
    if index is not None and "actual" in evidence:
        got = f"got {_number(evidence['actual'])} ({evidence.get('actual_bits')})"
        yield f"{got}, {wanted} {_number(evidence.get('expected'))} ({evidence.get('expected_bits')})"
    if "bits" in evidence:
        fields = evidence.get("fields")
        yield f"bit {_listed(evidence['bits'])}" + (f" ({_listed(fields)})" if fields else "")


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _counted(value: Any) -> str:
    """Write the settings of layers, each with the number that have it."""
    if not isinstance(value, dict) or not all(isinstance(layers, int) for layers in value.values()):
        return str(value)
    return ", ".join(f"{text} in {counted(layers, 'layer')}" for text, layers in value.items())


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
