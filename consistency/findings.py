"""Rows -> findings: one sentence per cause, in order of weight, with what to type next.

*All 128 lora_B tensors on cuda:1 and cuda:3* is one finding, not 256.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from consistency.comparison import BAD, Finding, Row, TensorComparison, tensor_name
from consistency.given import find_tolerances
from consistency.judge import KEPT, OWN_FILE
from consistency.participants import Key, Participant

_SOFTWARE = ("torch", "cuda", "cudnn", "transformers", "peft", "safetensors", "accelerate", "numpy", "python")
_MOST_DETAILS = 5
_WEIGHT = {"error": 0, "warning": 1, "note": 2}

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
}
_LIMITS = {"bound": "the bound", "relative": "the bound", "user": "the tolerance given"}


def find(
    participants: Sequence[Participant],
    reference: Participant | None,
    tensors: Sequence[TensorComparison],
    *,
    damage: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """Return everything to act on, the weightiest first."""
    found = [
        *(Finding(kind="damaged-capture", severity="error", message=text) for text in damage),
        *_lost(participants),
        *_software(participants),
        *_inputs(participants),
        *_rows(tensors, participants, reference),
        *_not_repeatable(tensors),
        *_same_program(participants, tensors),
        *_settings(participants),
        *find_tolerances(participants),
        *_skipped(tensors),
    ]
    return tuple(sorted(found, key=lambda finding: _WEIGHT[finding.severity]))


def _lost(participants: Sequence[Participant]) -> Iterable[Finding]:
    alike: dict[tuple[str, str | None, str | None], list[Participant]] = {}
    for p in participants:
        if p.info.status != "ok":
            alike.setdefault((p.info.status, p.info.reason, p.info.stack), []).append(p)
    for (status, reason, stack), lost in alike.items():
        verb = "failed" if status != "lost" else "was lost" if len(lost) == 1 else "were lost"
        yield Finding(
            kind="lost-worker" if status == "lost" else "failed-worker",
            severity="error",
            message=f"{names([_place(p) for p in lost])} {verb}: {reason}",
            workers=tuple(p.label for p in lost),
            detail=tuple((stack or "").splitlines()[-12:]),
        )


def _software(participants: Sequence[Participant]) -> Iterable[Finding]:
    """Captures from other versions are compared; the difference in environment is said first."""
    for name in _SOFTWARE:
        values: dict[str, list[str]] = {}
        for p in participants:
            if name in p.info.environment:
                values.setdefault(str(p.info.environment[name]), []).append(p.label)
        if len(values) > 1:
            text = "; ".join(f"{value}: {names(labels)}" for value, labels in values.items())
            yield Finding(kind="environment", severity="note", message=f"{name} is not the same everywhere: {text}")


def _inputs(participants: Sequence[Participant]) -> Iterable[Finding]:
    digests: dict[str, list[str]] = {}
    for p in participants:
        if p.info.inputs_digest is not None:
            digests.setdefault(p.info.inputs_digest, []).append(p.label)
    if len(digests) > 1:
        first, *others = digests.values()
        workers = tuple(label for labels in others for label in labels)
        yield Finding(
            kind="inputs",
            severity="error",
            message=f"forward · {names(workers)} had other inputs than {names(first)}: outputs are not comparable",
            workers=workers,
            next="give the same --inputs, --level and base to every capture",
        )


def _settings(participants: Sequence[Participant]) -> Iterable[Finding]:
    changed: dict[tuple[str, str, str, str], list[str]] = {}
    refused: dict[tuple[str, str, str], list[str]] = {}
    for p in participants:
        for change in p.info.changes:
            key = (change.setting, str(change.asked), str(change.in_force), change.stage)
            changed.setdefault(key, []).append(p.label)
        for name, asked in p.info.asked.items():
            if name in p.info.in_force and p.info.in_force[name] != asked:
                refused.setdefault((name, str(asked), str(p.info.in_force[name])), []).append(p.label)
    for (setting, asked_for, value, stage), labels in changed.items():
        yield Finding(
            kind="setting-changed",
            severity="warning",
            message=f"{setting} was set to {value} during {stage}, on {names(labels)}; asked for was {asked_for}",
            workers=tuple(labels),
        )
    for (setting, asked_for, value), labels in refused.items():
        yield Finding(
            kind="setting-refused",
            severity="warning",
            message=f"{setting} is {value} on {names(labels)} although {asked_for} was asked for",
            workers=tuple(labels),
        )


@dataclass(slots=True)
class _Group:
    """Rows that one cause explains."""

    tensors: list[TensorComparison] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)


def _rows(
    tensors: Sequence[TensorComparison], participants: Sequence[Participant], reference: Participant | None
) -> Iterable[Finding]:
    groups: dict[tuple[str, str, str, tuple[str, ...]], _Group] = {}
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for tensor in tensors:
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
        phrase = _PHRASES.get(word, word)
        if word == "unknown" and group.tensors[0].rule in _LIMITS:
            phrase = " or ".join(dict.fromkeys(f"outside {_LIMITS.get(t.rule, 'the bound')}" for t in group.tensors))
        what = _how_many(group.tensors, totals[stage, road])
        where = f" on the road {road}" if len(roads) > 1 else ""
        yield Finding(
            kind=word,
            severity="error",
            message=(
                f"{stage} · {names(workers)} · {phrase} in {what}{where}"
                f"{_only_here(causes, stage, road, word)}{_files_differ(group.samples)}"
                f"{_follows(wrong, stage, road, workers)}"
            ),
            workers=workers,
            tensors=tuple(t.name for t in group.tensors),
            detail=tuple(
                describe(t, row) for t, row in zip(group.tensors[:_MOST_DETAILS], group.samples, strict=False)
            ),
            next=_next(participants, reference, workers),
        )


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
    blocks = evidence.get("blocks")
    if blocks and isinstance(blocks, list) and row.worst_index is None:
        parts.append(f"blocks {blocks[:8]} of 256 KiB")
    if evidence.get("inactive"):
        parts.append(f"inactive: {_words(evidence['inactive'])}")
    return " · ".join(parts)


def _not_repeatable(tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    found: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        for row in tensor.rows:
            if row.repeated is False:
                found.setdefault((row.worker, tensor.stage), []).append(tensor.name)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (worker, stage), where in found.items():
        alike.setdefault((stage, tuple(where)), []).append(worker)
    for (stage, same), workers in alike.items():
        yield Finding(
            kind="not-repeatable",
            severity="error",
            message=(
                f"{stage} · {names(workers)} · a second run on the same device gave other bits in {len(same)} tensors"
            ),
            workers=tuple(workers),
            tensors=tuple(dict.fromkeys(same)),
        )


def _same_program(participants: Sequence[Participant], tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    """Devices of one model that run one program on the same bytes are expected to agree to the bit."""
    off = {row.worker for t in tensors if t.stage in ("base", "adapter") for row in t.rows if row.status in BAD}
    groups: dict[tuple[Any, ...], list[Participant]] = {}
    for p in participants:
        if p.program is not None and p.label not in off and p.info.status == "ok":
            groups.setdefault((*p.program, p.info.inputs_digest, p.case.dtype), []).append(p)
    for members in groups.values():
        if len(members) < 2:
            continue
        keys = [key for key, record in members[0].records.items() if record.rule != "bitwise"]
        for stage in dict.fromkeys(key[0] for key in keys):
            differing = [key for key in keys if key[0] == stage and not _agree(members, key)]
            if differing:
                labels = tuple(dict.fromkeys(p.label for p in members))
                yield Finding(
                    kind="same-model",
                    severity="error",
                    message=(
                        f"{stage} · {names(labels)} are the same model with the same software, and differ in bits "
                        f"in {len(differing)} tensors"
                    ),
                    workers=labels,
                    tensors=tuple(tensor_name(*key) for key in differing),
                    detail=(f"first: {tensor_name(*differing[0])}",),
                )


def _agree(members: Sequence[Participant], key: Key) -> bool:
    digests = {m.records[key].digest for m in members if key in m.records}
    return len(digests - {None}) <= 1


def _skipped(tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    reasons: dict[tuple[str, str], dict[str, list[str]]] = {}
    for tensor in tensors:
        for row in tensor.rows:
            if row.status == "skipped":
                found = reasons.setdefault((tensor.stage, row.reason or "no reason given"), {})
                found.setdefault(row.worker, []).append(tensor.name)
    for (stage, reason), by_worker in reasons.items():
        where = list(dict.fromkeys(name for found in by_worker.values() for name in found))
        yield Finding(
            kind="skipped",
            severity="note",
            message=f"{stage} · {_count(len(where), 'tensor')} skipped on {names(list(by_worker))}: {reason}",
            workers=tuple(by_worker),
            tensors=tuple(where),
        )


def _how_many(tensors: Sequence[TensorComparison], totals: dict[str, int]) -> str:
    kinds = {t.tensor for t in tensors}
    if len(tensors) == 1:
        return f"{tensors[0].tensor} of {tensors[0].layer}"
    if len(kinds) == 1:
        name = next(iter(kinds))
        return f"{len(tensors)} of {totals[name]} {name} tensors"
    return f"{len(tensors)} of {sum(totals.values())} tensors"


def _next(participants: Sequence[Participant], reference: Participant | None, workers: Sequence[str]) -> str | None:
    """Return a command that looks at the same again; captures from elsewhere have none."""
    if reference is None or len({id(p.capture) for p in participants}) > 1:
        return None
    case = reference.case
    devices = dict.fromkeys([reference.info.name, *workers])
    parts = ["consistency run", f"--base {case.base}"]
    parts += [f"--adapter {case.adapter}"] if case.adapter else []
    parts += [f"--dtype {case.dtype}"] if case.dtype != "auto" else []
    parts += [f"--tolerance {shlex.quote(str(override))}" for override in case.tolerance]
    return " ".join([*parts, f"--devices {','.join(devices)}", "--repeat 2"])


def _place(p: Participant) -> str:
    return p.label if p.road == "isolated" else f"{p.label} ({p.road})"


def names(labels: Sequence[str]) -> str:
    """Name workers in a sentence, six at most."""
    unique = list(dict.fromkeys(labels))
    return ", ".join(unique) if len(unique) <= 6 else f"{', '.join(unique[:5])} and {len(unique) - 5} more"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
