"""Compare two weight files, adapters or model folders, without any model code.

Bytes are compared in memory-mapped files, so equal tensors are read once and nothing is loaded. Torch is imported only
if some differ, to measure and diagnose the difference.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from consistency.capture.names import adapter_place
from consistency.comparison.findings.causes import find_causes
from consistency.comparison.result import (
    NO_DIFFERENCE,
    ArchitectureGroup,
    Comparison,
    Finding,
    Row,
    TensorComparison,
    WorkerSummary,
    verdict_of,
)
from consistency.comparison.weight_files.configs import find_settings
from consistency.comparison.weight_files.mapped import StoredTensor, open_weights
from consistency.devices.cores import available_cores
from consistency.errors import InputError
from consistency.numerics.same_bytes import same_memory
from consistency.numerics.words import Word

STAGE = "file"
"""Stage of the rows: the bytes in the files."""

_PIECE = 8 * 2**20
"""Bytes that one thread compares at a time, so that a file of one large tensor keeps all threads busy."""

Weights = Mapping[str, StoredTensor]


def diff(actual: Path, expected: Path, *, allow_pickle: bool = False) -> Comparison:
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
        tensors = _Comparer(a, e, labels).compare_all()
        dtypes = sorted({tensor.dtype for tensor in (*a.values(), *e.values())})
    findings = (
        *find_causes(tensors, next_step=lambda _: None),
        *find_settings(actual, expected, labels),
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


def _labels(actual: Path, expected: Path) -> tuple[str, str]:
    first, second = (os.fsencode(path).decode(errors="backslashreplace") for path in (actual, expected))
    if first != second:
        return first, second
    return f"{first} (other)", f"{second} (reference)"


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

    def compare_all(self) -> tuple[TensorComparison, ...]:
        """Compare tensor by tensor; several at once where some differ, since measuring them takes time."""
        names = [*self._expected, *(name for name in self._actual if name not in self._expected)]
        if not self._differing:
            return tuple(map(self._compare, names, range(len(names))))
        from consistency.numerics.stored import views_of_files

        with views_of_files(), concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
            return tuple(pool.map(self._compare, names, range(len(names))))

    def _compare(self, name: str, order: int) -> TensorComparison:
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
            rows=(row,),
            order=order,
        )

    def _row(self, name: str) -> Row:
        row = functools.partial(Row, worker=self._labels[0], reference=self._labels[1])
        actual, expected = self._actual.get(name), self._expected.get(name)
        if actual is None:
            return row(status="missing", diagnosis=Word.MISSING, reason="only the reference has it")
        if expected is None:
            return row(status="unexpected", diagnosis=Word.UNEXPECTED, reason="missing in the reference")
        shapes, dtypes = (list(actual.shape), list(expected.shape)), (actual.dtype, expected.dtype)
        for word, (got, wanted) in ((Word.SHAPE, shapes), (Word.DTYPE, dtypes)):
            if got != wanted:
                return row(status="outside", diagnosis=word, evidence={"got": got, "wanted": wanted})
        if name not in self._differing:
            return row(status="equal", elements=actual.elements, **NO_DIFFERENCE)
        from consistency.numerics.stored import measure_stored

        found, diagnosis = measure_stored(
            actual.raw, expected.raw, shape=actual.shape, dtype=actual.dtype, other=lambda: self._holder(actual)
        )
        # formats that torch does not know, and formats that pack several elements into a few bytes
        unit = {} if found.elements == actual.elements else {"unit": "bytes"}
        evidence = {**found.evidence(), **diagnosis.evidence, **unit}
        return row(status="outside", diagnosis=diagnosis.word, evidence=evidence).with_measure(found)

    def _holder(self, tensor: StoredTensor) -> str | None:
        """Return the name of another tensor of the reference that has the same bytes."""
        for other in self._by_start.get(_start(tensor), []):
            if other.name != tensor.name and same_memory(tensor.raw, other.raw):
                return other.name
        return None

    @functools.cached_property
    def _by_start(self) -> dict[tuple[object, ...], list[StoredTensor]]:
        """The reference's tensors by structure and first bytes."""
        found: dict[tuple[object, ...], list[StoredTensor]] = {}
        for tensor in self._expected.values():
            found.setdefault(_start(tensor), []).append(tensor)
        return found


def _start(tensor: StoredTensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.raw[:64].tobytes()


def _renamed(a: Weights, e: Weights, labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Note that no name is common and that the names differ only by their first components."""
    if not a or not e or set(a) & set(e):
        return ()
    for longer, shorter, label in ((a, e, labels[0]), (e, a, labels[1])):
        first = next(iter(shorter))
        prefix = next((name.removesuffix(first) for name in longer if name.endswith(f".{first}")), None)
        if prefix and any(f"{prefix}{name}" in longer for name in shorter):
            message = f"no name is common: only the names in {label} begin with {prefix!r}"
            return (Finding(kind="names", severity="note", message=message),)
    return ()


def _summary(label: str) -> WorkerSummary:
    return WorkerSummary(name=label, load_path=STAGE, architecture="weight file", model="", status="ok")
