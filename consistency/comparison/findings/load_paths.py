"""What the roads together say of a cause: wrong on which, right on which -> copy path, device, loader or dtype."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from consistency.capture.names import SETTINGS_LAYER
from consistency.case.load_path import LoadPath, is_alternative, main_path
from consistency.comparison.result import Finding, Row, TensorComparison
from consistency.numerics.words import Word

DTYPE_ON_THE_WAY = "dtype-on-the-way"
"""Kind of the finding that a road casts what it carries."""

_LABEL = re.compile(r"(?:^|:)(?P<type>[a-z]+)(?::(?P<index>\d+))?(?:@.*)?$")
_ROUNDED = frozenset({Word.ROUNDED_TO_BF16, Word.ROUNDED_TO_FP16, Word.ROUNDED_TO_TF32, Word.DTYPE})
_NOT_ARRIVED = frozenset({Word.ZEROS, Word.NEVER_WRITTEN, Word.FRESH_INIT, Word.STALE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the roads say of one cause.

    Attributes
    ----------
    where : str
        On which roads the bytes are wrong and on which right, as it follows "zeros in 128 of 128 lora_B tensors".
    why : str
        The cause, where the roads tell it.
    hops : bool
        The bytes travel from device 0 to each device: `copies` names these journeys.
    """

    where: str = ""
    why: str = ""
    hops: bool = False


def judge_load_paths(
    word: Word, wrong: Set[str], taken: Set[str], *, stage: str = "adapter", many: bool = True
) -> Verdict:
    """Tell the cause of wrong bytes by the roads on which they are wrong.

    Parameters
    ----------
    word : Word
        Diagnosis of the difference.
    wrong, taken : set of str
        Roads on which one tensor of one worker is wrong, and all on which it was looked at.
    stage : str
        Only the adapter takes side roads; other stages know who is visible.
    many : bool
        The comparison has workers on more than one default road, so one has to be named.
    """
    try:
        bad, seen = {LoadPath(name) for name in wrong}, {LoadPath(name) for name in taken}
    except ValueError:  # of a later version, or no road at all: weight files that were compared
        return Verdict(where=f" on the road {', '.join(sorted(wrong))}" if many else "")
    right = seen - bad
    if not right and len(seen) == 1:
        return Verdict(where=f" on the road {_names(bad)}" if many else "")
    if not right:
        return _on_every(seen)
    alone = any(load_path.main is LoadPath.ISOLATED for load_path in right) and all(
        load_path.main is LoadPath.SHARED for load_path in bad
    )
    if stage != "adapter":
        text = (
            " when all devices are visible, and the right ones when alone" if alone else f" on the road {_names(bad)}"
        )
        return Verdict(where=text, why="a copy between devices" if alone else "")
    return _by_option(word, bad, right) or (_alone(bad, right) if alone else _by_device(bad, right))


def _on_every(seen: Set[LoadPath]) -> Verdict:
    # alone there is no copy from another device, and through the host or by another loader no reading onto it
    elsewhere = any(load_path.torch_device == "cpu" or load_path.by_transformers for load_path in seen)
    if elsewhere and any(load_path.main is LoadPath.ISOLATED for load_path in seen):
        return Verdict(
            where=f" on every road ({_names(seen)})",
            why="neither a copy between devices nor a loader, but the device or its memory",
        )
    return Verdict(where=f" on every road taken ({_names(seen)})")


def _by_option(word: Word, bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict | None:
    if all(load_path.low_memory and load_path.without_low_memory in right for load_path in bad):
        rounded = word in _ROUNDED
        return Verdict(
            where=" with low_cpu_mem_usage=True, and the right bytes without",
            why="the dtype on the way" if rounded else "what low_cpu_mem_usage=True does on the way",
        )
    of_other = [load_path for load_path in right if load_path.by_transformers]
    if all(load_path.by_transformers for load_path in bad) and any(
        load_path.main in {b.main for b in bad} for load_path in right
    ):
        if all(not load_path.by_transformers for load_path in right):
            return Verdict(
                where=" with transformers' load_adapter, and the right bytes with PEFT's", why="transformers' loader"
            )
    elif of_other and len(of_other) == len(right) and {b.main for b in bad} <= {r.main for r in of_other}:
        return Verdict(where=" with PEFT's loader, and the right bytes with transformers'", why="PEFT's loader")
    return None


def _alone(bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict:
    """Say what it means that the bytes are right alone and wrong among other devices."""
    beside = [load_path for load_path in right if load_path.main is LoadPath.SHARED and not load_path.chooses_device]
    text = " when all devices are visible, and the right bytes when alone"
    if all(load_path.chooses_device for load_path in bad):
        told = sorted({f"torch_device={load_path.torch_device}" for load_path in beside if load_path.torch_device})
        told += ["transformers' loader"] if any(load_path.by_transformers for load_path in beside) else []
        also = f" or with {' or '.join(told)}" if told else ""
        return Verdict(where=text + also, why="", hops=True)
    return Verdict(where=text, why="what the other visible devices change, not the way over device 0 alone")


def _by_device(bad: Set[LoadPath], right: Set[LoadPath]) -> Verdict:
    if all(load_path.chooses_device for load_path in bad) and not any(load_path.chooses_device for load_path in right):
        told = sorted({f"torch_device={load_path.torch_device}" for load_path in right if load_path.torch_device})
        with_it = " or ".join(told) or "transformers' loader"
        return Verdict(
            where=f" where PEFT chooses the device, and the right bytes with {with_it}",
            why="copies by way of the device that PEFT chooses",
            hops=all(load_path.main is LoadPath.SHARED for load_path in bad),
        )
    if all(load_path.torch_device != "cpu" and not load_path.by_transformers for load_path in bad) and all(
        load_path.torch_device == "cpu" or load_path.by_transformers for load_path in right
    ):
        return Verdict(
            where=" where the file is read straight onto the device, and the right bytes by way of the host",
            why="the copy from the file to the device",
        )
    return Verdict(where=f" on the road {_names(bad)}, and the right bytes on {_names(right)}")


def copies(word: Word, workers: Sequence[str], fine: Iterable[str]) -> str:
    """Name the copies between devices that went wrong, and those that did not.

    Parameters
    ----------
    word : Word
    workers : sequence of str
        Labels of the workers whose bytes came by way of device 0 and are wrong.
    fine : iterable of str
        Labels of those whose bytes came the same way and are right.
    """
    does = "drop data" if word in _NOT_ARRIVED else "change data"
    targets = [_index(label) for label in workers]
    if None in targets or 0 in targets:
        return f"copies by way of device 0 {does}"
    unhurt = sorted({index for index in map(_index, fine) if index} - set(targets))
    text = f"peer copies {_and([f'0→{index}' for index in dict.fromkeys(targets)])} {does}"
    verb = "is" if len(unhurt) == 1 else "are"
    return text + (f"; {_and([f'0→{index}' for index in unhurt])} {verb} fine" if unhurt else "")


def is_software(tensors: Iterable[TensorComparison], workers: Sequence[str]) -> bool:
    """Tell whether what is wrong on side roads is the software's doing: the CPU too is wrong, and all to the bit alike.

    Parameters
    ----------
    tensors : iterable of TensorComparison
        What is wrong, on every road on which it is.
    workers : sequence of str
        Those on which it is.
    """
    if len(workers) < 2 or not any(_type(label) == "cpu" for label in workers):
        return False
    return all(is_alternative(tensor.load_path) and len(tensor.classes) == 1 for tensor in tensors)


def load_paths_taken(label: str, rows: Mapping[str, Row]) -> tuple[frozenset[str], frozenset[str]]:
    """Return on which roads a worker's tensor is wrong, and on which it was looked at.

    The reference worker stands on every road for the others to be held against; a CPU takes those alone that leave no
    other device visible.
    """
    looked = {load_path: row for load_path, row in rows.items() if row.status not in ("skipped", "blocked")}
    if _type(label) == "cpu":
        own = {load_path: row for load_path, row in looked.items() if main_path(load_path) != LoadPath.SHARED}
        looked = own or looked
    wrong = frozenset(
        load_path for load_path, row in looked.items() if row.status in ("outside", "missing", "unexpected")
    )
    return wrong, frozenset(looked)


def find_casts(tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    """Say where a road casts what it carries: a road's own doing where all devices agree, a fault where they do not."""
    defaults = {
        (t.name, t.load_path): t.dtype for t in tensors if not is_alternative(t.load_path) and t.stage == "adapter"
    }
    through: dict[tuple[str, tuple[str, ...], bool], dict[str, list[TensorComparison]]] = {}
    kept: dict[tuple[str, str], dict[str, list[TensorComparison]]] = {}
    for tensor in tensors:
        if tensor.stage != "adapter" or not is_alternative(tensor.load_path) or tensor.layer == SETTINGS_LAYER:
            continue
        usual = defaults.get((tensor.name, main_path(tensor.load_path)))
        if usual is not None and tensor.dtype not in ("", usual):
            kept.setdefault((tensor.dtype, usual), {}).setdefault(tensor.load_path, []).append(tensor)
        cast = [row for row in tensor.rows if row.cast]
        if cast:
            others = any(row not in cast and row.status == "equal" for row in tensor.rows)
            key = (str(cast[0].cast), tuple(row.worker for row in cast), others)
            through.setdefault(key, {}).setdefault(tensor.load_path, []).append(tensor)
    for (dtype, workers, others), by_load_path in _over_load_paths(through).items():
        where = f"low_cpu_mem_usage=True ({', '.join(by_load_path)})"
        first = next(iter(by_load_path.values()))
        tail = (
            "and not on the other devices that took this road"
            if others
            else "on every device that took it: PEFT moves them to the dtype of the base on the way"
        )
        yield Finding(
            kind=DTYPE_ON_THE_WAY,
            severity="error" if others else "note",
            message=(
                f"adapter · {_and(workers)} · the file's values rounded through {dtype} in {_count(first)} "
                f"with {where}, {tail}"
            ),
            workers=workers,
            tensors=tuple(t.name for t in first),
            load_paths=tuple(by_load_path),
        )
    for (dtype, usual), by_load_path in kept.items():
        first = next(iter(by_load_path.values()))
        yield Finding(
            kind=DTYPE_ON_THE_WAY,
            severity="note",
            message=(
                f"adapter · {_count(first)} kept in {dtype} on {', '.join(by_load_path)}, and in {usual} by default"
            ),
            workers=tuple(dict.fromkeys(row.worker for row in first[0].rows)),
            tensors=tuple(t.name for t in first),
            load_paths=tuple(by_load_path),
        )


def _over_load_paths(
    found: Mapping[tuple[str, tuple[str, ...], bool], dict[str, list[TensorComparison]]],
) -> dict[tuple[str, tuple[str, ...], bool], dict[str, list[TensorComparison]]]:
    """Leave out the reference worker's stand on roads that it did not take: a note for the union of their workers."""
    alike: dict[tuple[str, bool], tuple[dict[str, None], dict[str, list[TensorComparison]]]] = {}
    merged: dict[tuple[str, tuple[str, ...], bool], dict[str, list[TensorComparison]]] = {}
    for (dtype, workers, others), by_load_path in found.items():
        if others:
            merged[dtype, workers, others] = by_load_path
            continue
        names, load_paths = alike.setdefault((dtype, others), ({}, {}))
        names.update(dict.fromkeys(workers))
        for load_path, tensors in by_load_path.items():
            load_paths.setdefault(load_path, []).extend(tensors)
    for (dtype, others), (names, load_paths) in alike.items():
        merged[dtype, tuple(names), others] = load_paths
    return merged


def _count(tensors: Sequence[TensorComparison]) -> str:
    return f"{len(tensors)} tensor" + "s" * (len(tensors) != 1)


def _names(load_paths: Iterable[LoadPath]) -> str:
    chosen = set(load_paths)
    return ", ".join(load_path.value for load_path in LoadPath if load_path in chosen)


def _type(label: str) -> str | None:
    match = _LABEL.search(label)
    return None if match is None else match["type"]


def _index(label: str) -> int | None:
    match = _LABEL.search(label)
    return None if match is None or match["index"] is None else int(match["index"])


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
