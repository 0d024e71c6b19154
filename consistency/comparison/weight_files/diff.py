"""Compare two weight files, adapters or model folders, without any model code.

Bytes are compared where the files are mapped into memory, so equal tensors cost one look at each, and nothing is
loaded. Only where some differ is torch imported, to measure them and to name the difference.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from consistency.capture.names import adapter_place
from consistency.capture.records import TensorMeasure
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
"""Stage of the rows: the bytes as they lie in the files."""

_PIECE = 8 * 2**20
"""Bytes that one thread compares at a time, so that a file of one large tensor keeps all of them busy."""

Weights = Mapping[str, StoredTensor]


def diff(actual: Path, expected: Path, *, allow_pickle: bool = False) -> Comparison:
    """Compare two sets of weights tensor by tensor, to the bit.

    Parameters
    ----------
    actual, expected : Path
        A safetensors file, an index of shards, or the folder of a model or an adapter. `expected` is the reference.
    allow_pickle : bool
        Read a pickle, with `weights_only=True`, where there is nothing else.

    Returns
    -------
    Comparison
        With two workers, named after the paths, and the stage `file`.

    Raises
    ------
    InputError
        One of them cannot be read, or neither holds a tensor.
    """
    labels = _labels(actual, expected)
    with (
        open_weights(actual, allow_pickle=allow_pickle) as a,
        open_weights(expected, allow_pickle=allow_pickle) as e,
    ):
        if not a and not e:
            raise InputError("there is no tensor in either", where=f"{actual} and {expected}")
        differing = _differing(a, e)
        names = [*e, *(name for name in a if name not in e)]
        others = _Others(e)
        tensors = _compare_all(names, a, e, differing, others, labels)
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
        if name in a and _structure(a[name]) == _structure(tensor)
        for start in range(0, len(tensor.raw), _PIECE)
    ]

    def differs(piece: tuple[str, int]) -> bool:
        name, start = piece
        part = slice(start, start + _PIECE)
        return not same_memory(a[name].raw[part], e[name].raw[part])

    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        return {name for (name, _), found in zip(pieces, pool.map(differs, pieces), strict=True) if found}


def _structure(tensor: StoredTensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype


def _compare_all(
    names: Sequence[str], a: Weights, e: Weights, differing: set[str], others: _Others, labels: tuple[str, str]
) -> tuple[TensorComparison, ...]:
    """Compare tensor by tensor; those that differ several at once, for one is named while another is measured."""

    def look(place: int) -> TensorComparison:
        return _compare(names[place], a, e, differing, others, labels, place)

    places = range(len(names))
    if not differing:
        return tuple(map(look, places))
    from consistency.numerics.stored import views_of_files

    with views_of_files(), concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        return tuple(pool.map(look, places))


def _compare(
    name: str,
    a: Weights,
    e: Weights,
    differing: set[str],
    others: _Others,
    labels: tuple[str, str],
    place: int,
) -> TensorComparison:
    layer, part = adapter_place(name)
    seen = e.get(name) or a[name]
    row = _row(name, a, e, differing, others, labels)
    together = row.status == "equal"
    holders = [label for label, side in ((labels[1], e), (labels[0], a)) if name in side]
    return TensorComparison(
        stage=STAGE,
        load_path=STAGE,
        layer=layer,
        tensor=part,
        shape=seen.shape,
        dtype=seen.dtype,
        rule="bitwise",
        classes=(tuple(holders),) if together else tuple((label,) for label in holders),
        rows=(row,),
        order=place,
    )


def _row(name: str, a: Weights, e: Weights, differing: set[str], others: _Others, labels: tuple[str, str]) -> Row:
    worker, reference = labels
    if name not in a:
        return Row(
            worker=worker,
            reference=reference,
            status="missing",
            diagnosis=Word.MISSING,
            reason="only the reference has it",
        )
    if name not in e:
        return Row(
            worker=worker, reference=reference, status="unexpected", diagnosis=Word.UNEXPECTED,
            reason="the reference has no such tensor",
        )  # fmt: skip
    actual, expected = a[name], e[name]
    if actual.shape != expected.shape:
        evidence = {"got": list(actual.shape), "wanted": list(expected.shape)}
        return Row(worker=worker, reference=reference, status="outside", diagnosis=Word.SHAPE, evidence=evidence)
    if actual.dtype != expected.dtype:
        kinds = {"got": actual.dtype, "wanted": expected.dtype}
        return Row(worker=worker, reference=reference, status="outside", diagnosis=Word.DTYPE, evidence=kinds)
    elements = actual.elements
    if name not in differing:
        return Row(worker=worker, reference=reference, status="equal", elements=elements, **NO_DIFFERENCE)
    from consistency.numerics.stored import measure_stored

    found, diagnosis = measure_stored(
        actual.raw, expected.raw, shape=actual.shape, dtype=actual.dtype,
        other=lambda: others.find(actual),
    )  # fmt: skip
    measured = TensorMeasure.of(found)
    # formats that torch does not know, and that pack several elements into some bytes
    unit = {} if found.elements == elements else {"unit": "bytes"}
    return Row(
        worker=worker,
        reference=reference,
        status="outside",
        diagnosis=diagnosis.word,
        evidence={**measured.evidence(), **diagnosis.evidence, **unit},
    ).with_measure(measured)


class _Others:
    """The reference's tensors by structure and first bytes, to find one that another tensor's bytes are of."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @functools.cached_property
    def _by_start(self) -> dict[tuple[object, ...], list[StoredTensor]]:
        found: dict[tuple[object, ...], list[StoredTensor]] = {}
        for tensor in self._weights.values():
            found.setdefault(self._key(tensor), []).append(tensor)
        return found

    @staticmethod
    def _key(tensor: StoredTensor) -> tuple[object, ...]:
        return (*_structure(tensor), tensor.raw[:64].tobytes())

    def find(self, tensor: StoredTensor) -> str | None:
        """Return the name of a tensor of the reference that has the same bytes."""
        for other in self._by_start.get(self._key(tensor), []):
            if other.name != tensor.name and same_memory(tensor.raw, other.raw):
                return other.name
        return None


def _renamed(a: Weights, e: Weights, labels: tuple[str, str]) -> tuple[Finding, ...]:
    """Say where no name is common and the names differ by their first components alone."""
    if not a or not e or set(a) & set(e):
        return ()
    for longer, shorter, label in ((a, e, labels[0]), (e, a, labels[1])):
        first = next(iter(shorter))
        prefix = next((name.removesuffix(first) for name in longer if name.endswith(f".{first}")), None)
        if prefix and any(f"{prefix}{name}" in longer for name in shorter):
            return (
                Finding(
                    kind="names",
                    severity="note",
                    message=f"no name is common: those of {label} begin with {prefix!r}, the others do not",
                ),
            )
    return ()


def _summary(label: str) -> WorkerSummary:
    return WorkerSummary(
        name=label,
        load_path=STAGE,
        architecture="weight file",
        model="",
        uuid=None,
        status="ok",
        reason=None,
        environment={},
    )
