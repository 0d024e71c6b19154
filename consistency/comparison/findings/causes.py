"""Rows that one cause explains -> one finding: *all 128 lora_B tensors on cuda:1 and cuda:3*, not 256 of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import msgspec

from consistency.capture.names import SETTINGS_LAYER, WHOLE_MODEL
from consistency.capture.wording import and_more, listed, some
from consistency.case import standard
from consistency.case.load_path import is_alternative
from consistency.case.stages import COMPUTES_WITH_WEIGHTS, MOVES_WEIGHTS
from consistency.comparison.findings.details import CORRECTLY_ROUNDED, describe
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.findings.load_paths import (
    Verdict,
    copies,
    is_cpu,
    is_software,
    judge_load_paths,
    load_paths_taken,
)
from consistency.comparison.findings.next_command import compare_with_source, run_and_repeat
from consistency.comparison.judge import NO_RECORD
from consistency.comparison.layers import block_of
from consistency.comparison.outcomes import Workers, gathered, names_in
from consistency.comparison.result import Consequence, Finding, Outcome, TensorComparison
from consistency.numerics import words
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word

_MOST_DETAILS = 5
_MOST_SENTENCES = 3
NO_COUNTERPART = frozenset({words.MISSING, words.UNEXPECTED})
"""Words of tensors that nothing was stored of."""

_COMPUTED = (Rule.BOUND, Rule.RELATIVE, Rule.BLOCK, Rule.USER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hit:
    """One tensor that is wrong on workers that saw the same: their row on the first load path where it is, and all."""

    row: Outcome
    workers: Workers
    home: str
    wrong: Set[str]
    taken: Set[str]

    @property
    def word(self) -> Word:
        return self.row.word or Word(self.row.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """What the tensors of a group have in common."""

    stage: str
    word: Word
    verdict: Verdict
    workers: tuple[str, ...]


@dataclass(slots=True)
class _Group:
    """Tensors that one cause explains, each with one of its rows, and on which load paths and workers."""

    tensors: list[TensorComparison] = field(default_factory=list)
    samples: list[Outcome] = field(default_factory=list)
    places: dict[tuple[str, str], None] = field(default_factory=dict)
    _taken: set[tuple[str, Workers]] = field(default_factory=set)

    def add(self, tensor: TensorComparison, hits: Sequence[_Hit]) -> None:
        self.tensors.append(tensor)
        self.samples.append(hits[0].row)
        for hit in hits:
            for load_path in sorted(hit.wrong):
                if (load_path, hit.workers) not in self._taken:
                    self._taken.add((load_path, hit.workers))
                    self.places.update({(load_path, worker): None for worker in hit.workers})

    @property
    def rule(self) -> str:
        return self.tensors[0].rule

    @property
    def load_paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(load_path for load_path, _ in self.places))


_ByLoadPath = Mapping[str, TensorComparison]
_Split = Callable[[tuple[tuple[Workers, ...], ...], tuple[Workers, ...]], list[tuple[Workers, tuple[int, ...]]]]


_NO_LAYERS = frozenset({SETTINGS_LAYER, WHOLE_MODEL})
"""What stands for no tensor of the model."""


def find_causes(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report mismatches by cause, but for those that another finder reports alone."""
    return causes_of(
        evidence.unclaimed,
        next_step=functools.partial(run_and_repeat, evidence),
        compare_file=functools.partial(compare_with_source, evidence),
    )


def causes_of(
    tensors: Sequence[TensorComparison],
    *,
    next_step: Callable[[Sequence[str]], str | None],
    compare_file: Callable[[str], str | None] = lambda _: None,
) -> Iterable[Finding]:
    """Group mismatches by stage, diagnosis, the workers affected, and what the load paths show.

    Parameters
    ----------
    tensors : sequence of TensorComparison
    next_step : callable
        Given the workers concerned, what to type next.
    compare_file : callable, optional
        The same for a stage whose file is not what the model wants: to run it again would show the same.
    """
    # `find_device_use` reports these
    tensors = [t for t in tensors if not any(row.word == words.TOUCHED for row in t.outcomes)]
    wrong = _by_name(tensors)
    groups = _grouped(wrong, many=len({t.load_path for t in tensors if not is_alternative(t.load_path)}) > 1)
    totals = _totals(tensors)
    follows = _consequences(groups)
    renamed = {cause.workers: text for cause, group in groups.items() if (text := _renamed(cause, group, groups))}
    for cause, group in groups.items():
        if any(cause in caused for caused in follows.values()):
            continue
        load_paths = group.load_paths
        same = [wrong[t.name][path] for t in group.tensors for path in load_paths if path in wrong[t.name]]
        software = is_software(same, cause.workers)
        caused = [(other, groups[other]) for other in follows.get(cause, ())]
        opening = f"{cause.stage} · {some(cause.workers)} · "
        differ = _of_files(group, cause.workers)
        reasons = [_why(cause, group, same, software=software), differ, _deeper(cause, group, tensors), _strict(group)]
        new_names = renamed.get(cause.workers) if cause.word in NO_COUNTERPART else None
        file = compare_file(cause.stage) if _is_of_the_file(cause, group) else None
        why = ": ".join(filter(None, [*reasons, new_names if cause.word == words.UNEXPECTED else None]))
        ending = f"{cause.verdict.where}: {why}" if why else cause.verdict.where
        what = _what(cause, group, totals)
        yield Finding(
            kind=cause.word,
            severity="warning" if software else "error",
            message=f"{opening}{what}{ending}",
            general=f"{opening}{_in_general(cause, group)}{ending}",
            workers=cause.workers,
            tensors=tuple(dict.fromkeys(t.name for one in (group, *(of for _, of in caused)) for t in one.tensors)),
            cause=why or None,
            consequences=tuple(
                Consequence(
                    stage=other.stage,
                    message=f"{other.stage} · {some(other.workers)} · {_what(other, of, totals)}",
                    workers=other.workers,
                    tensors=tuple(dict.fromkeys(t.name for t in of.tensors)),
                )
                for other, of in caused
            ),
            detail=tuple(
                _described(t, row, what) for t, row in zip(group.tensors[:_MOST_DETAILS], group.samples, strict=False)
            )
            + (("results of each are judged by its own files",) if differ else ()),
            next=_RENAME if new_names else file or next_step(cause.workers) or (_WHICH_FILE if differ else None),
            load_paths=load_paths,
        )


def _of_files(group: _Group, workers: Sequence[str]) -> str:
    """State that workers hold the bytes of their own files, which are not those of the reference worker's."""
    if not all(row.own_file is True for row in group.samples):
        return ""
    others = {w for t in group.tensors for row in t.outcomes if row.status == "equal" for w in row.workers} - {*workers}
    if len(others) < len(workers):
        return f"the files differ, and those of {some(sorted(others))} are the odd ones"
    return "the files differ" if len(others) > len(workers) else "the files differ, and nothing tells which is right"


def _by_name(tensors: Sequence[TensorComparison]) -> dict[str, dict[str, TensorComparison]]:
    """Return the tensors that are wrong anywhere, by name and load path."""
    found: dict[str, dict[str, TensorComparison]] = {tensor.name: {} for tensor in tensors if tensor.is_wrong}
    for tensor in tensors:
        if tensor.name in found:
            found[tensor.name][tensor.load_path] = tensor
    return found


def _grouped(wrong: Mapping[str, _ByLoadPath], *, many: bool) -> dict[_Cause, _Group]:
    groups: dict[_Cause, _Group] = {}
    split, join = functools.cache(_split), functools.cache(_join)  # each found once for many tensors
    for by_load_path in wrong.values():
        same: dict[tuple[str, Word, Verdict], list[_Hit]] = {}
        for hit in _hits(by_load_path, split):
            stage = by_load_path[hit.home].stage
            verdict = judge_load_paths(hit.word, hit.wrong, hit.taken, stage=stage, many=many)
            same.setdefault((hit.home, hit.word, verdict), []).append(hit)
        for (home, word, verdict), hits in same.items():
            tensor = by_load_path[home]
            order = tuple(one.workers for one in _in_order(by_load_path))
            workers = join(tuple(hit.workers for hit in hits), order)
            cause = _Cause(stage=tensor.stage, word=word, verdict=verdict, workers=workers)
            groups.setdefault(cause, _Group()).add(tensor, hits)
    return groups


def _split(paths: tuple[tuple[Workers, ...], ...], order: tuple[Workers, ...]) -> list[tuple[Workers, tuple[int, ...]]]:
    """Return sets of workers, in order, and which set of each load path they are in: -1 where in none.

    A CPU is never in a set with another device: it takes other load paths.
    """
    places: dict[str, list[int]] = {}
    for path, sets in enumerate(paths):
        for number, workers in enumerate(sets):
            for worker in workers:
                places.setdefault(worker, [-1] * len(paths))[path] = number
    alike = gathered(((is_cpu(worker), tuple(places[worker])), worker) for worker in _ranks(order))
    return [(tuple(workers), at) for (_, at), workers in alike.items()]


def _join(sets: tuple[Workers, ...], order: tuple[Workers, ...]) -> Workers:
    """Return the workers of several sets, in order."""
    if len(sets) == 1:
        return sets[0]
    return tuple(sorted((worker for workers in sets for worker in workers), key=_ranks(order).__getitem__))


def _ranks(order: Iterable[Workers]) -> dict[str, int]:
    names = dict.fromkeys(worker for workers in order for worker in workers)
    return {worker: rank for rank, worker in enumerate(names)}


def _in_order(by_load_path: _ByLoadPath) -> list[TensorComparison]:
    """Return a tensor on all load paths, the default ones first."""
    return [by_load_path[path] for path in sorted(by_load_path, key=is_alternative)]


def _hits(by_load_path: _ByLoadPath, split: _Split) -> Iterator[_Hit]:
    """Yield where one tensor is wrong, by workers that saw the same of it on all load paths."""
    tensors = _in_order(by_load_path)
    paths = [tensor.load_path for tensor in tensors]
    sets = tuple(tuple(outcome.workers for outcome in tensor.outcomes) for tensor in tensors)
    for workers, places in split(sets, tuple(tensor.workers for tensor in tensors)):
        rows = {
            path: tensor.outcomes[place]
            for path, tensor, place in zip(paths, tensors, places, strict=True)
            if place >= 0
        }
        wrong, taken = load_paths_taken(workers[0], rows)
        if wrong:
            home = next(load_path for load_path in rows if load_path in wrong)
            yield _Hit(row=rows[home], workers=workers, home=home, wrong=wrong, taken=taken)


def _totals(tensors: Sequence[TensorComparison]) -> dict[tuple[str, str], Counter[str]]:
    """Count the tensors of each name by stage and load path."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for tensor in tensors:
        if tensor.layer not in _NO_LAYERS:
            totals.setdefault((tensor.stage, tensor.load_path), Counter())[tensor.tensor] += 1
    return totals


def _consequences(groups: Mapping[_Cause, _Group]) -> dict[_Cause, list[_Cause]]:
    """Return what was computed with wrong bytes, on every worker and load path, by the first cause of these.

    And choices in a block of which a result is wrong that is not of a module that holds the chooser: all results were
    computed with the reference's choices.
    """
    moved = {cause: group for cause, group in groups.items() if cause.stage in MOVES_WEIGHTS}
    every = {place for group in moved.values() for place in group.places}
    found: dict[_Cause, list[_Cause]] = {}
    for cause, group in groups.items():
        if cause.stage in COMPUTES_WITH_WEIGHTS and every.issuperset(group.places):
            first = next(c for c, of in moved.items() if not of.places.keys().isdisjoint(group.places))
            found.setdefault(first, []).append(cause)
    caused = {cause for of in found.values() for cause in of}
    for cause, group in groups.items():
        if cause.word == words.DECISION_FLIPPED and cause not in caused:
            others = [
                c for c in groups if (c.stage, c.workers) == (cause.stage, cause.workers) and c.word != cause.word
            ]
            of = [next((c for c in others if _leads_to(groups[c], tensor)), None) for tensor in group.tensors]
            if of[0] is not None and None not in of:
                found.setdefault(of[0], []).append(cause)
    return found


def _leads_to(group: _Group, chosen: TensorComparison) -> bool:
    block, chooser = block_of(chosen.layer), f"{chosen.layer}."
    return any(block_of(t.layer) == block and not chooser.startswith(f"{t.layer}.") for t in group.tensors)


def _is_of_the_file(cause: _Cause, group: _Group) -> bool:
    """Return whether tensors are in the file and not in the model, or the reverse, on every worker."""
    everywhere = all(len(tensor.workers) == len(cause.workers) for tensor in group.tensors)
    return cause.word in NO_COUNTERPART and cause.stage in MOVES_WEIGHTS and everywhere


def _deeper(cause: _Cause, group: _Group, tensors: Sequence[TensorComparison]) -> str:
    """State that an adapter is for a deeper base, where all that has no counterpart is in layers past its last."""
    if cause.word != words.UNEXPECTED or cause.stage != standard.ADAPTER:
        return ""
    wrong = {tensor.name for tensor in group.tensors}
    beyond = [_depth(tensor) for tensor in group.tensors]
    there = [_depth(tensor) for tensor in tensors if tensor.stage == standard.ADAPTER and tensor.name not in wrong]
    if None in beyond or not (last := max((one for one in there if one is not None), default=-1) + 1) > 0:
        return ""
    deepest = [one for one in beyond if one is not None]
    return f"the adapter is for {max(deepest) + 1} layers, the base has {last}" if min(deepest) >= last else ""


_WHICH_FILE = "compare sha256sum of both files with where they came from; consistency diff A B names what differs"
_RENAME = "rename the keys in the file, or save the adapter again from the model that PEFT made"


def _renamed(cause: _Cause, group: _Group, groups: Mapping[_Cause, _Group]) -> str:
    """State the part of their paths by which names in the file differ from all those that the model lacks."""
    lacking = groups.get(replace(cause, word=words.MISSING))
    has, lacks = ({f"{t.layer}.{t.tensor}" for t in of.tensors} if of else set() for of in (group, lacking))
    if cause.word != words.UNEXPECTED or not lacks or len(has) != len(lacks):
        return ""
    own = min(has).split(".")
    wanted = max((name.split(".") for name in sorted(lacks)), key=lambda parts: _alike(own[::-1], parts[::-1]))
    end = _alike(own[::-1], wanted[::-1])
    begin = _alike(own[: len(own) - end], wanted[: len(wanted) - end])
    begin -= begin == len(own) - end > 0  # a part that the file's names lack is told by the one before it
    old, new = ("".join(f"{part}." for part in parts[begin : len(parts) - end]) for parts in (own, wanted))
    if not old or {name.replace(old, new, 1) for name in has} != lacks:
        return ""
    old = old.removesuffix("base_model.model.") or old  # which begins all names in the file, and is left out here
    return f"the file has {old!r} where the model has {new!r}" if new else f"but for {old!r} they are those missing"


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many parts are the same at the beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _strict(group: _Group) -> str:
    """State that a user's tolerance asks for more than the dtype can hold, where it fails what is correctly rounded."""
    pairs = [pair for pair in zip(group.tensors, group.samples, strict=True) if pair[1].mismatched == 0]
    if group.rule != Rule.USER or not pairs:
        return ""
    return f"{len(pairs)} of them hold {CORRECTLY_ROUNDED}{pairs[0][0].dtype}"


def _depth(tensor: TensorComparison) -> int | None:
    """Return the number of a layer: `3` of `model.layers.3.self_attn.q_proj`."""
    return next((int(part) for part in tensor.layer.split(".") if part.isdecimal()), None)


def _described(tensor: TensorComparison, row: Outcome, what: str) -> str:
    """Describe a tensor, without a reason that the finding gives already."""
    return describe(tensor, msgspec.structs.replace(row, reason=None) if row.reason and row.reason in what else row)


def _what(cause: _Cause, group: _Group, totals: Mapping[tuple[str, str], Counter[str]]) -> str:
    """Name the difference and the tensors; of facts, the workers' own sentences, which are more exact."""
    if group.rule == Rule.LIMIT:
        reasons = list(dict.fromkeys(row.reason for row in group.samples if row.reason))
        if len(reasons) > _MOST_SENTENCES:
            reasons = [*reasons[:_MOST_SENTENCES], and_more(len(reasons) - _MOST_SENTENCES)]
        if reasons:
            return "; ".join(reasons)
    total = totals.get((cause.stage, group.tensors[0].load_path), Counter())
    text = words.about(cause.word, _how_many(group, total), computed=group.rule in _COMPUTED)
    if cause.word == words.MISSING:
        why = {row.reason for row in group.samples} - {None, NO_RECORD}
        text += f": {why.pop()}" if len(why) == 1 else ""
    return text


def _in_general(cause: _Cause, group: _Group) -> str:
    """Name the difference and the tensors without counts, sizes and layers, which differ from case to case."""
    names = sorted({tensor.tensor for tensor in group.tensors})
    tensors = listed(names) if len(names) <= _MOST_SENTENCES else "several"
    if group.rule == Rule.LIMIT:
        return words.phrase_of(cause.word).replace("{}", tensors)
    return words.about(cause.word, f"{tensors} tensors", computed=group.rule in _COMPUTED)


def _how_many(group: _Group, totals: Counter[str]) -> str:
    first, count = group.tensors[0], len(group.tensors)
    if count == 1:
        return f"{first.tensor} of {first.layer}"
    if len({t.tensor for t in group.tensors}) > 1:
        return f"{sum(t.layer not in _NO_LAYERS for t in group.tensors) or count} of {totals.total() or count} tensors"
    if group.rule == Rule.LIMIT:
        return f"{first.tensor} of {count} of {totals[first.tensor]} layers"
    return f"{count} of {totals[first.tensor]} {first.tensor} tensors"


def _why(cause: _Cause, group: _Group, same: Sequence[TensorComparison], *, software: bool) -> str:
    if group.rule == Rule.LIMIT:  # no bytes that could have taken a load path
        return ""
    why = copies(cause.word, cause.workers, _right(same, cause.workers)) if cause.verdict.hops else cause.verdict.why
    why += ", identical on every device, so no device is at fault" if software else ""
    return why


def _right(same: Sequence[TensorComparison], workers: Sequence[str]) -> list[str]:
    """Return the workers that received the same tensors on the same load paths, all of them right."""
    outcomes = [outcome for tensor in same for outcome in tensor.outcomes]
    hurt = {*workers, *names_in(one.workers for one in outcomes if one.status != "equal")}
    return [worker for worker in names_in(one.workers for one in outcomes) if worker not in hurt]


FINDERS = (Finder(name="causes", phase=Phase.CAUSES, position=1, find=find_causes),)
