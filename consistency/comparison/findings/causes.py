"""Rows that one cause explains -> one finding: *all 128 lora_B tensors on cuda:1 and cuda:3*, not 256 of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from consistency.capture.names import SETTINGS_LAYER, WHOLE_MODEL
from consistency.case.load_path import is_alternative
from consistency.comparison.findings.load_paths import Verdict, copies, is_software, judge_load_paths, load_paths_taken
from consistency.comparison.judge import KEPT, OWN_FILE
from consistency.comparison.result import BAD, Finding, Row, TensorComparison
from consistency.numerics.words import Word

_MOST_DETAILS = 5
_MOST_SAID = 3

_EVIDENCE = {
    "ratio": "{} times what it should be",
    "offset_bytes": "from byte {}",
    "length_bytes": "{} bytes long",
    "tf32_bound_ratio": "{} of the bound of TF32 products",
    "when": "when {}",
    "also": "could be {} too",
    "unit": "counted in {}: torch has no such dtype",
    "layers": "{} times the layer's weight at its peak",
    "adding_peak_bytes": "{} bytes while the delta was added",
    "adding_allowed_bytes": "{} allowed",
    "kept_bytes": "{} bytes more than before at its end",
    "kept_allowed_bytes": "{} allowed",
}
"""What other evidence says, by its name."""

_LIMITS = {"bound": "the bound", "relative": "the bound", "user": "the tolerance given", "limit": "the limit"}


@dataclass(slots=True)
class _Group:
    """Rows that one cause explains."""

    tensors: list[TensorComparison] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    load_paths: dict[str, None] = field(default_factory=dict)


def find_causes(
    tensors: Sequence[TensorComparison], *, next_step: Callable[[Sequence[str]], str | None]
) -> Iterable[Finding]:
    """Group what is not as it should be by stage, diagnosis, the workers that it hit, and what the roads say of it.

    Parameters
    ----------
    tensors : sequence of TensorComparison
    next_step : callable
        Given the workers concerned, what to type next.
    """
    groups: dict[tuple[str, Word, Verdict, tuple[str, ...]], _Group] = {}
    by_name: dict[str, dict[str, TensorComparison]] = {}
    # `placement` makes the findings of these
    tensors = [t for t in tensors if not any(row.diagnosis == Word.TOUCHED for row in t.rows)]
    bad_names = dict.fromkeys(t.name for t in tensors if any(row.status in BAD for row in t.rows))
    for tensor in tensors:
        if tensor.name in bad_names:
            by_name.setdefault(tensor.name, {})[tensor.load_path] = tensor
    many = len({tensor.load_path for tensor in tensors if not is_alternative(tensor.load_path)}) > 1
    wrong: dict[str, set[str]] = {}  # by road, the workers that do not hold the right bytes
    for name in bad_names:
        alike: dict[tuple[str, Word, Verdict], list[tuple[Row, frozenset[str]]]] = {}
        for worker, rows in _by_worker(by_name[name]).items():
            bad, taken = load_paths_taken(worker, rows)
            if not bad:
                continue
            home = next(load_path for load_path in rows if load_path in bad)
            row, stage = rows[home], by_name[name][home].stage
            word = row.diagnosis or Word(row.status)
            verdict = judge_load_paths(word, bad, taken, stage=stage, many=many)
            alike.setdefault((home, word, verdict), []).append((row, bad))
            if stage in ("base", "adapter"):
                for load_path in bad:
                    wrong.setdefault(load_path, set()).add(worker)
        for (home, word, verdict), hit in alike.items():
            tensor = by_name[name][home]
            workers = tuple(row.worker for row, _ in hit)
            group = groups.setdefault((tensor.stage, word, verdict, workers), _Group())
            group.tensors.append(tensor)
            group.samples.append(hit[0][0])
            group.load_paths.update(dict.fromkeys(load_path for _, bad in hit for load_path in sorted(bad)))
    totals = _totals(tensors)
    for (stage, word, verdict, workers), group in groups.items():
        computed = group.tensors[0].rule in _LIMITS and group.tensors[0].rule != "limit"
        what = _how_many(group.tensors, totals.get((stage, group.tensors[0].load_path), {}))
        why = copies(word, workers, _fine(by_name, group, workers)) if verdict.hops else verdict.why
        everywhere = [
            by_name[t.name][load_path]
            for t in group.tensors
            for load_path in group.load_paths
            if load_path in by_name[t.name]
        ]
        software = is_software(everywhere, workers)
        why += ", on every device alike: no fault of a device" if software else ""
        why = "" if group.tensors[0].rule == "limit" else why  # no bytes that could have taken a road
        yield Finding(
            kind=word,
            severity="warning" if software else "error",
            message=(
                f"{stage} · {names(workers)} · {_said(group) or word.about(what, computed=computed)}{verdict.where}"
                f"{f': {why}' if why else ''}{_files_differ(group.samples)}"
                f"{_follows(wrong, stage, group.load_paths, workers)}"
            ),
            workers=workers,
            tensors=tuple(t.name for t in group.tensors),
            detail=tuple(
                describe(t, row) for t, row in zip(group.tensors[:_MOST_DETAILS], group.samples, strict=False)
            ),
            next=next_step(workers),
            load_paths=tuple(group.load_paths),
        )


def _said(group: _Group) -> str:
    """Return the workers' own sentences of facts, which say more than a word and a count do."""
    if group.tensors[0].rule != "limit":
        return ""
    said = list(dict.fromkeys(row.reason for row in group.samples if row.reason))
    more = f"; and {len(said) - _MOST_SAID} more" if len(said) > _MOST_SAID else ""
    return "; ".join(said[:_MOST_SAID]) + more


def _by_worker(load_paths: Mapping[str, TensorComparison]) -> dict[str, dict[str, Row]]:
    """Return the rows of one tensor by worker and road, the default roads first."""
    found: dict[str, dict[str, Row]] = {}
    for load_path in sorted(load_paths, key=is_alternative):
        for row in load_paths[load_path].rows:
            found.setdefault(row.worker, {})[load_path] = row
    return found


def _totals(tensors: Sequence[TensorComparison]) -> dict[tuple[str, str], dict[str, int]]:
    """Count the tensors of each name by stage and road."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for tensor in tensors:
        if tensor.layer not in (SETTINGS_LAYER, WHOLE_MODEL):  # these stand for no tensor of the model
            count = totals.setdefault((tensor.stage, tensor.load_path), {})
            count[tensor.tensor] = count.get(tensor.tensor, 0) + 1
    return totals


def _fine(
    by_name: Mapping[str, Mapping[str, TensorComparison]], group: _Group, workers: Sequence[str]
) -> dict[str, None]:
    """Return the workers to which the same bytes came on the same roads, and came right."""
    right: dict[str, None] = {}
    hurt = set(workers)
    for tensor in group.tensors:
        for load_path in group.load_paths:
            for row in by_name[tensor.name][load_path].rows if load_path in by_name[tensor.name] else ():
                if row.status == "equal":
                    right[row.worker] = None
                else:
                    hurt.add(row.worker)
    return {worker: None for worker in right if worker not in hurt}


def _follows(wrong: Mapping[str, Set[str]], stage: str, load_paths: Iterable[str], workers: Sequence[str]) -> str:
    """Say where a computed stage is wrong on workers whose bytes were wrong before it."""
    if stage not in ("merged", "forward", "gradient"):
        return ""
    follows = all(set(workers) <= wrong.get(load_path, set()) for load_path in load_paths)
    return ": it follows from the wrong bytes above" if follows else ""


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
        facts = tensors[0].rule == "limit"
        return (
            f"{name} of {len(tensors)} of {totals[name]} layers"
            if facts
            else (f"{len(tensors)} of {totals[name]} {name} tensors")
        )
    return f"{len(tensors)} of {sum(totals.values())} tensors"


def names(labels: Sequence[str]) -> str:
    """Name workers in a sentence, six at most."""
    unique = list(dict.fromkeys(labels))
    return ", ".join(unique) if len(unique) <= 6 else f"{', '.join(unique[:5])} and {len(unique) - 5} more"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
