"""Compare two weight files, adapters or model folders, without any model code.

Bytes are compared in memory-mapped files, so equal tensors are read once and nothing is loaded. Torch is imported only
if some differ, to measure and diagnose the difference.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from consistency.capture.names import adapter_place
from consistency.capture.wording import counted, some
from consistency.case.checkpoint import read_json
from consistency.comparison import kinds
from consistency.comparison.findings.causes import causes_of
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import (
    NO_DIFFERENCE,
    ArchitectureGroup,
    Comparison,
    Finding,
    Outcome,
    Severity,
    TensorComparison,
    WorkerSummary,
    verdict_of,
)
from consistency.devices.cores import available_cores
from consistency.errors import InputError
from consistency.extras.merging import kinds as kinds_of_files
from consistency.extras.merging.diff.mapped import StoredTensor, open_weights
from consistency.extras.merging.settings import SettingDifference, differences, listed_differences, text_differences
from consistency.numerics import words
from consistency.numerics.not_finite_bits import count_in_bits
from consistency.numerics.same_bytes import same_memory

ROUNDED, ROUNDED_BACK = "the reference, rounded", "the reference is it, rounded"
"""Reasons of tensors of different dtypes."""

STAGE = "file"
"""Stage of the rows: the bytes in the files."""

_PIECE = 8 * 2**20
"""Bytes that one thread compares at a time, so that a file of one large tensor keeps all threads busy."""

_MOST_NAMED = 3
"""Tensors that a message names."""

Weights = Mapping[str, StoredTensor]


def diff_weights(actual: Path, expected: Path, *, allow_pickle: bool = False) -> Comparison:
    """Compare two sets of weights tensor by tensor, to the bit.

    Parameters
    ----------
    actual, expected : Path
        A safetensors file, an index of shards, or the folder of a model or an adapter. `expected` is the reference.
    allow_pickle : bool
        Read a pickle, with `weights_only=True`, if there is nothing else.

    Returns
    -------
    Comparison
        With two workers, named after the paths, and the stage `file`.

    Raises
    ------
    InputError
        One of them cannot be read, or neither contains a tensor.
    """
    labels = _labels(actual, expected)
    with (
        open_weights(actual, allow_pickle=allow_pickle) as actual_weights,
        open_weights(expected, allow_pickle=allow_pickle) as expected_weights,
    ):
        if not actual_weights and not expected_weights:
            raise InputError("neither contains a tensor", where=f"{actual} and {expected}")
        comparer = _Comparer(actual_weights, expected_weights, labels)
        tensors = comparer.compare_all()
        not_finite = _find_not_finite(comparer.not_finite, labels)
        rounded = _find_rounded(tensors, labels)
        dtypes = sorted({tensor.dtype for tensor in (*actual_weights.values(), *expected_weights.values())})
    findings = (
        *causes_of(tensors, next_step=lambda _: _next_command(actual, expected)),
        *not_finite,
        *find_settings(actual, expected, labels),
        *find_files_of_text(actual, expected, labels),
        *rounded,
        *_find_renamed(actual_weights, expected_weights, labels),
    )
    return Comparison(
        case=f"{labels[0]} against {labels[1]}",
        base=labels[1],
        dtype=", ".join(dtypes),
        level="every byte",
        load_paths=(STAGE,),
        verdict=verdict_of(findings),
        reference=labels[1],
        workers=tuple(_summary(label) for label in (labels[1], labels[0])),
        architectures=(ArchitectureGroup(name="weight file", workers=(labels[1], labels[0])),),
        tensors=tensors,
        findings=findings,
    )


def _next_command(actual: Path, expected: Path) -> str | None:
    """Return the command that tells what a model holds beside another; None for two adapters."""
    if not all((folder / "config.json").is_file() for folder in (actual, expected)):
        return None
    return shlex.join(["consistency", "check-merged", "--base", str(expected), str(actual)])


def _labels(actual: Path, expected: Path) -> tuple[str, str]:
    """Return the names of the two sides: their paths, and which is the reference where the paths are the same."""
    actual_name, expected_name = (os.fsencode(path).decode(errors="backslashreplace") for path in (actual, expected))
    if actual_name != expected_name:
        return actual_name, expected_name
    return f"{actual_name} (other)", f"{expected_name} (reference)"


def _count_not_finite(*sides: Weights) -> list[dict[str, int]]:
    """Return for each side the number of values that are NaN or infinite, by tensor; tensors without any are left out.

    Bytes are counted in pieces by several threads.
    """
    pieces: list[tuple[int, str, int]] = []
    for side, weights in enumerate(sides):
        for name, tensor in weights.items():
            pieces += [(side, name, start) for start in range(0, len(tensor.raw), _PIECE)]

    def count(piece: tuple[int, str, int]) -> int:
        side, name, start = piece
        tensor = sides[side][name]
        return count_in_bits(tensor.raw[start : start + _PIECE], tensor.dtype)

    counts: list[dict[str, int]] = [{} for _ in sides]
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        for (side, name, _), number in zip(pieces, pool.map(count, pieces), strict=True):
            if number:
                counts[side][name] = counts[side].get(name, 0) + number
    return counts


def _differing(actual: Weights, expected: Weights) -> set[str]:
    """Return the tensors of equal structure whose bytes differ; they are compared in pieces by several threads."""
    pieces: list[tuple[str, int]] = []
    for name, tensor in expected.items():
        if name in actual and _structure(actual[name]) == _structure(tensor):
            pieces += [(name, start) for start in range(0, len(tensor.raw), _PIECE)]

    def differs(piece: tuple[str, int]) -> bool:
        name, start = piece
        stop = start + _PIECE
        return not same_memory(actual[name].raw[start:stop], expected[name].raw[start:stop])

    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        results = zip(pieces, pool.map(differs, pieces), strict=True)
        return {name for (name, _), is_different in results if is_different}


def _structure(tensor: StoredTensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype


class _Comparer:
    """Two sets of weights, and which of their common tensors differ.

    Attributes
    ----------
    not_finite : tuple of two dict
        Numbers of values that are NaN or infinite, by tensor, in the actual weights and in the reference.
    """

    def __init__(self, actual: Weights, expected: Weights, labels: tuple[str, str]) -> None:
        self._actual, self._expected, self._labels = actual, expected, labels
        self._differing = _differing(actual, expected)
        # tensors with equal bytes are read once: their counts are those of the reference
        unequal = {name: tensor for name, tensor in actual.items() if not self._is_equal(name)}
        counts_of_unequal, counts_of_reference = _count_not_finite(unequal, expected)
        counts = {}
        for name, count in counts_of_reference.items():
            if name in actual and name not in unequal:
                counts[name] = count
        self.not_finite = ({**counts, **counts_of_unequal}, counts_of_reference)

    def _is_equal(self, name: str) -> bool:
        actual, expected = self._actual.get(name), self._expected.get(name)
        if actual is None or expected is None or name in self._differing:
            return False
        return _structure(actual) == _structure(expected)

    def compare_all(self) -> tuple[TensorComparison, ...]:
        """Compare tensor by tensor; several at once where some differ, since measuring them takes time."""
        names = [*self._expected, *(name for name in self._actual if name not in self._expected)]
        if all(map(self._is_equal, self._actual.keys() & self._expected.keys())):
            return tuple(map(self._compare, names))
        from consistency.numerics.stored import views_of_files

        with views_of_files(), concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
            return tuple(pool.map(self._compare, names))

    def _compare(self, name: str) -> TensorComparison:
        layer, part = adapter_place(name)
        stored = self._expected.get(name) or self._actual[name]
        row = self._row(name)
        worker, reference = self._labels
        holders = [label for label, side in ((reference, self._expected), (worker, self._actual)) if name in side]
        classes: tuple[tuple[str, ...], ...] = tuple((label,) for label in holders)
        if row.status == "equal":
            classes = (tuple(holders),)
        return TensorComparison(
            stage=STAGE,
            load_path=STAGE,
            layer=layer,
            tensor=part,
            shape=stored.shape,
            dtype=stored.dtype,
            rule="bitwise",
            classes=classes,
            outcomes=(*self._reference_row(name), row),
        )

    def _reference_row(self, name: str) -> Iterator[Outcome]:
        """Yield the row of the reference itself, if it has the tensor: each worker that has one has a row."""
        tensor = self._expected.get(name)
        if tensor is not None:
            label = self._labels[1]
            yield Outcome(workers=(label,), reference=label, status="equal", elements=tensor.elements, **NO_DIFFERENCE)

    def _row(self, name: str) -> Outcome:
        """Return how a tensor compares with the reference: presence, shape, dtype, then bytes."""
        row = functools.partial(Outcome, workers=self._labels[:1], reference=self._labels[1])
        actual, expected = self._actual.get(name), self._expected.get(name)
        if actual is None:
            return row(status="missing", word=words.MISSING, reason="only the reference has it")
        if expected is None:
            return row(status="unexpected", word=words.UNEXPECTED, reason="missing in the reference")
        if actual.shape != expected.shape:
            evidence: dict[str, Any] = {"got": list(actual.shape), "wanted": list(expected.shape)}
            return row(status="outside", word=words.SHAPE, evidence=evidence)
        if actual.dtype != expected.dtype:
            reason = self._rounding(actual, expected)
            evidence = {"got": actual.dtype, "wanted": expected.dtype}
            return row(status="outside", word=words.DTYPE, reason=reason, evidence=evidence)
        if self._is_equal(name):
            return row(status="equal", elements=actual.elements, **NO_DIFFERENCE)
        from consistency.numerics.stored import measure_stored

        measured, diagnosis = measure_stored(
            actual.raw, expected.raw, shape=actual.shape, dtype=actual.dtype, other=lambda: self._name_of_equal(actual)
        )
        evidence = {**measured.evidence(), **diagnosis.evidence}
        # formats that torch does not know, and formats that pack several elements into a few bytes
        if measured.elements != actual.elements:
            evidence["unit"] = "bytes"
        return row(status="outside", word=diagnosis.word, evidence=evidence).with_measure(measured)

    def _rounding(self, actual: StoredTensor, expected: StoredTensor) -> str | None:
        """Return whether one of two tensors of different dtypes is the other one, rounded, in words.

        None for a format whose numbers torch does not know.
        """
        from consistency.numerics.stored import count_not_rounded

        not_rounded = count_not_rounded(actual.raw, actual.dtype, expected.raw, expected.dtype)
        if not_rounded is None:
            return None
        if not_rounded == 0:
            return ROUNDED
        not_rounded_back = count_not_rounded(expected.raw, expected.dtype, actual.raw, actual.dtype)
        if not_rounded_back is None:
            return None
        if not_rounded_back == 0:
            return ROUNDED_BACK
        return f"{not_rounded} of {actual.elements} elements are not the reference rounded"

    def _name_of_equal(self, tensor: StoredTensor) -> str | None:
        """Return the name of another tensor of the reference that has the same bytes; None where there is none."""
        for other in self._by_start.get(_start(tensor), []):
            if other.name != tensor.name and same_memory(tensor.raw, other.raw):
                return other.name
        return None

    @functools.cached_property
    def _by_start(self) -> dict[tuple[object, ...], list[StoredTensor]]:
        """The reference's tensors by structure and first bytes."""
        return group_by_key((_start(tensor), tensor) for tensor in self._expected.values())


def _start(tensor: StoredTensor) -> tuple[object, ...]:
    return *_structure(tensor), tensor.raw[:64].tobytes()


def _find_not_finite(
    counts: tuple[Mapping[str, int], Mapping[str, int]], labels: tuple[str, str]
) -> tuple[Finding, ...]:
    """Warn of NaN and infinities: equal bits there are no agreement of numbers."""
    counts_by_label = {label: numbers for label, numbers in zip(labels, counts, strict=True) if numbers}
    if not counts_by_label:
        return ()
    workers = tuple(counts_by_label)
    if counts[0] == counts[1]:
        counts_by_label = {"both": counts[0]}
    sentences = []
    for label, numbers in counts_by_label.items():
        tensors = [f"{counted(number, 'value')} of {name}" for name, number in numbers.items()]
        sentences.append(f"in {label}: {some(tensors, _MOST_NAMED)}")
    message = f"values are NaN or infinite {'; '.join(sentences)}"
    return (Finding(kind=kinds.NON_FINITE_VALUES, severity="warning", message=message, workers=workers),)


def _find_rounded(tensors: Sequence[TensorComparison], labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Note whether the tensors of other dtypes are the reference's rounded to these, or the reverse."""
    rows = [tensor.outcomes[-1] for tensor in tensors]
    reasons = [row.reason for row in rows if row.word == words.DTYPE and row.reason]
    if not reasons:
        return ()
    notes = []
    for reason, label, other in ((ROUNDED, labels[0], labels[1]), (ROUNDED_BACK, labels[1], labels[0])):
        count = reasons.count(reason)
        if count:
            verb = "is" if count == 1 else "are"
            subject = f"{count} of {counted(len(reasons), 'tensor')} of another dtype in {label}"
            message = f"{subject} {verb} exactly {other}'s, rounded to nearest"
            notes.append(Finding(kind=kinds_of_files.ROUNDED, severity="note", message=message))
    if not notes:
        message = f"none of {counted(len(reasons), 'tensor')} of another dtype is the other file's, rounded to nearest"
        notes.append(Finding(kind=kinds_of_files.ROUNDED, severity="note", message=message))
    return tuple(notes)


def _find_renamed(actual: Weights, expected: Weights, labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Note that no name is common and that the names differ only by their first components."""
    if not actual or not expected or set(actual) & set(expected):
        return ()
    for longer, shorter, label in ((actual, expected, labels[0]), (expected, actual, labels[1])):
        first = next(iter(shorter))
        prefix = next((name.removesuffix(first) for name in longer if name.endswith(f".{first}")), None)
        if prefix and any(f"{prefix}{name}" in longer for name in shorter):
            message = f"no name is common: only the names in {label} begin with {prefix!r}"
            return (Finding(kind=kinds_of_files.NAMES, severity="note", message=message),)
    return ()


def _summary(label: str) -> WorkerSummary:
    return WorkerSummary(name=label, load_path=STAGE, architecture="weight file", model="", status="ok")


_FILES = ("adapter_config.json", "config.json")


def find_settings(actual: Path, expected: Path, labels: tuple[str, str]) -> Iterator[Finding]:
    """Yield the differences between the settings of two folders, one finding per file and severity.

    A setting that changes values is an error: equal weights with a different `lora_alpha` are a different adapter.
    """
    for name in _FILES:
        present = [(folder / name).exists() for folder in (actual, expected)]
        if not any(present) or not (actual.is_dir() and expected.is_dir()):
            continue
        if not all(present):
            label = labels[0] if present[0] else labels[1]
            yield _settings_finding("error", f"only {label} has {name}", labels)
            continue
        differing = differences(read_json(actual / name), read_json(expected / name))
        by_severity: dict[Severity, list[SettingDifference]] = {
            "error": [difference for difference in differing if not difference.is_harmless],
            "note": [difference for difference in differing if difference.is_harmless],
        }
        for severity, alike in by_severity.items():
            if alike:
                message = f"{name} of {labels[0]} differs: {listed_differences(alike)}"
                yield _settings_finding(severity, message, labels)


def find_files_of_text(actual: Path, expected: Path, labels: tuple[str, str]) -> Iterator[Finding]:
    """Yield a note for each difference in how two folders read, write and end text."""
    for difference in text_differences(actual, expected):
        yield _settings_finding("note", difference.sentence(*labels), labels)


def _settings_finding(severity: Severity, message: str, labels: tuple[str, str]) -> Finding:
    return Finding(kind=kinds.SETTINGS, severity=severity, message=message, workers=(labels[0],))
