"""One line of detail per tensor: its difference, the place of its worst element, and its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from consistency.capture.names import WHERE
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
    WHERE: "{}",
    "also": "could also be {}",
    "unit": "counted in {}: torch has no such dtype",
}
"""Formats of further evidence, by its name."""

_OF_A_PEAK = {
    "layers": "peak is {}× the layer's weight",
    "adding_peak_bytes": "{} bytes while the delta was added",
    "adding_allowed_bytes": "{} allowed",
    "kept_bytes": "{} bytes still allocated at the end",
    "kept_allowed_bytes": "{} allowed",
}
"""Formats of the evidence of memory, whose names mean something else in other stages."""

CORRECTLY_ROUNDED = "the exact values correctly rounded: the tolerance is below one rounding of "
"""Description of values that a user's tolerance fails though no device could compute better; a dtype follows."""


def describe(tensor: TensorComparison, row: Outcome) -> str:
    """Describe one wrong tensor in one line: its worst element, both values, and both bit patterns.

    Evidence may come from a stranger's capture: it is shown as it is, and nothing relies on it.
    """
    expected_verb = f"{row.reference} has" if row.own_file else "wanted"
    parts = [_element_name(tensor.layer, tensor.tensor, row.worst_index), row.reason or ""]
    is_correctly_rounded = "tolerance" in row.evidence and row.mismatched == 0
    if is_correctly_rounded:
        parts.append(CORRECTLY_ROUNDED + tensor.dtype)
    parts += [
        *_element(row.evidence, row.worst_index, expected_verb),
        *_figures(tensor, row),
        *_values(row.evidence, expected_verb),
        *_other_evidence(tensor, row),
    ]
    return " · ".join(part for part in parts if part)


def describe_change(change: ChangedTensor) -> str:
    """Describe one tensor that changed during a soak in one line, as `describe` does."""
    measure = change.measure
    index = None if measure is None else measure.worst_index
    parts = [_element_name(change.layer, change.tensor, index)]
    parts += _element(change.evidence, index, "wanted")
    if measure is not None:
        parts.append(f"{measure.mismatched} of {measure.elements} elements")
    repeats = change.occurrences.count
    parts.append("in one repeat" if repeats <= 1 else f"in {repeats} repeats")
    return " · ".join(parts)


def _element_name(layer: str, tensor: str, index: Sequence[int] | None) -> str:
    """Return the name of a tensor, with the index of one element where that is known: `layer.tensor[1, 2]`."""
    return f"{layer}.{tensor}" if index is None else f"{layer}.{tensor}{list(index)}"


def _element(evidence: Mapping[str, Any], index: Sequence[int] | None, expected_verb: str) -> Iterator[str]:
    """Yield both values of the worst element with their bit patterns, and the bits that differ.

    Parameters
    ----------
    index : sequence of int or None
        Index of the worst element; None where it is not known.
    expected_verb : str
        The words before the expected value: `wanted`, or `cpu has` where neither is known to be right.
    """
    if index is not None and "actual" in evidence:
        actual = f"{_number(evidence['actual'])} ({evidence.get('actual_bits')})"
        expected = f"{_number(evidence.get('expected'))} ({evidence.get('expected_bits')})"
        yield f"got {actual}, {expected_verb} {expected}"
    if "bits" in evidence:
        bits = f"bit {_joined(evidence['bits'])}"
        fields = evidence.get("fields")
        if fields:
            bits += f" ({_joined(fields)})"
        yield bits


def _figures(tensor: TensorComparison, row: Outcome) -> Iterator[str]:
    """Yield how many elements are wrong, and the worst difference in units of its tolerance."""
    if row.mismatched:
        yield f"{row.mismatched} of {row.elements} elements"
    if row.ratio is None:
        return
    # a tolerance may be for some architectures only: what judged this row is in its own evidence
    if "tolerance" in row.evidence:
        allowed = "the user tolerance"
    elif tensor.rule == Rule.LIMIT:
        allowed = "the limit"
    else:
        allowed = "tolerance"
    yield f"{_number(row.ratio)}× {allowed}"


def _values(evidence: Mapping[str, Any], expected_verb: str) -> Iterator[str]:
    """Yield settings or structures that a tensor has and should have, and notes about its stored bytes."""
    yield str(evidence.get("kept", ""))
    for name, verb in (("got", "got"), ("wanted", expected_verb), ("holds", "holds")):
        if name in evidence:
            yield f"{verb} {_counted(evidence[name])}"
    yield str(evidence.get("own_file", ""))


def _other_evidence(tensor: TensorComparison, row: Outcome) -> Iterator[str]:
    """Yield further evidence of the diagnosis."""
    evidence = row.evidence
    if evidence.get("ratio") is not None:
        statement = f"{_number(evidence['ratio'])}× the reference"
        if "of" in evidence:
            statement = f"{evidence['of']} is {statement}"
        yield statement
    # names of evidence mean other things in the stage of memory
    formats = _OF_A_PEAK | _EVIDENCE if tensor.stage == standard.MEMORY else _EVIDENCE
    for name, text_format in formats.items():
        if evidence.get(name) is not None:
            yield text_format.format(_number(evidence[name]))
    # the blocks that differ tell the place only roughly: an element tells it better
    blocks = evidence.get("blocks")
    if blocks and isinstance(blocks, list) and row.worst_index is None:
        yield f"blocks {blocks[:8]} of 256 KiB"
    if evidence.get("inactive"):
        yield f"inactive: {_joined(evidence['inactive'])}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _counted(value: Any) -> str:
    """Write the settings of layers, each with the number of layers that have it."""
    if not isinstance(value, dict) or not all(isinstance(layers, int) for layers in value.values()):
        return str(value)
    return ", ".join(f"{setting} in {counted(layers, 'layer')}" for setting, layers in value.items())


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
