"""Rows that one cause explains -> one finding: *all 128 lora_B tensors on cuda:1 and cuda:3*, not 256 of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from consistency.comparison import BAD, Finding, Row, TensorComparison
from consistency.judge import KEPT, OWN_FILE
from consistency.naming import SETTINGS_LAYER, WHOLE_MODEL

_MOST_DETAILS = 5
_MOST_SAID = 3

_PHRASES = {
    "zeros": "zeros where the file is not zero",
    "bit-flip": "single bits flipped",
    "swapped": "the bytes of another tensor",
    "permuted": "the right elements in another order",
    "block": "other bytes in one contiguous range",
    "rounded-to-bf16": "the file's values rounded through bfloat16",
    "rounded-to-fp16": "the file's values rounded through float16",
    "rounded-to-tf32": "the file's values rounded through TF32",
    "recomputed": "recomputed on this device when the adapter was loaded",
    "never-written": "what was there before still there: nothing was ever written",
    "fresh-init": "the values the adapter was made with, not the file's",
    "stale": "bytes that lay in memory before",
    "wrong-scale": "one constant factor off",
    "tf32-products": "outside the float32 bound, and inside the one of TF32 products",
    "signed-zero": "zeros of the other sign",
    "non-finite": "NaN or infinity where the reference is finite",
    "missing": "missing",
    "unexpected": "no place in the model",
    "shape": "another shape",
    "dtype": "another dtype",
    "inactive": "not active",
    "unknown": "other bits",
    "settings": "another rank or scaling",
    "ids-past-vocabulary": "ids past the vocabulary",
    "labels-past-vocabulary": "labels past the vocabulary",
    "ids-changed": "ids changed on the way to a device",
    "labels-changed": "labels changed on the way to a device",
    "changed-on-the-way": "other bits after the way to a device",
    "other-answer": "another answer than on one device",
    "does-not-run": "the model does not run",
    "layers-missed": "adapter layers that PEFT does not find through the wrapper",
    "hidden": "hidden by the wrapper",
    "keys": "other keys through the wrapper",
    "held-twice": "storages held twice",
    "more-bytes": "more bytes than the plain model holds",
    "more-memory": "more memory in a training step than without the wrapper",
}
_EVIDENCE = {
    "ratio": "{} times what it should be",
    "offset_bytes": "from byte {}",
    "length_bytes": "{} bytes long",
    "tf32_bound_ratio": "{} of the bound of TF32 products",
    "when": "when {}",
    "also": "could be {} too",
    "unit": "counted in {}: torch has no such dtype",
}
"""What other evidence says, by its name."""

_COMPUTED = {
    "zeros": "nothing computed, all zeros",
    "bit-flip": "single bits flipped after it was computed",
    "rounded-to-bf16": "rounded through bfloat16 after it was computed",
    "rounded-to-fp16": "rounded through float16 after it was computed",
    "rounded-to-tf32": "rounded through TF32 after it was computed",
    "block": "one contiguous range outside the bound",
    "non-finite": "NaN or infinity where the exact value is finite",
}
_LIMITS = {"bound": "the bound", "relative": "the bound", "user": "the tolerance given", "limit": "the limit"}


@dataclass(slots=True)
class _Group:
    """Rows that one cause explains."""

    tensors: list[TensorComparison] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)


def find_causes(
    tensors: Sequence[TensorComparison], *, next_step: Callable[[Sequence[str]], str | None]
) -> Iterable[Finding]:
    """Group what is not as it should be by stage, road, diagnosis and the workers that it hit.

    Parameters
    ----------
    tensors : sequence of TensorComparison
    next_step : callable
        Given the workers concerned, what to type next.
    """
    groups: dict[tuple[str, str, str, tuple[str, ...]], _Group] = {}
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for tensor in tensors:
        if tensor.layer not in (SETTINGS_LAYER, WHOLE_MODEL):  # these stand for no tensor of the model
            count = totals.setdefault((tensor.stage, tensor.road), {})
            count[tensor.tensor] = count.get(tensor.tensor, 0) + 1
        by_word: dict[str, list[Row]] = {}
        for row in tensor.rows:
            if row.status in BAD:
                by_word.setdefault(row.diagnosis or row.status, []).append(row)
        for word, rows in by_word.items():
            key = (tensor.stage, tensor.road, word, tuple(row.worker for row in rows))
            group = groups.setdefault(key, _Group())
            group.tensors.append(tensor)
            group.samples.append(rows[0])
    roads = {tensor.road for tensor in tensors}
    causes = {(stage, road, word) for stage, road, word, _ in groups}
    wrong: dict[str, set[str]] = {}  # by road, the workers that do not hold the right bytes
    for stage, road, _, workers in groups:
        if stage in ("base", "adapter"):
            wrong.setdefault(road, set()).update(workers)
    for (stage, road, word, workers), group in groups.items():
        computed = group.tensors[0].rule in _LIMITS and group.tensors[0].rule != "limit"
        phrase = (_COMPUTED if computed else {}).get(word) or _PHRASES.get(word, word)
        if word == "unknown" and computed:
            phrase = " or ".join(dict.fromkeys(f"outside {_LIMITS.get(t.rule, 'the bound')}" for t in group.tensors))
        what = _how_many(group.tensors, totals.get((stage, road), {}))
        where = f" on the road {road}" if len(roads) > 1 else ""
        yield Finding(
            kind=word,
            severity="error",
            message=(
                f"{stage} · {names(workers)} · {_said(group) or f'{phrase} in {what}'}{where}"
                f"{_only_here(causes, stage, road, word)}{_files_differ(group.samples)}"
                f"{_follows(wrong, stage, road, workers)}"
            ),
            workers=workers,
            tensors=tuple(t.name for t in group.tensors),
            detail=tuple(
                describe(t, row) for t, row in zip(group.tensors[:_MOST_DETAILS], group.samples, strict=False)
            ),
            next=next_step(workers),
        )


def _said(group: _Group) -> str:
    """Return the workers' own sentences of facts, which say more than a word and a count do."""
    if group.tensors[0].rule != "limit":
        return ""
    said = list(dict.fromkeys(row.reason for row in group.samples if row.reason))
    more = f"; and {len(said) - _MOST_SAID} more" if len(said) > _MOST_SAID else ""
    return "; ".join(said[:_MOST_SAID]) + more


def _only_here(causes: Set[tuple[str, str, str]], stage: str, road: str, word: str) -> str:
    """Say what the other road tells of the cause: alone right and together wrong is the copy between devices."""
    is_alone = road == "shared" and (stage, "isolated", word) not in causes
    return ", right bytes when alone: a copy between devices" if is_alone else ""


def _follows(wrong: Mapping[str, Set[str]], stage: str, road: str, workers: Sequence[str]) -> str:
    """Say where a computed stage is wrong on workers whose bytes were wrong before it."""
    if stage not in ("merged", "forward"):
        return ""
    return ": it follows from the wrong bytes above" if set(workers) <= wrong.get(road, set()) else ""


def _files_differ(rows: Sequence[Row]) -> str:
    """Say where a worker is right about its own file, which is another one than the reference's."""
    return ": the files differ" if all(row.evidence.get("own_file") == OWN_FILE for row in rows) else ""


def describe(tensor: TensorComparison, row: Row) -> str:
    """Say in one line what is off in one tensor: its worst element, both values, and both bit patterns.

    Evidence comes from captures made elsewhere: whatever stands in it is shown, and nothing of it is relied on.
    """
    parts = [f"{tensor.layer}.{tensor.tensor}"]
    evidence = row.evidence
    if row.reason:
        parts.append(row.reason)
    if row.worst_index is not None:
        parts[0] += f"{list(row.worst_index)}"
        if "actual" in evidence:
            got, wanted = _number(evidence["actual"]), _number(evidence.get("expected"))
            parts.append(
                f"got {got} ({evidence.get('actual_bits')}), wanted {wanted} ({evidence.get('expected_bits')})"
            )
    if "bits" in evidence:
        fields = evidence.get("fields")
        parts.append(f"bit {_words(evidence['bits'])}" + (f" ({_words(fields)})" if fields else ""))
    if row.mismatched:
        parts.append(f"{row.mismatched} of {row.elements} elements")
    if row.bound_ratio is not None:
        parts.append(f"{_number(row.bound_ratio)} of {_LIMITS.get(tensor.rule, 'the bound')}")
    if KEPT in evidence:
        parts.append(str(evidence[KEPT]))
    for word in ("got", "wanted", "holds", "own_file"):
        if word in evidence:
            parts.append(f"{word.replace('_', ' ')} {evidence[word]}" if word != "own_file" else str(evidence[word]))
    for word, text in _EVIDENCE.items():
        if evidence.get(word) is not None:
            parts.append(text.format(_number(evidence[word])))
    blocks = evidence.get("blocks")
    if blocks and isinstance(blocks, list) and row.worst_index is None:
        parts.append(f"blocks {blocks[:8]} of 256 KiB")
    if evidence.get("inactive"):
        parts.append(f"inactive: {_words(evidence['inactive'])}")
    return " · ".join(parts)


def _how_many(tensors: Sequence[TensorComparison], totals: dict[str, int]) -> str:
    kinds = {t.tensor for t in tensors}
    if len(tensors) == 1:
        return f"{tensors[0].tensor} of {tensors[0].layer}"
    if len(kinds) == 1:
        name = next(iter(kinds))
        return f"{len(tensors)} of {totals[name]} {name} tensors"
    return f"{len(tensors)} of {sum(totals.values())} tensors"


def names(labels: Sequence[str]) -> str:
    """Name workers in a sentence, six at most."""
    unique = list(dict.fromkeys(labels))
    return ", ".join(unique) if len(unique) <= 6 else f"{', '.join(unique[:5])} and {len(unique) - 5} more"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
