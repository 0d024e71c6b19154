"""One finding for all rows that one cause explains: *all 128 lora_B tensors on cuda:1 and cuda:3*, not 256 of them."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import msgspec

from consistency.capture.names import SETTINGS_LAYER, TO_DO, WHERE, WHOLE_MODEL
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
from consistency.comparison.outcomes import Workers, group_by_key, union_of_workers
from consistency.comparison.result import Consequence, Finding, Outcome, Severity, TensorComparison, rows_of
from consistency.numerics import words
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word

_MOST_DETAILS = 5
_MOST_SENTENCES = 3
NO_COUNTERPART = frozenset({words.MISSING, words.UNEXPECTED})
"""Words of tensors that only one side has: the file or the model."""

_COMPUTED = (Rule.BOUND, Rule.RELATIVE, Rule.BLOCK, Rule.USER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hit:
    """A wrong tensor, on workers that share its row on every load path."""

    row: Outcome  # on the load path `home`
    workers: Workers
    home: str  # the first load path on which the tensor is wrong, the default ones first
    wrong: Set[str]  # all load paths on which it is wrong
    taken: Set[str]  # all load paths on which it was checked

    @property
    def word(self) -> Word:
        return self.row.word or Word(self.row.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """The properties that the tensors of a group have in common."""

    stage: str
    word: Word
    verdict: Verdict
    workers: tuple[str, ...]


@dataclass(slots=True)
class _Group:
    """Tensors that one cause explains, each with one of its rows, and on which load paths and workers."""

    tensors: list[TensorComparison] = field(default_factory=list)
    samples: list[Outcome] = field(default_factory=list)  # a row of each tensor
    places: dict[tuple[str, str], None] = field(default_factory=dict)  # load paths, each with a worker
    # load paths, each with a set of workers, that `places` has already: many tensors are wrong on the same ones
    _added: set[tuple[str, Workers]] = field(default_factory=set)

    def add(self, tensor: TensorComparison, hits: Sequence[_Hit]) -> None:
        self.tensors.append(tensor)
        self.samples.append(hits[0].row)
        for hit in hits:
            for load_path in sorted(hit.wrong):  # sorted, so that a report is the same each time
                if (load_path, hit.workers) not in self._added:
                    self._added.add((load_path, hit.workers))
                    self.places.update({(load_path, worker): None for worker in hit.workers})

    @property
    def rule(self) -> str:
        return self.tensors[0].rule

    @property
    def load_paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(load_path for load_path, _ in self.places))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.name for tensor in self.tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Explanation:
    """The reasons for the mismatches of a cause, as far as they are known."""

    is_software: bool  # whether software is at fault, and no device
    own_files: str  # that the workers hold the bytes of their own files; empty where they do not
    renaming: str  # how names of the file and of the model differ; empty where this explains nothing
    why: str  # all reasons in one clause; empty where none is known


_ByLoadPath = Mapping[str, TensorComparison]
"""One tensor by load path."""
_Totals = Mapping[tuple[str, str], Counter[str]]
"""Number of tensors of each name, by stage and load path."""
_Split = Callable[[tuple[tuple[Workers, ...], ...], tuple[Workers, ...]], list[tuple[Workers, tuple[int, ...]]]]
"""The type of `_split`."""

_NO_LAYERS = frozenset({SETTINGS_LAYER, WHOLE_MODEL})
"""Names in place of a layer that stand for no tensor of the model."""


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
    tensors = [tensor for tensor in tensors if not any(row.word == words.TOUCHED for row in tensor.outcomes)]
    wrong = _wrong_by_name(tensors)
    default_paths = {tensor.load_path for tensor in tensors if not is_alternative(tensor.load_path)}
    groups = _grouped(wrong, many=len(default_paths) > 1)
    totals = _totals(tensors)
    consequences = _consequences(groups)
    renamings = _renamings(groups)
    reported_elsewhere = set(itertools.chain.from_iterable(consequences.values()))
    for cause, group in groups.items():
        # stated with the cause that it follows from
        if cause in reported_elsewhere:
            continue
        explanation = _explain(cause, group, tensors, wrong, renamings)
        opening = f"{cause.stage} · {some(cause.workers)} · "
        ending = cause.verdict.where
        if explanation.why:
            ending = f"{ending}: {explanation.why}"
        difference = _describe_difference(cause, group, totals)
        caused = [(follow_up, groups[follow_up]) for follow_up in consequences.get(cause, ())]
        severity: Severity = "warning" if explanation.is_software else "error"
        caused_names = itertools.chain.from_iterable(members.tensor_names for _, members in caused)
        yield Finding(
            kind=cause.word,
            severity=severity,
            message=f"{opening}{difference}{ending}",
            general=f"{opening}{_in_general(cause, group)}{ending}",
            workers=cause.workers,
            tensors=tuple(dict.fromkeys([*group.tensor_names, *caused_names])),
            cause=explanation.why or None,
            consequences=tuple(_consequence(follow_up, members, totals) for follow_up, members in caused),
            detail=_detail(group, difference, explanation),
            next=_next_step(cause, group, explanation, next_step, compare_file),
            load_paths=group.load_paths,
        )


def _explain(
    cause: _Cause,
    group: _Group,
    tensors: Sequence[TensorComparison],
    wrong: Mapping[str, _ByLoadPath],
    renamings: Mapping[tuple[str, ...], str],
) -> _Explanation:
    """Collect the reasons for the mismatches of a cause."""
    on_load_paths = list(_on_load_paths(group, wrong))
    software = is_software(on_load_paths, cause.workers)
    own_files = _about_own_files(group, cause.workers)
    renaming = renamings.get(cause.workers, "") if cause.word in NO_COUNTERPART else ""
    reasons = [
        _load_path_reason(cause, group, on_load_paths, software=software),
        own_files,
        _about_depth(cause, group, tensors),
        _about_long_text(group),
        _about_strict_tolerance(group),
    ]
    # the names that the model lacks are reported once: with the names that the file has instead
    if cause.word == words.UNEXPECTED:
        reasons.append(renaming)
    why = ": ".join(filter(None, reasons))
    return _Explanation(is_software=software, own_files=own_files, renaming=renaming, why=why)


def _on_load_paths(group: _Group, wrong: Mapping[str, _ByLoadPath]) -> Iterator[TensorComparison]:
    """Yield the tensors of a group on all its load paths."""
    load_paths = group.load_paths
    for tensor in group.tensors:
        by_load_path = wrong[tensor.name]
        for load_path in load_paths:
            if load_path in by_load_path:
                yield by_load_path[load_path]


def _consequence(cause: _Cause, group: _Group, totals: _Totals) -> Consequence:
    """Return a cause in the form in which the finding of its own cause states it."""
    return Consequence(
        stage=cause.stage,
        message=f"{cause.stage} · {some(cause.workers)} · {_describe_difference(cause, group, totals)}",
        workers=cause.workers,
        tensors=group.tensor_names,
    )


def _detail(group: _Group, difference: str, explanation: _Explanation) -> tuple[str, ...]:
    """Return a line for each of the first tensors of a group."""
    pairs = zip(group.tensors[:_MOST_DETAILS], group.samples, strict=False)
    lines = [_described(tensor, row, difference) for tensor, row in pairs]
    if explanation.own_files:
        lines.append("results of each are judged by its own files")
    return tuple(lines)


def _next_step(
    cause: _Cause,
    group: _Group,
    explanation: _Explanation,
    next_step: Callable[[Sequence[str]], str | None],
    compare_file: Callable[[str], str | None],
) -> str | None:
    """Return what to type or to do next; None where there is no advice."""
    if explanation.renaming:
        return _RENAME
    if to_do := _to_do(group):
        return to_do
    # to run again would show the same where the file itself is at fault
    command = compare_file(cause.stage) if _is_of_the_file(cause, group) else None
    command = command or next_step(cause.workers)
    if command:
        return command
    return _WHICH_FILE if explanation.own_files else None


def _to_do(group: _Group) -> str:
    """Return what mends the tensors of a group, where all of them say the same."""
    stated = {str(row.evidence.get(TO_DO, "")) for row in group.samples}
    return stated.pop() if len(stated) == 1 else ""


def _about_own_files(group: _Group, workers: Sequence[str]) -> str:
    """State that workers hold the bytes of their own files, and that these differ from the reference worker's file.

    The files that fewer workers have are the odd ones; where both sides have as many, neither is odd.
    """
    if not all(row.own_file is True for row in group.samples):
        return ""
    right = union_of_workers(row.workers for _, row in rows_of(group.tensors) if row.status == "equal")
    unaffected = set(right) - {*workers}
    if len(unaffected) < len(workers):
        return f"the files differ, and those of {some(sorted(unaffected))} are the odd ones"
    if len(unaffected) > len(workers):
        return "the files differ"
    return "the files differ, and nothing tells which is right"


def _wrong_by_name(tensors: Sequence[TensorComparison]) -> dict[str, dict[str, TensorComparison]]:
    """Return the tensors that are wrong on any load path, by name, each on all load paths by their name."""
    by_name: dict[str, dict[str, TensorComparison]] = {tensor.name: {} for tensor in tensors if tensor.is_wrong}
    for tensor in tensors:
        if tensor.name in by_name:
            by_name[tensor.name][tensor.load_path] = tensor
    return by_name


def _grouped(wrong: Mapping[str, _ByLoadPath], *, many: bool) -> dict[_Cause, _Group]:
    """Group wrong tensors by cause; `many` as in `judge_load_paths`."""
    groups: dict[_Cause, _Group] = {}
    split, join = functools.cache(_split), functools.cache(_join)  # each found once for many tensors
    for by_load_path in wrong.values():
        hits_by_verdict: dict[tuple[str, Word, Verdict], list[_Hit]] = {}
        for hit in _hits(by_load_path, split):
            stage = by_load_path[hit.home].stage
            verdict = judge_load_paths(hit.word, hit.wrong, hit.taken, stage=stage, many=many)
            hits_by_verdict.setdefault((hit.home, hit.word, verdict), []).append(hit)
        for (home, word, verdict), hits in hits_by_verdict.items():
            tensor = by_load_path[home]
            order = tuple(comparison.workers for comparison in _in_order(by_load_path))
            workers = join(tuple(hit.workers for hit in hits), order)
            cause = _Cause(stage=tensor.stage, word=word, verdict=verdict, workers=workers)
            groups.setdefault(cause, _Group()).add(tensor, hits)
    return groups


def _split(
    sets_by_path: tuple[tuple[Workers, ...], ...], order: tuple[Workers, ...]
) -> list[tuple[Workers, tuple[int, ...]]]:
    """Split workers into sets that share their row of a tensor on every load path.

    Each set comes with an index per load path: that of the row that its workers share there, -1 for no row.
    A CPU is never in a set with another device: it takes other load paths.

    Parameters
    ----------
    sets_by_path : tuple of tuple of tuple of str
        For each load path, the workers of each row.
    order : tuple of tuple of str
        For each load path, all workers in order.
    """
    rows_of_worker: dict[str, list[int]] = {}
    for path_index, sets in enumerate(sets_by_path):
        for row_index, workers in enumerate(sets):
            for worker in workers:
                rows_of_worker.setdefault(worker, [-1] * len(sets_by_path))[path_index] = row_index
    workers_by_rows = group_by_key(
        ((is_cpu(worker), tuple(rows_of_worker[worker])), worker) for worker in _ranks(order)
    )
    return [(tuple(workers), row_indices) for (_, row_indices), workers in workers_by_rows.items()]


def _join(sets: tuple[Workers, ...], order: tuple[Workers, ...]) -> Workers:
    """Return the workers of several sets, in order."""
    if len(sets) == 1:
        return sets[0]
    return tuple(sorted(itertools.chain.from_iterable(sets), key=_ranks(order).__getitem__))


def _ranks(order: Iterable[Workers]) -> dict[str, int]:
    """Return the place of each worker in the order of the comparison."""
    names = dict.fromkeys(itertools.chain.from_iterable(order))
    return {worker: rank for rank, worker in enumerate(names)}


def _in_order(by_load_path: _ByLoadPath) -> list[TensorComparison]:
    """Return a tensor on all load paths, the default ones first."""
    return [by_load_path[path] for path in sorted(by_load_path, key=is_alternative)]


def _hits(by_load_path: _ByLoadPath, split: _Split) -> Iterator[_Hit]:
    """Yield the load paths on which one tensor is wrong, for each set of workers that share its row on every path."""
    tensors = _in_order(by_load_path)
    paths = [tensor.load_path for tensor in tensors]
    sets = tuple(tuple(outcome.workers for outcome in tensor.outcomes) for tensor in tensors)
    for workers, row_indices in split(sets, tuple(tensor.workers for tensor in tensors)):
        rows = {
            path: tensor.outcomes[row_index]
            for path, tensor, row_index in zip(paths, tensors, row_indices, strict=True)
            if row_index >= 0
        }
        # all workers of a set have the same rows, so the first one stands for them
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
    """Return the causes that follow from another cause, by that cause.

    Results that were computed with wrong bytes, on every worker and load path, follow from the first cause of these
    bytes. Choices follow from a wrong result in their block, if its module does not hold the chooser: all results
    were computed with the reference's choices.
    """
    consequences: dict[_Cause, list[_Cause]] = {}
    moved = {cause: group for cause, group in groups.items() if cause.stage in MOVES_WEIGHTS}
    moved_places = set(itertools.chain.from_iterable(group.places for group in moved.values()))
    for cause, group in groups.items():
        # wrong bytes do not explain a result that is wrong where the bytes are right, too
        if cause.stage in COMPUTES_WITH_WEIGHTS and moved_places.issuperset(group.places):
            first = next(source for source in moved if not moved[source].places.keys().isdisjoint(group.places))
            consequences.setdefault(first, []).append(cause)
    explained = set(itertools.chain.from_iterable(consequences.values()))
    for cause, group in groups.items():
        if cause.word == words.DECISION_FLIPPED and cause not in explained:
            result = _cause_of_choices(cause, group, groups)
            if result is not None:
                consequences.setdefault(result, []).append(cause)
    return consequences


def _cause_of_choices(cause: _Cause, group: _Group, groups: Mapping[_Cause, _Group]) -> _Cause | None:
    """Return the cause of wrong results that explains the first choice; None where not every choice has one."""
    candidates = [
        candidate
        for candidate in groups
        if candidate.stage == cause.stage and candidate.workers == cause.workers and candidate.word != cause.word
    ]
    results = []
    for choice in group.tensors:
        leading = (candidate for candidate in candidates if _leads_to(groups[candidate], choice))
        results.append(next(leading, None))
    return None if None in results else results[0]


def _leads_to(group: _Group, choice: TensorComparison) -> bool:
    """Return whether a group has a result in the block of a choice, of a module that does not hold the chooser."""
    block, chooser = block_of(choice.layer), f"{choice.layer}."
    return any(
        block_of(tensor.layer) == block and not chooser.startswith(f"{tensor.layer}.") for tensor in group.tensors
    )


def _is_of_the_file(cause: _Cause, group: _Group) -> bool:
    """Return whether tensors are in the file and not in the model, or the reverse, on every worker."""
    everywhere = all(len(tensor.workers) == len(cause.workers) for tensor in group.tensors)
    return cause.word in NO_COUNTERPART and cause.stage in MOVES_WEIGHTS and everywhere


def _about_depth(cause: _Cause, group: _Group, tensors: Sequence[TensorComparison]) -> str:
    """State that an adapter is for a deeper base, where all that has no counterpart is in layers past its last."""
    if cause.word != words.UNEXPECTED or cause.stage != standard.ADAPTER:
        return ""
    unexpected = {tensor.name for tensor in group.tensors}
    adapter = [tensor for tensor in tensors if tensor.stage == standard.ADAPTER]
    base_depth = max(_layer_numbers(tensor for tensor in adapter if tensor.name not in unexpected), default=-1) + 1
    # a tensor outside the layers is unexpected for another reason
    numbers = list(_layer_numbers(group.tensors))
    all_have_numbers = len(numbers) == len(group.tensors)
    if not all_have_numbers or base_depth == 0 or min(numbers) < base_depth:
        return ""
    return f"the adapter is for {max(numbers) + 1} layers, the base has {base_depth}"


def _about_long_text(group: _Group) -> str:
    """State in which tokens of the long text a result is wrong, where nothing else is."""
    places = [row.evidence.get(WHERE) for row in group.samples]
    if not all(places):
        return ""
    return str(places[0])


_WHICH_FILE = "compare sha256sum of both files with where they came from; consistency diff A B names what differs"
_RENAME = "rename the keys in the file, or save the adapter again from the model that PEFT made"


def _renamings(groups: Mapping[_Cause, _Group]) -> dict[tuple[str, ...], str]:
    """Return how names of the file and of the model differ, by the workers, where this explains unexpected names."""
    renamings = {}
    for cause, group in groups.items():
        renaming = _renaming(cause, group, groups)
        if renaming:
            renamings[cause.workers] = renaming
    return renamings


def _renaming(cause: _Cause, group: _Group, groups: Mapping[_Cause, _Group]) -> str:
    """State the part in which all names in the file differ from the names that the model lacks; else return nothing."""
    missing = groups.get(replace(cause, word=words.MISSING))
    if cause.word != words.UNEXPECTED or missing is None:
        return ""
    file_names = {f"{tensor.layer}.{tensor.tensor}" for tensor in group.tensors}
    model_names = {f"{tensor.layer}.{tensor.tensor}" for tensor in missing.tensors}
    # a renaming gives every name of the file one of the model
    if len(file_names) != len(model_names):
        return ""
    file_part, model_part = _differing_parts(file_names, model_names)
    if not file_part or {name.replace(file_part, model_part, 1) for name in file_names} != model_names:
        return ""
    # this prefix begins all names in an adapter's file, and is not shown
    file_part = file_part.removesuffix("base_model.model.") or file_part
    if not model_part:
        return f"without {file_part!r} in their names they are the missing ones"
    return f"the file has {file_part!r} where the model has {model_part!r}"


def _differing_parts(file_names: Iterable[str], model_names: Iterable[str]) -> tuple[str, str]:
    """Return the parts in the middle that differ between a name of the file and its counterpart in the model.

    The counterpart is the name with the longest common ending.

    For `model.layers.0.q.lora_A` and `model.h.0.q.lora_A` these are `layers.` and `h.`.
    """
    file_name = min(file_names).split(".")
    model_name = max(
        (name.split(".") for name in sorted(model_names)),
        key=lambda name: _common_length(file_name[::-1], name[::-1]),
    )
    end = _common_length(file_name[::-1], model_name[::-1])
    begin = _common_length(file_name[: len(file_name) - end], model_name[: len(model_name) - end])
    # a part that the file's names lack is told by the one before it
    if begin == len(file_name) - end and begin > 0:
        begin -= 1
    file_part = "".join(f"{part}." for part in file_name[begin : len(file_name) - end])
    model_part = "".join(f"{part}." for part in model_name[begin : len(model_name) - end])
    return file_part, model_part


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many parts are the same at the beginning."""
    for length, (part, counterpart) in enumerate(zip(first, second, strict=False)):
        if part != counterpart:
            return length
    return min(len(first), len(second))


def _about_strict_tolerance(group: _Group) -> str:
    """State that a user's tolerance is narrower than one rounding, where it fails values that are correctly rounded."""
    pairs = zip(group.tensors, group.samples, strict=True)
    correctly_rounded = [tensor for tensor, row in pairs if row.mismatched == 0]
    if group.rule != Rule.USER or not correctly_rounded:
        return ""
    return f"{len(correctly_rounded)} of them hold {CORRECTLY_ROUNDED}{correctly_rounded[0].dtype}"


def _layer_numbers(tensors: Iterable[TensorComparison]) -> Iterator[int]:
    """Yield the number of the layer of each tensor that has one: `3` of `model.layers.3.self_attn.q_proj`."""
    for tensor in tensors:
        number = next((int(part) for part in tensor.layer.split(".") if part.isdecimal()), None)
        if number is not None:
            yield number


def _described(tensor: TensorComparison, row: Outcome, difference: str) -> str:
    """Describe a tensor, without a reason that the finding gives already."""
    is_stated = bool(row.reason) and str(row.reason) in difference
    if is_stated:
        row = msgspec.structs.replace(row, reason=None)
    return describe(tensor, row)


def _describe_difference(cause: _Cause, group: _Group, totals: _Totals) -> str:
    """Name the difference and the tensors; of facts, the workers' own sentences, which are more exact."""
    if group.rule == Rule.LIMIT:
        reasons = list(dict.fromkeys(row.reason for row in group.samples if row.reason))
        if len(reasons) > _MOST_SENTENCES:
            reasons = [*reasons[:_MOST_SENTENCES], and_more(len(reasons) - _MOST_SENTENCES)]
        if reasons:
            return "; ".join(reasons)
    total = totals.get((cause.stage, group.tensors[0].load_path), Counter())
    difference = words.about(cause.word, _how_many(group, total), computed=group.rule in _COMPUTED)
    if cause.word == words.MISSING:
        reasons_missing = {row.reason for row in group.samples} - {None, NO_RECORD}
        if len(reasons_missing) == 1:
            return f"{difference}: {reasons_missing.pop()}"
    return difference


def _in_general(cause: _Cause, group: _Group) -> str:
    """Name the difference and the tensors without counts, sizes and layers, which differ from case to case."""
    names = sorted({tensor.tensor for tensor in group.tensors})
    tensors = listed(names) if len(names) <= _MOST_SENTENCES else "several"
    if group.rule == Rule.LIMIT:
        return words.phrase_of(cause.word).replace("{}", tensors)
    return words.about(cause.word, f"{tensors} tensors", computed=group.rule in _COMPUTED)


def _how_many(group: _Group, totals: Counter[str]) -> str:
    """Name the tensors of a group, and how many there are: `128 of 256 lora_B tensors`."""
    first, count = group.tensors[0], len(group.tensors)
    if count == 1:
        return f"{first.tensor} of {first.layer}"
    # tensors of several names: settings and whole-model rows are not counted, unless there is nothing else
    if len({tensor.tensor for tensor in group.tensors}) > 1:
        in_layers = sum(tensor.layer not in _NO_LAYERS for tensor in group.tensors)
        return f"{in_layers or count} of {totals.total() or count} tensors"
    if group.rule == Rule.LIMIT:
        return f"{first.tensor} of {count} of {totals[first.tensor]} layers"
    return f"{count} of {totals[first.tensor]} {first.tensor} tensors"


def _load_path_reason(
    cause: _Cause, group: _Group, on_load_paths: Sequence[TensorComparison], *, software: bool
) -> str:
    """Return the reason that the load paths show; empty where they show none."""
    if group.rule == Rule.LIMIT:  # no bytes that could have taken a load path
        return ""
    reason = cause.verdict.why
    if cause.verdict.hops:
        reason = copies(cause.word, cause.workers, _unaffected_workers(on_load_paths, cause.workers))
    return f"{reason}, identical on every device, so no device is at fault" if software else reason


def _unaffected_workers(tensors: Sequence[TensorComparison], affected: Sequence[str]) -> list[str]:
    """Return the workers that received the same tensors on the same load paths, and every tensor right."""
    outcomes = [outcome for _, outcome in rows_of(tensors)]
    hurt = {*affected, *union_of_workers(outcome.workers for outcome in outcomes if outcome.status != "equal")}
    return [worker for worker in union_of_workers(outcome.workers for outcome in outcomes) if worker not in hurt]


FINDERS = (Finder(name="causes", phase=Phase.CAUSES, position=1, find=find_causes),)
