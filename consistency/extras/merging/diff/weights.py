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
from consistency.capture.wording import and_more, counted, some
from consistency.case.checkpoint import read_json
from consistency.comparison import kinds
from consistency.comparison.findings.causes import causes_of
from consistency.comparison.outcomes import gathered
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
from consistency.numerics import words
from consistency.numerics.not_finite_bits import count_in_bits
from consistency.numerics.same_bytes import same_memory

ROUNDED, ROUNDED_BACK = "the reference, rounded", "the reference is it, rounded"
"""Reasons of tensors of different dtypes."""

STAGE = "file"
"""Stage of the rows: the bytes in the files."""

_PIECE = 8 * 2**20
"""Bytes that one thread compares at a time, so that a file of one large tensor keeps all threads busy."""

_MOST = 3

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
        open_weights(actual, allow_pickle=allow_pickle) as a,
        open_weights(expected, allow_pickle=allow_pickle) as e,
    ):
        if not a and not e:
            raise InputError("neither contains a tensor", where=f"{actual} and {expected}")
        comparer = _Comparer(a, e, labels)
        tensors = comparer.compare_all()
        not_finite = _not_finite(comparer.not_finite, labels)
        rounded = _rounded(tensors, labels)
        dtypes = sorted({tensor.dtype for tensor in (*a.values(), *e.values())})
    findings = (
        *causes_of(tensors, next_step=lambda _: _what_is_in_it(actual, expected)),
        *not_finite,
        *find_settings(actual, expected, labels),
        *find_files_of_text(actual, expected, labels),
        *rounded,
        *_renamed(a, e, labels),
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


def _what_is_in_it(actual: Path, expected: Path) -> str | None:
    """Return the command that tells what a model holds beside another: of two adapters there is none."""
    if not all((folder / "config.json").is_file() for folder in (actual, expected)):
        return None
    return shlex.join(["consistency", "check-merged", "--base", str(expected), str(actual)])


def _labels(actual: Path, expected: Path) -> tuple[str, str]:
    first, second = (os.fsencode(path).decode(errors="backslashreplace") for path in (actual, expected))
    if first != second:
        return first, second
    return f"{first} (other)", f"{second} (reference)"


def _count_not_finite(*sides: Weights) -> list[dict[str, int]]:
    """Return by tensor how many of its values are NaN or infinite, for each side."""
    pieces = [
        (side, name, start)
        for side, weights in enumerate(sides)
        for name, tensor in weights.items()
        for start in range(0, len(tensor.raw), _PIECE)
    ]

    def count(piece: tuple[int, str, int]) -> int:
        side, name, start = piece
        tensor = sides[side][name]
        return count_in_bits(tensor.raw[start : start + _PIECE], tensor.dtype)

    found: list[dict[str, int]] = [{} for _ in sides]
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        for (side, name, _), number in zip(pieces, pool.map(count, pieces), strict=True):
            if number:
                found[side][name] = found[side].get(name, 0) + number
    return found


def _differing(a: Weights, e: Weights) -> set[str]:
    """Return the tensors of equal structure whose bytes differ."""
    pieces = [
        (name, start)
        for name, tensor in e.items()
        if name in a and (a[name].shape, a[name].dtype) == (tensor.shape, tensor.dtype)
        for start in range(0, len(tensor.raw), _PIECE)
    ]

    def differs(piece: tuple[str, int]) -> bool:
        name, start = piece
        part = slice(start, start + _PIECE)
        return not same_memory(a[name].raw[part], e[name].raw[part])

    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        return {name for (name, _), found in zip(pieces, pool.map(differs, pieces), strict=True) if found}


class _Comparer:
    """Two sets of weights, and which of their common tensors differ."""

    def __init__(self, actual: Weights, expected: Weights, labels: tuple[str, str]) -> None:
        self._actual, self._expected, self._labels = actual, expected, labels
        self._differing = _differing(actual, expected)
        others = {name: tensor for name, tensor in actual.items() if not self._is_equal(name)}
        found, reference = _count_not_finite(others, expected)
        shared = {name: number for name, number in reference.items() if name in actual and name not in others}
        self.not_finite = ({**shared, **found}, reference)

    def _is_equal(self, name: str) -> bool:
        actual, expected = self._actual.get(name), self._expected.get(name)
        if actual is None or expected is None or name in self._differing:
            return False
        return (actual.shape, actual.dtype) == (expected.shape, expected.dtype)

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
        known = self._expected.get(name) or self._actual[name]
        row = self._row(name)
        worker, reference = self._labels
        holders = [label for label, side in ((reference, self._expected), (worker, self._actual)) if name in side]
        return TensorComparison(
            stage=STAGE,
            load_path=STAGE,
            layer=layer,
            tensor=part,
            shape=known.shape,
            dtype=known.dtype,
            rule="bitwise",
            classes=(tuple(holders),) if row.status == "equal" else tuple((label,) for label in holders),
            outcomes=(*self._of_reference(name), row),
        )

    def _of_reference(self, name: str) -> Iterator[Outcome]:
        """Yield the row of the reference, which every worker of a comparison that has a tensor has."""
        if tensor := self._expected.get(name):
            label = self._labels[1]
            yield Outcome(workers=(label,), reference=label, status="equal", elements=tensor.elements, **NO_DIFFERENCE)

    def _row(self, name: str) -> Outcome:
        row = functools.partial(Outcome, workers=self._labels[:1], reference=self._labels[1])
        actual, expected = self._actual.get(name), self._expected.get(name)
        if actual is None:
            return row(status="missing", word=words.MISSING, reason="only the reference has it")
        if expected is None:
            return row(status="unexpected", word=words.UNEXPECTED, reason="missing in the reference")
        shapes, dtypes = (list(actual.shape), list(expected.shape)), (actual.dtype, expected.dtype)
        for word, (got, wanted) in ((words.SHAPE, shapes), (words.DTYPE, dtypes)):
            if got != wanted:
                reason = self._rounding(actual, expected) if word is words.DTYPE else None
                return row(status="outside", word=word, reason=reason, evidence={"got": got, "wanted": wanted})
        if self._is_equal(name):
            return row(status="equal", elements=actual.elements, **NO_DIFFERENCE)
        from consistency.numerics.stored import measure_stored

        found, diagnosis = measure_stored(
            actual.raw, expected.raw, shape=actual.shape, dtype=actual.dtype, other=lambda: self._holder(actual)
        )
        # formats that torch does not know, and formats that pack several elements into a few bytes
        unit = {} if found.elements == actual.elements else {"unit": "bytes"}
        evidence = {**found.evidence(), **diagnosis.evidence, **unit}
        return row(status="outside", word=diagnosis.word, evidence=evidence).with_measure(found)

    def _rounding(self, actual: StoredTensor, expected: StoredTensor) -> str | None:
        """Return whether one of two tensors of different dtypes is the other one, rounded; None for other formats."""
        from consistency.numerics.stored import count_not_rounded

        for tensor, other, text in ((actual, expected, ROUNDED), (expected, actual, ROUNDED_BACK)):
            number = count_not_rounded(tensor.raw, tensor.dtype, other.raw, other.dtype)
            if number is None:
                return None
            if number == 0:
                return text
            if tensor is actual:
                fewest = number
        return f"{fewest} of {actual.elements} elements are not the reference rounded"

    def _holder(self, tensor: StoredTensor) -> str | None:
        """Return the name of another tensor of the reference that has the same bytes."""
        for other in self._by_start.get(_start(tensor), []):
            if other.name != tensor.name and same_memory(tensor.raw, other.raw):
                return other.name
        return None

    @functools.cached_property
    def _by_start(self) -> dict[tuple[object, ...], list[StoredTensor]]:
        """The reference's tensors by structure and first bytes."""
        return gathered((_start(tensor), tensor) for tensor in self._expected.values())


def _start(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.raw[:64].tobytes()


def _not_finite(counts: tuple[Mapping[str, int], Mapping[str, int]], labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Warn of NaN and infinities: equal bits there are no agreement of numbers."""
    found = {label: numbers for label, numbers in zip(labels, counts, strict=True) if numbers}
    if not found:
        return ()
    where = []
    for label, numbers in {"both": counts[0]}.items() if counts[0] == counts[1] else found.items():
        places = [f"{counted(number, 'value')} of {name}" for name, number in numbers.items()]
        where.append(f"in {label}: {some(places, _MOST)}")
    message = f"values are NaN or infinite {'; '.join(where)}"
    return (Finding(kind=kinds.NON_FINITE_VALUES, severity="warning", message=message, workers=tuple(found)),)


def _rounded(tensors: Sequence[TensorComparison], labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Say whether the tensors of other dtypes are the reference's rounded to these, or the reverse."""
    others = [tensor for tensor in tensors if tensor.outcomes[-1].word == words.DTYPE and tensor.outcomes[-1].reason]
    if not others:
        return ()
    notes = []
    for reason, one, other in ((ROUNDED, labels[0], labels[1]), (ROUNDED_BACK, labels[1], labels[0])):
        if count := sum(tensor.outcomes[-1].reason == reason for tensor in others):
            what = f"{count} of {counted(len(others), 'tensor')} of another dtype in {one}"
            message = f"{what} {'is' if count == 1 else 'are'} exactly {other}'s, rounded to nearest"
            notes.append(Finding(kind=kinds_of_files.ROUNDED, severity="note", message=message))
    if not notes:
        message = f"none of {counted(len(others), 'tensor')} of another dtype is the other file's, rounded to nearest"
        notes.append(Finding(kind=kinds_of_files.ROUNDED, severity="note", message=message))
    return tuple(notes)


def _renamed(a: Weights, e: Weights, labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Note that no name is common and that the names differ only by their first components."""
    if not a or not e or set(a) & set(e):
        return ()
    for longer, shorter, label in ((a, e, labels[0]), (e, a, labels[1])):
        first = next(iter(shorter))
        prefix = next((name.removesuffix(first) for name in longer if name.endswith(f".{first}")), None)
        if prefix and any(f"{prefix}{name}" in longer for name in shorter):
            message = f"no name is common: only the names in {label} begin with {prefix!r}"
            return (Finding(kind=kinds_of_files.NAMES, severity="note", message=message),)
    return ()


def _summary(label: str) -> WorkerSummary:
    return WorkerSummary(name=label, load_path=STAGE, architecture="weight file", model="", status="ok")


_FILES = ("adapter_config.json", "config.json")
_OF_TEXT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# origin, versions and intended use: no value of a forward pass depends on these
_HARMLESS = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "base_model_name_or_path",
        "revision",
        "dtype",
        "torch_dtype",  # as which it was saved; the tensors themselves show it
        "peft_version",
        "transformers_version",
        "auto_mapping",
        "inference_mode",
        "use_cache",
    )
)

_MOST_KEYS = 5  # of a sentence; the files are there to be read


def find_settings(actual: Path, expected: Path, labels: tuple[str, str]) -> Iterator[Finding]:
    """Yield the differences between the settings of two folders, one finding per file and severity.

    A setting that changes values is an error: equal weights with a different `lora_alpha` are a different adapter.
    """
    for name in _FILES:
        present = [(folder / name).exists() for folder in (actual, expected)]
        if not any(present) or not (actual.is_dir() and expected.is_dir()):
            continue
        if not all(present):
            which = labels[0] if present[0] else labels[1]
            yield _finding("error", f"only {which} has {name}", labels)
            continue
        got, wanted = read_json(actual / name), read_json(expected / name)
        keys = [key for key in dict.fromkeys((*wanted, *got)) if not _same(got.get(key), wanted.get(key))]
        grave = [key for key in keys if key not in _HARMLESS]
        by_severity: dict[Severity, list[str]] = {"error": grave, "note": [key for key in keys if key not in grave]}
        for severity, chosen in by_severity.items():
            if chosen:
                texts = [f"{key} is {got.get(key)!r}, was {wanted.get(key)!r}" for key in chosen[:_MOST_KEYS]]
                text = "; ".join(filter(None, [*texts, and_more(len(chosen) - _MOST_KEYS)]))
                yield _finding(severity, f"{name} of {labels[0]} differs: {text}", labels)


def find_files_of_text(actual: Path, expected: Path, labels: tuple[str, str]) -> Iterator[Finding]:
    """Yield a note for each file on how text is read and written, where both folders have it with other bytes."""
    for name in _OF_TEXT:
        files = [folder / name for folder in (actual, expected)]
        if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
            yield _finding(
                "note", f"{name} of {labels[0]} differs: the same text may be read or written otherwise", labels
            )


def _finding(severity: Severity, message: str, labels: tuple[str, str]) -> Finding:
    return Finding(kind=kinds.SETTINGS, severity=severity, message=message, workers=(labels[0],))


def _same(actual: Any, expected: Any) -> bool:
    """Compare two values of JSON; PEFT writes sets of names as lists in any order."""
    lists = isinstance(actual, list) and isinstance(expected, list)
    if lists and all(isinstance(v, str) for v in (*actual, *expected)):
        return sorted(actual) == sorted(expected)
    if isinstance(actual, float | int) and isinstance(expected, float | int):
        return actual == expected and isinstance(actual, bool) == isinstance(expected, bool)
    return bool(actual == expected)
