"""Load paths with wrong and with correct bytes -> the cause: copy path, device, loader or dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from consistency.capture.names import SETTINGS_LAYER
from consistency.capture.wording import MOST_NAMES, counted, listed, some
from consistency.case.load_path import LoadPath, is_alternative, main_path
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import Workers, names_in
from consistency.comparison.result import BAD, Finding, Outcome, TensorComparison
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
    """What the load paths show of one cause."""

    where: str = ""  # the load paths with wrong and with correct bytes, to follow "zeros in 128 of 128 lora_B tensors"
    why: str = ""  # the cause, where the load paths identify it
    hops: bool = False  # the bytes are copied from device 0 to each device: `copies` names these copies


def judge_load_paths(
    word: Word, wrong: Set[str], taken: Set[str], *, stage: str = "adapter", many: bool = True
) -> Verdict:
    """Identify the cause of wrong bytes by the load paths on which they are wrong.

    Parameters
    ----------
    wrong, taken : set of str
        Load paths on which one tensor of one worker is wrong, and all on which it was checked.
    stage : str
        Only the adapter takes alternative paths; for other stages they differ in the visible devices alone.
    many : bool
        The comparison has workers on more than one default load path, so one has to be named.
    """
    try:
        bad, seen = {LoadPath(name) for name in wrong}, {LoadPath(name) for name in taken}
    except ValueError:  # of a later version, or no load path: weight files that were compared
        return Verdict(where=f" on load path {', '.join(sorted(wrong))}" if many else "")
    right = seen - bad
    if not right and len(seen) == 1:
        return Verdict(where=f" on load path {_names(bad)}" if many else "")
    if not right:
        return _on_every(seen)
    isolated = any(path.main is LoadPath.ISOLATED for path in right) and all(p.main is LoadPath.SHARED for p in bad)
    if stage == "adapter":
        return _by_option(word, bad, right) or (_when_shared(bad, right) if isolated else _by_device(bad, right))
    if isolated:
        return Verdict(where=_WHEN_SHARED, why="a copy between devices")
    return Verdict(where=f" on load path {_names(bad)}")


def _on_every(seen: Set[LoadPath]) -> Verdict:
    # isolated, no copy comes from another device; staged through the host or with another loader, none from the file
    elsewhere = any(load_path.torch_device == "cpu" or load_path.by_transformers for load_path in seen)
    if elsewhere and any(load_path.main is LoadPath.ISOLATED for load_path in seen):
        return Verdict(
            where=f" on every load path ({_names(seen)})",
            why="not a copy between devices or a loader, but the device or its memory",
        )
    return Verdict(where=f" on every load path taken ({_names(seen)})")


def _by_option(word: Word, bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict | None:
    if all(load_path.low_memory and load_path.without_low_memory in right for load_path in bad):
        rounded = word in _ROUNDED
        return Verdict(
            where=" with low_cpu_mem_usage=True, and correct without",
            why="a dtype conversion while loading" if rounded else "an effect of low_cpu_mem_usage=True",
        )
    of_other = [load_path for load_path in right if load_path.by_transformers]
    if all(load_path.by_transformers for load_path in bad) and any(
        load_path.main in {b.main for b in bad} for load_path in right
    ):
        if all(not load_path.by_transformers for load_path in right):
            return Verdict(where=" with transformers' load_adapter, and correct with PEFT's", why=_BY_TRANSFORMERS)
    elif of_other and len(of_other) == len(right) and {b.main for b in bad} <= {r.main for r in of_other}:
        return Verdict(where=" with PEFT's loader, and correct with transformers'", why="PEFT's loader")
    return None


def _when_shared(bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict:
    """Interpret bytes that are correct on an isolated device and wrong when other devices are visible."""
    if all(load_path.chooses_device for load_path in bad):
        shared = [path for path in right if path.main is LoadPath.SHARED and not path.chooses_device]
        options = _devices(shared)
        options += [_BY_TRANSFORMERS] if any(load_path.by_transformers for load_path in shared) else []
        return Verdict(where=_WHEN_SHARED + (f" or with {' or '.join(options)}" if options else ""), hops=True)
    return Verdict(where=_WHEN_SHARED, why="an effect of other visible devices, not only of copies through device 0")


def _by_device(bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict:
    if all(load_path.chooses_device for load_path in bad) and not any(load_path.chooses_device for load_path in right):
        options = " or ".join(_devices(right)) or _BY_TRANSFORMERS
        return Verdict(
            where=f" where PEFT chooses the device, and correct with {options}",
            why="copies through the device that PEFT chooses",
            hops=all(load_path.main is LoadPath.SHARED for load_path in bad),
        )
    if all(load_path.torch_device != "cpu" and not load_path.by_transformers for load_path in bad) and all(
        load_path.torch_device == "cpu" or load_path.by_transformers for load_path in right
    ):
        return Verdict(
            where=" where the file is read directly onto the device, and correct when staged through the host",
            why="the copy from the file to the device",
        )
    return Verdict(where=f" on load path {_names(bad)}, and correct on {_names(right)}")


def copies(word: Word, workers: Sequence[str], fine: Iterable[str]) -> str:
    """Name the wrong and the correct copies: to `workers` and to `fine`, all through device 0."""
    does = "drop data" if word in _NOT_ARRIVED else "change data"
    targets = [_index(label) for label in workers]
    if None in targets or 0 in targets:
        return f"copies through device 0 {does}"
    unhurt = sorted({index for index in map(_index, fine) if index} - set(targets))
    text = f"peer copies {listed([f'0→{index}' for index in dict.fromkeys(targets)])} {does}"
    verb = "is" if len(unhurt) == 1 else "are"
    return text + (f"; {listed([f'0→{index}' for index in unhurt])} {verb} fine" if unhurt else "")


def is_cpu(label: str) -> bool:
    """Return whether a worker's device is a CPU."""
    found = label_of(label)
    return found is not None and found.type == CPU


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
    """
    checked = {load_path: row for load_path, row in rows.items() if row.status not in ("skipped", "blocked")}
    if is_cpu(label):
        own = {load_path: row for load_path, row in checked.items() if main_path(load_path) != LoadPath.SHARED}
        checked = own or checked
    return frozenset(load_path for load_path, row in checked.items() if row.status in BAD), frozenset(checked)


@dataclass(slots=True)
class _Cast:
    """Tensors that load paths cast through one dtype, and the workers on which they do."""

    workers: list[Workers] = field(default_factory=list)
    by_load_path: dict[str, list[TensorComparison]] = field(default_factory=dict)


def find_casts(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report casts: where all devices make them, the load path does it; where some do not, it is a fault.

    PEFT casts to the dtype of the base, so that a worker whose base has another one says nothing.
    """
    dtypes = {worker.label: worker.info.environment.get("dtype") for worker in evidence.workers}
    adapter = [t for t in evidence.tensors if t.stage == "adapter"]
    defaults = {(t.name, t.load_path): t.dtype for t in adapter if not is_alternative(t.load_path)}
    casts: dict[tuple[str, tuple[str, ...]], _Cast] = {}
    stored: dict[tuple[str, str], dict[str, list[TensorComparison]]] = {}
    for tensor in adapter:
        if not is_alternative(tensor.load_path) or tensor.layer == SETTINGS_LAYER:
            continue
        usual = defaults.get((tensor.name, main_path(tensor.load_path)))
        if usual is not None and tensor.dtype not in ("", usual):
            stored.setdefault((tensor.dtype, usual), {}).setdefault(tensor.load_path, []).append(tensor)
        through = [outcome for outcome in tensor.outcomes if outcome.cast]
        if through:
            bases = {dtypes.get(worker) for outcome in through for worker in outcome.workers}
            without = (row for row in tensor.outcomes if not row.cast and row.status == "equal")
            partial = any(dtypes.get(worker) in bases for row in without for worker in row.workers)
            # the reference worker does not take every load path itself: where all cast, there is one note for all
            named = tuple(worker for outcome in through for worker in outcome.workers) if partial else ()
            cast = casts.setdefault((through[0].cast, named), _Cast())
            cast.workers += (outcome.workers for outcome in through)
            cast.by_load_path.setdefault(tensor.load_path, []).append(tensor)
    for (dtype, partial_workers), cast in casts.items():
        first = next(iter(cast.by_load_path.values()))
        tail = (
            "but not on the other devices on this load path"
            if partial_workers
            else "on every device: PEFT casts them to the dtype of the base while loading"
        )
        names = tuple(names_in(cast.workers))
        who = listed(names) if len(names) <= MOST_NAMES else some(names)
        opening = f"adapter · {who} · the file's values rounded through {dtype}"
        ending = f"with low_cpu_mem_usage=True ({', '.join(cast.by_load_path)}), {tail}"
        yield Finding(
            kind=kinds.DTYPE_ON_THE_WAY,
            severity="error" if partial_workers else "note",
            message=f"{opening} in {counted(len(first), 'tensor')} {ending}",
            general=f"{opening} {ending}",
            workers=names,
            tensors=tuple(t.name for t in first),
            load_paths=tuple(cast.by_load_path),
        )
    for (dtype, usual), by_load_path in stored.items():
        first = next(iter(by_load_path.values()))
        where = f"stored in {dtype} on {', '.join(by_load_path)}, and in {usual} by default"
        yield Finding(
            kind=kinds.DTYPE_ON_THE_WAY,
            severity="note",
            message=f"adapter · {counted(len(first), 'tensor')} {where}",
            general=f"adapter · tensors {where}",
            workers=first[0].workers,
            tensors=tuple(t.name for t in first),
            load_paths=tuple(by_load_path),
        )


def _devices(load_paths: Iterable[LoadPath]) -> list[str]:
    return sorted({f"torch_device={path.torch_device}" for path in load_paths if path.torch_device})


def _names(load_paths: Iterable[LoadPath]) -> str:
    chosen = set(load_paths)
    return ", ".join(load_path.value for load_path in LoadPath if load_path in chosen)


def _index(worker: str) -> int | None:
    label = label_of(worker)
    return None if label is None else label.index


FINDERS = (Finder(name="casts", phase=Phase.STAGES, position=5, find=find_casts),)
