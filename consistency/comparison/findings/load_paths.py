"""Load paths with wrong and with correct bytes -> the cause: copy path, device, loader or dtype."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from consistency.capture.names import SETTINGS_LAYER
from consistency.capture.wording import MOST_NAMES, counted, listed, some
from consistency.case.load_path import LoadPath, is_alternative, main_path
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import Workers, union_of_workers
from consistency.comparison.result import BAD, Finding, Outcome, Severity, TensorComparison
from consistency.devices.backends import CPU
from consistency.devices.spec import label_of
from consistency.numerics import words
from consistency.numerics.words import Word

_WHEN_SHARED = " when all devices are visible, and correct when isolated"
_BY_TRANSFORMERS = "transformers' loader"
_ROUNDED = frozenset({words.ROUNDED_TO_BF16, words.ROUNDED_TO_FP16, words.ROUNDED_TO_TF32, words.DTYPE})
_NOT_ARRIVED = frozenset({words.ZEROS, words.NEVER_WRITTEN, words.FRESH_INIT, words.STALE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The conclusion that the load paths allow about one cause."""

    where: str = ""  # the load paths with wrong and with correct bytes, to follow "zeros in 128 of 128 lora_B tensors"
    why: str = ""  # the cause, where the load paths identify it
    hops: bool = False  # the bytes are copied from device 0 to each device: `copies` names these copies


def judge_load_paths(
    word: Word, wrong: Set[str], taken: Set[str], *, stage: str = "adapter", many: bool = True
) -> Verdict:
    """Identify the cause of wrong bytes by the load paths on which they are wrong.

    Parameters
    ----------
    word : Word
        The kind of difference.
    wrong, taken : set of str
        Load paths on which one tensor of one worker is wrong, and all on which it was checked.
    stage : str
        Only the adapter takes alternative paths; for other stages they differ in the visible devices alone.
    many : bool
        The comparison has workers on more than one default load path, so one has to be named.
    """
    try:
        bad, checked = {LoadPath(name) for name in wrong}, {LoadPath(name) for name in taken}
    except ValueError:  # of a later version, or no load path: weight files that were compared
        return _on_named_paths(", ".join(sorted(wrong)), many=many)
    right = checked - bad
    # with one path alone, there is no other to tell the cause by
    if not right and len(checked) == 1:
        return _on_named_paths(_names(bad), many=many)
    if not right:
        return _on_every(checked)
    right_when_isolated = any(path.main is LoadPath.ISOLATED for path in right)
    bad_only_when_shared = all(path.main is LoadPath.SHARED for path in bad)
    isolation_helps = right_when_isolated and bad_only_when_shared
    # only an adapter is loaded with options that could be to blame
    if stage == "adapter":
        verdict = _by_option(word, bad, right)
        if verdict is not None:
            return verdict
        return _when_shared(bad, right) if isolation_helps else _by_device(bad, right)
    if isolation_helps:
        return Verdict(where=_WHEN_SHARED, why="a copy between devices")
    return Verdict(where=f" on load path {_names(bad)}")


def _on_named_paths(names: str, *, many: bool) -> Verdict:
    """Name the load paths with wrong bytes, where the comparison has several to choose from."""
    if not many:
        return Verdict()
    return Verdict(where=f" on load path {names}")


def _on_every(checked: Set[LoadPath]) -> Verdict:
    """Interpret bytes that are wrong on every load path that was checked."""
    # isolated, no copy comes from another device; staged through the host or with another loader, none from the file
    has_other_source = any(path.torch_device == "cpu" or path.by_transformers for path in checked)
    if has_other_source and any(path.main is LoadPath.ISOLATED for path in checked):
        return Verdict(
            where=f" on every load path ({_names(checked)})",
            why="not a copy between devices or a loader, but the device or its memory",
        )
    return Verdict(where=f" on every load path taken ({_names(checked)})")


def _by_option(word: Word, bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict | None:
    """Blame an option of loading, or one of the two loaders; None where neither tells wrong from correct paths."""
    if all(path.low_memory and path.without_low_memory in right for path in bad):
        why = "a dtype conversion while loading" if word in _ROUNDED else "an effect of low_cpu_mem_usage=True"
        return Verdict(where=" with low_cpu_mem_usage=True, and correct without", why=why)
    # loaders are compared only where both were tried with the same devices visible
    bad_mains, right_mains = {path.main for path in bad}, {path.main for path in right}
    bad_by_transformers = all(path.by_transformers for path in bad)
    if bad_by_transformers and not bad_mains.isdisjoint(right_mains):
        if any(path.by_transformers for path in right):
            return None
        return Verdict(where=" with transformers' load_adapter, and correct with PEFT's", why=_BY_TRANSFORMERS)
    right_by_transformers = all(path.by_transformers for path in right)
    if right_by_transformers and bad_mains <= right_mains:
        return Verdict(where=" with PEFT's loader, and correct with transformers'", why="PEFT's loader")
    return None


def _when_shared(bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict:
    """Interpret bytes that are correct on an isolated device and wrong when other devices are visible."""
    # wrong also where PEFT is told the device: copies through device 0 do not explain that
    if not all(path.chooses_device for path in bad):
        return Verdict(
            where=_WHEN_SHARED, why="an effect of other visible devices, not only of copies through device 0"
        )
    shared = [path for path in right if path.main is LoadPath.SHARED and not path.chooses_device]
    options = _devices(shared)
    if any(path.by_transformers for path in shared):
        options.append(_BY_TRANSFORMERS)
    alternatives = f" or with {' or '.join(options)}" if options else ""
    return Verdict(where=_WHEN_SHARED + alternatives, hops=True)


def _by_device(bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict:
    """Blame the device that PEFT chooses, or the copy from the file onto the device; else name the load paths."""
    if all(path.chooses_device for path in bad) and not any(path.chooses_device for path in right):
        options = " or ".join(_devices(right)) or _BY_TRANSFORMERS
        return Verdict(
            where=f" where PEFT chooses the device, and correct with {options}",
            why="copies through the device that PEFT chooses",
            hops=all(path.main is LoadPath.SHARED for path in bad),
        )
    if not any(map(_is_staged, bad)) and all(map(_is_staged, right)):
        return Verdict(
            where=" where the file is read directly onto the device, and correct when staged through the host",
            why="the copy from the file to the device",
        )
    return Verdict(where=f" on load path {_names(bad)}, and correct on {_names(right)}")


def _is_staged(path: LoadPath) -> bool:
    """Return whether the values of the file are read into host memory first."""
    return path.torch_device == "cpu" or path.by_transformers


def copies(word: Word, workers: Sequence[str], fine: Iterable[str]) -> str:
    """Name the wrong and the correct copies: to `workers` and to `fine`, all through device 0."""
    effect = "drop data" if word in _NOT_ARRIVED else "change data"
    targets = [_index(label) for label in workers]
    # device 0 itself is wrong, or a worker has no number: no list of peer copies would name them all
    if None in targets or 0 in targets:
        return f"copies through device 0 {effect}"
    hops = [f"0→{index}" for index in dict.fromkeys(targets)]
    message = f"peer copies {listed(hops)} {effect}"
    fine_indices = {index for index in map(_index, fine) if index}
    fine_hops = [f"0→{index}" for index in sorted(fine_indices - set(targets))]
    if not fine_hops:
        return message
    verb = "is" if len(fine_hops) == 1 else "are"
    return f"{message}; {listed(fine_hops)} {verb} fine"


def is_cpu(label: str) -> bool:
    """Return whether a worker's device is a CPU."""
    device_label = label_of(label)
    return device_label is not None and device_label.type == CPU


def is_software(tensors: Iterable[TensorComparison], workers: Sequence[str]) -> bool:
    """Return whether software is at fault for tensors that are wrong on these workers.

    It is on alternative paths where the CPU is wrong too, and all workers are bitwise equal.
    """
    if len(workers) < 2 or not any(map(is_cpu, workers)):
        return False
    return all(is_alternative(tensor.load_path) and len(tensor.classes) == 1 for tensor in tensors)


def load_paths_taken(label: str, rows: Mapping[str, Outcome]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the load paths on which a worker's tensor is wrong, and those on which it was checked.

    The reference worker is compared with on every load path, but a CPU only takes those that leave no other device
    visible.

    Parameters
    ----------
    label : str
        Name of the worker.
    rows : mapping
        The outcomes of the tensor on this worker, by load path.
    """
    checked = {load_path: row for load_path, row in rows.items() if row.status not in ("skipped", "blocked")}
    # on paths that leave other devices visible, a CPU only stands as the reference
    if is_cpu(label):
        alone = {load_path: row for load_path, row in checked.items() if main_path(load_path) != LoadPath.SHARED}
        checked = alone or checked
    wrong = frozenset(load_path for load_path, row in checked.items() if row.status in BAD)
    return wrong, frozenset(checked)


@dataclass(slots=True)
class _Cast:
    """Tensors that load paths cast through one dtype, and the workers on which they do."""

    workers: list[Workers] = field(default_factory=list)
    by_load_path: dict[str, list[TensorComparison]] = field(default_factory=dict)


def find_casts(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report casts: where all devices make them, the load path does it; where some do not, it is a fault.

    PEFT casts to the dtype of the base, so that a worker whose base has another one says nothing.
    """
    adapter = [tensor for tensor in evidence.tensors if tensor.stage == "adapter"]
    alternatives = [tensor for tensor in adapter if is_alternative(tensor.load_path) and tensor.layer != SETTINGS_LAYER]
    base_dtypes = {worker.label: worker.info.environment.get("dtype") for worker in evidence.workers}
    for (dtype, partial_workers), cast in _casts(alternatives, base_dtypes).items():
        yield _report_cast(dtype, cast, is_partial=bool(partial_workers))
    default_dtypes = {
        (tensor.name, tensor.load_path): tensor.dtype for tensor in adapter if not is_alternative(tensor.load_path)
    }
    for (dtype, default_dtype), by_load_path in _stored_in_other_dtypes(alternatives, default_dtypes).items():
        yield _report_storage(dtype, default_dtype, by_load_path)


def _casts(
    tensors: Iterable[TensorComparison], base_dtypes: Mapping[str, object]
) -> dict[tuple[str, tuple[str, ...]], _Cast]:
    """Group tensors whose values were cast, by the dtype in between and by the workers that alone made the cast.

    Where every worker made it, those workers are an empty tuple: the reference worker does not take every load path
    itself, and there is one note for all.
    """
    casts: dict[tuple[str, tuple[str, ...]], _Cast] = {}
    for tensor in tensors:
        cast_rows = [row for row in tensor.outcomes if row.cast]
        if not cast_rows:
            continue
        cast_workers = tuple(itertools.chain.from_iterable(row.workers for row in cast_rows))
        bases = {base_dtypes.get(worker) for worker in cast_workers}
        # a device with the same base that holds the file's values shows that the cast is not needed
        exact = union_of_workers(row.workers for row in tensor.outcomes if not row.cast and row.status == "equal")
        is_partial = any(base_dtypes.get(worker) in bases for worker in exact)
        partial_workers = cast_workers if is_partial else ()
        cast = casts.setdefault((cast_rows[0].cast, partial_workers), _Cast())
        cast.workers += [row.workers for row in cast_rows]
        cast.by_load_path.setdefault(tensor.load_path, []).append(tensor)
    return casts


def _report_cast(dtype: str, cast: _Cast, *, is_partial: bool) -> Finding:
    """Report one cast; `is_partial` where other devices on the load path hold the values of the file."""
    first_tensors = next(iter(cast.by_load_path.values()))
    severity: Severity = "note"
    tail = "on every device: PEFT casts them to the dtype of the base while loading"
    if is_partial:
        severity = "error"
        tail = "but not on the other devices on this load path"
    labels = tuple(union_of_workers(cast.workers))
    labels_text = listed(labels) if len(labels) <= MOST_NAMES else some(labels)
    opening = f"adapter · {labels_text} · the file's values rounded through {dtype}"
    ending = f"with low_cpu_mem_usage=True ({', '.join(cast.by_load_path)}), {tail}"
    return Finding(
        kind=kinds.DTYPE_ON_THE_WAY,
        severity=severity,
        message=f"{opening} in {counted(len(first_tensors), 'tensor')} {ending}",
        general=f"{opening} {ending}",
        workers=labels,
        tensors=tuple(tensor.name for tensor in first_tensors),
        load_paths=tuple(cast.by_load_path),
    )


def _stored_in_other_dtypes(
    tensors: Iterable[TensorComparison], default_dtypes: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], dict[str, list[TensorComparison]]]:
    """Group tensors whose dtype differs from the default load path's: by both dtypes, then by load path."""
    by_dtypes: dict[tuple[str, str], dict[str, list[TensorComparison]]] = {}
    for tensor in tensors:
        default_dtype = default_dtypes.get((tensor.name, main_path(tensor.load_path)))
        # a record without a dtype shows no other one
        if default_dtype is not None and tensor.dtype not in ("", default_dtype):
            by_load_path = by_dtypes.setdefault((tensor.dtype, default_dtype), {})
            by_load_path.setdefault(tensor.load_path, []).append(tensor)
    return by_dtypes


def _report_storage(dtype: str, default_dtype: str, by_load_path: Mapping[str, list[TensorComparison]]) -> Finding:
    first_tensors = next(iter(by_load_path.values()))
    ending = f"stored in {dtype} on {', '.join(by_load_path)}, and in {default_dtype} by default"
    return Finding(
        kind=kinds.DTYPE_ON_THE_WAY,
        severity="note",
        message=f"adapter · {counted(len(first_tensors), 'tensor')} {ending}",
        general=f"adapter · tensors {ending}",
        workers=first_tensors[0].workers,
        tensors=tuple(tensor.name for tensor in first_tensors),
        load_paths=tuple(by_load_path),
    )


def _devices(load_paths: Iterable[LoadPath]) -> list[str]:
    """Return the options `torch_device=…` of load paths that set one, in alphabetical order."""
    return sorted({f"torch_device={path.torch_device}" for path in load_paths if path.torch_device})


def _names(load_paths: Iterable[LoadPath]) -> str:
    """Return the names of load paths in the order of their declaration."""
    chosen = set(load_paths)
    return ", ".join(load_path.value for load_path in LoadPath if load_path in chosen)


def _index(worker: str) -> int | None:
    """Return the number of a worker's device; None where it has none."""
    label = label_of(worker)
    return None if label is None else label.index


FINDERS = (Finder(name="casts", phase=Phase.STAGES, position=5, find=find_casts),)
