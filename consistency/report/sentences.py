"""Sentences that every report has in the same words: the verdict, facts, load paths, where workers diverge."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence, Set

import msgspec

from consistency import plugins
from consistency.capture.version import __version__
from consistency.capture.wording import counted, listed, some, time_of
from consistency.case import standard
from consistency.case.duration import duration_text
from consistency.case.load_path import is_alternative
from consistency.case.stages import SPECS
from consistency.comparison import kinds
from consistency.comparison.by_worker import Coverage, coverage, worst_error
from consistency.comparison.outcomes import union_of_workers
from consistency.comparison.result import BAD, Comparison, Divergence, Finding
from consistency.comparison.suite import CaseResult
from consistency.report.ranges import folded
from consistency.report.summary import MOST_COLUMNS, NEARLY_ALL, Row, Rows, by_architecture, ratio_text
from consistency.text import one_line

_NEED_ADAPTER = frozenset(stage for stage, spec in SPECS.items() if spec.needs_adapter)
_MOST_WORDS = 64  # of a command line: the captures of eight hosts of eight devices
_MOST_LOAD_PATHS = 4  # names of load paths that fit a line

_STATUS: Mapping[str, str] = {"within": "within tolerance", "equal": "matches its own file", "outside": "mismatch"}

_HALF = frozenset({"float16", "bfloat16"})

_SAID_BY_INCOMPLETE = frozenset({kinds.LOST_WORKER, kinds.FAILED_WORKER, kinds.LOST_NODE, kinds.NOTHING_COMPARED})
"""Kinds of errors that the sentence of an incomplete run states already."""


def facts(comparison: Comparison, elapsed_s: float | None = None) -> list[str]:
    """Return the facts of a run, each in a few words: dtype, workers, tensors, load paths, level, profile, soak, time.

    Without `elapsed_s`, the time is the comparison's own.
    """
    if elapsed_s is None:
        elapsed_s = comparison.elapsed_s
    texts = [
        *dtype_texts(comparison),
        counted(len(comparison.workers), "worker"),
        counted(len(comparison.tensors), "tensor"),
    ]
    default_paths = [load_path for load_path in comparison.load_paths if not is_alternative(load_path)]
    alternatives = len(comparison.load_paths) - len(default_paths)
    if len(default_paths) > 1:
        texts.append(f"load paths {' and '.join(default_paths)}")
    if alternatives:
        texts.append(counted(alternatives, "alternative load path"))
    texts += [f"level {comparison.level}", *profile_texts(comparison), *soak_texts(comparison)]
    if elapsed_s is not None:
        texts.append(f"{elapsed_s:.0f} s")
    return [text for text in texts if text]


def dtype_texts(comparison: Comparison) -> list[str]:
    """Return the dtype of the model; nothing for a run without a model."""
    has_dtype = comparison.dtype not in ("", "auto")
    return [comparison.dtype] if has_dtype else []


def origin_texts(comparison: Comparison) -> list[str]:
    """Return when, where and with which versions a report was made; nothing where that is unknown."""
    if comparison.created is None:
        return []
    return [time_text(comparison.created), comparison.host, versions_text(comparison.versions)]


def versions_text(versions: Mapping[str, str]) -> str:
    """Write the versions of this tool and of the libraries: `consistency 0.1.0, torch 2.13.0`."""
    return ", ".join(f"{name} {version}" for name, version in {"consistency": __version__, **versions}.items())


def time_text(created: str) -> str:
    """Write the time of a report: `2026-11-22 09:02 UTC`; a time in another form, of a stranger's file, as it is."""
    time = time_of(created)
    return created if time is None else f"{time:%Y-%m-%d %H:%M} UTC"


def command_text(command: Sequence[str]) -> str:
    """Write a command line as a shell takes it; of very many words, those that are alike become a pattern."""
    if len(command) > _MOST_WORDS:
        command = folded(command)
    return shlex.join(command)


def source_texts(comparison: Comparison) -> list[str]:
    """Return where each of several captures is from."""
    if len(comparison.sources) < 2:
        return []
    return [
        f"capture {source.name}: {time_text(source.created)} · {source.host} · consistency {source.tool}"
        for source in comparison.sources
    ]


def has_own_settings(comparison: Comparison | CaseResult) -> bool:
    """Return whether the profile, or the settings on top of it, are not the default."""
    return comparison.profile not in ("", "pinned") or bool(comparison.settings)


def profile_texts(comparison: Comparison | CaseResult) -> list[str]:
    """Return the profile and the settings on top of it, where they are not the default."""
    if not has_own_settings(comparison):
        return []
    return [f"profile {comparison.profile}", *comparison.settings]


def soak_texts(comparison: Comparison) -> list[str]:
    """Return how long the workers soaked, how often they repeated, and in how many repeats anything differed."""
    soaks = [(worker.name, worker.soak) for worker in comparison.workers if worker.soak is not None]
    if not soaks:
        return []
    longest_s = max(soak.asked_s for _, soak in soaks)
    had_load = any(soak.load is not None and soak.load.products for _, soak in soaks)
    load = " under load" if had_load else ""
    repeats = sorted({soak.repeats for _, soak in soaks})
    repeats_text = counted(repeats[0], "repeat")
    if len(repeats) > 1:
        repeats_text = f"{repeats[0]} to {repeats[-1]} repeats"
    changes, lost, load_errors = [], [], []
    for name, soak in soaks:
        if soak.changed is not None:
            where = f" on {name}" if len(soaks) > 1 else ""
            changes.append(f"{soak.changed.count} of {soak.begun} differ{where}")
        if not soak.complete:
            lost.append(f"{name} was lost during it")
        if soak.load is not None and soak.load.error:
            load_errors.append(f"{name}: {soak.load.error}")
    result = some(changes) if changes else "none differs"
    return [f"soak{load}: {repeats_text} in {duration_text(longest_s)}, {result}", *lost, *load_errors]


def sentence(comparison: Comparison) -> str:
    """Return the verdict in one sentence, and name the devices with an offloaded base, simulated, or with a fault."""
    if (statement := plugins.statement_of(comparison)) is not None:
        return statement.sentence
    offloaded, simulated = [], []
    for worker in comparison.workers:
        if str(worker.environment.get("placement")).startswith("offload"):
            offloaded.append(worker.name)
        if worker.simulated:
            simulated.append(worker.name)
    text = _verdict_sentence(comparison)
    for remark, names in (
        ("base offloaded", offloaded),
        ("simulated", simulated),
        ("planted fault", comparison.planted),
    ):
        if names:
            text += f"; {remark}: {some(names)}"
    return text


def _verdict_sentence(comparison: Comparison) -> str:
    """Return the verdict in one sentence; of an inconsistent run it is the message of the first error."""
    errors = [finding for finding in comparison.findings if finding.severity == "error"]
    if comparison.verdict == "consistent":
        return _consistent_sentence(comparison)
    if comparison.verdict == "incomplete":
        return _incomplete_sentence(comparison, errors)
    if not errors:  # of a stranger's file
        return "no finding says why"
    first = errors[0].message
    if len(errors) == 1:
        return first
    return f"{first} (and {counted(len(errors) - 1, 'other finding')})"


def _consistent_sentence(comparison: Comparison) -> str:
    """State which parts agree, or are accepted by a baseline; which were not compared; and the worst error."""
    covered = coverage(comparison.tensors)
    accepted = sum(finding.accepted is not None for finding in comparison.findings)
    if accepted:
        findings = counted(accepted, "finding")
        parts = [f"nothing new on {_worker_count(comparison)}: the baseline accepts {findings}"]
        parts.append(_no_adapter(comparison, covered))
    else:
        parts = [_agreement(comparison, covered), _no_adapter(comparison, covered), _software_mismatch(covered)]
    parts += [_not_compared(comparison, covered), _worst_error(comparison)]
    return "; ".join(part for part in parts if part)


def _incomplete_sentence(comparison: Comparison, errors: Sequence[Finding]) -> str:
    """State which workers and nodes did not finish, or else what could not be compared."""
    lost = [node for error in errors if error.kind == kinds.LOST_NODE for node in error.detail]
    lost += [worker.name for worker in comparison.workers if worker.status != "ok"]
    reasons = [error.message for error in errors if error.kind in (kinds.NOTHING_COMPARED, kinds.GONE_DEVICE)]
    said_kinds: Set[str] = _SAID_BY_INCOMPLETE
    if lost:
        statement = f"{some(lost)} did not finish"
    else:
        # Where a worker is lost, a device that is gone is another finding: the sentence does not state it.
        said_kinds = said_kinds | {kinds.GONE_DEVICE}
        statement = reasons[0] if reasons else "part of what was requested could not be checked"
    unsaid = sum(error.kind not in said_kinds for error in errors)
    return f"{statement}; {counted(unsaid, 'other finding')}" if unsaid else statement


def _agreement(comparison: Comparison, covered: Mapping[str, Coverage]) -> str:
    """State which weights are right and on how many workers; without any, the stages that found no mismatch."""
    names = dict.fromkeys(worker.name for worker in comparison.workers)
    workers = _worker_count(comparison)
    if not covered:
        return "nothing was compared"
    right_stages = [stage for stage in covered if not covered[stage].wrong]
    weights = {stage: covered[stage] for stage in (standard.BASE, standard.ADAPTER) if stage in right_stages}
    if not weights:
        if not right_stages:
            return f"no difference between {workers}"
        return f"no mismatch in {listed([one_line(stage) for stage in right_stages])} on {workers}"
    if all(stage_coverage.workers.keys() >= names.keys() for stage_coverage in weights.values()):
        subject = " and ".join(weights) + " agree"
        if len(weights) == 1:
            subject = f"the {next(iter(weights))} agrees"
        # One worker has nobody to agree with but the files of the model.
        where = "with the files" if len(names) == 1 else f"on {workers}"
        return f"{subject} {where}"
    texts = [
        f"the {stage} on {len(stage_coverage.workers.keys() & names.keys())} of {workers}"
        for stage, stage_coverage in weights.items()
    ]
    return f"agree: {listed(texts)}"


def _worker_count(comparison: Comparison) -> str:
    return counted(len({worker.name for worker in comparison.workers}), "worker")


def _no_adapter(comparison: Comparison, covered: Mapping[str, Coverage]) -> str:
    is_absent = bool(comparison.base) and comparison.adapter is None and standard.ADAPTER not in covered
    return "no adapter was given" if is_absent else ""


def _software_mismatch(covered: Mapping[str, Coverage]) -> str:
    """Name the stages with a mismatch that all devices have; empty without one. The verdict judges devices alone."""
    wrong = [one_line(stage) for stage, stage_coverage in covered.items() if stage_coverage.wrong]
    if not wrong:
        return ""
    return f"mismatch in {listed(wrong)}, the same on every device: see the warnings"


def _not_compared(comparison: Comparison, covered: Mapping[str, Coverage]) -> str:
    """Name the stages that were requested and could not compare anything, but for those that need an adapter."""
    stages = dict.fromkeys(tensor.stage for tensor in comparison.tensors if tensor.stage not in covered)
    if _no_adapter(comparison, covered):
        stages = {stage: None for stage in stages if stage not in _NEED_ADAPTER}
    return f"{listed([one_line(stage) for stage in stages])} not compared" if stages else ""


def _worst_error(comparison: Comparison) -> str:
    """State the largest error/tolerance and its tensor; nothing where no error was measured."""
    worst = worst_error(comparison)
    if worst is None:
        return ""
    ratio, tensor = worst
    why = ""
    if comparison.dtype in _HALF and NEARLY_ALL < ratio <= 1:
        why = f", where one rounding to {comparison.dtype} alone may take 1.00"
    return f"the model's worst error/tolerance is {ratio_text(ratio)} ({tensor}{why})"


def alternative_path_texts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield how the alternative load paths ended, each with its kind of cell; those without a mismatch in one line."""
    equal_paths, lines = [], []
    for path in filter(is_alternative, comparison.load_paths):
        tensors = [tensor for tensor in comparison.tensors if tensor.load_path == path]
        outcomes = [outcome for tensor in tensors for outcome in tensor.outcomes]
        wrong = union_of_workers(outcome.workers for outcome in outcomes if outcome.status in BAD)
        if wrong:
            mismatches = sum(tensor.is_wrong for tensor in tensors)
            names = some(_in_order(comparison, wrong))
            lines.append(("outside", f"load path {path}: ✗ {mismatches}/{len(tensors)} on {names}"))
        elif any(outcome.status not in ("skipped", "blocked") for outcome in outcomes):
            equal_paths.append(path)
        else:
            lines.append(("skipped", f"load path {path}: skipped"))
    if equal_paths:
        names = f" ({', '.join(equal_paths)})" if len(equal_paths) <= _MOST_LOAD_PATHS else ""
        every = "all " if len(equal_paths) > 1 else ""
        yield "equal", f"{counted(len(equal_paths), 'more load path')} checked, {every}equal{names}"
    yield from lines


def _in_order(comparison: Comparison, names: Container[str]) -> list[str]:
    """Return the workers of these names in the order of the comparison."""
    return [name for name in dict.fromkeys(worker.name for worker in comparison.workers) if name in names]


def agreement_texts(comparison: Comparison, rows_by_path: Rows) -> Iterator[str]:
    """Yield, for more workers than a reader looks through, how many agree with their architecture and which do not.

    An architecture of which no more than half agree has no majority to differ from.
    """
    if len(comparison.workers) <= MOST_COLUMNS:
        return
    for load_path, rows in rows_by_path.items():
        if is_alternative(load_path):
            continue
        agreeing, differing = _majorities(rows)
        if agreeing:
            odd = _in_order(comparison, differing)
            where = f" (load path {load_path})" if load_path != comparison.load_paths[0] else ""
            verb = "differs" if len(odd) == 1 else "differ"
            names = f"; {some(odd)} {verb}" if odd else ""
            total = agreeing + len(odd)
            yield f"{agreeing:,} of {total:,} workers agree bitwise within their architectures{where}{names}"


def _majorities(rows: Sequence[Row]) -> tuple[int, set[str]]:
    """Return how many workers agree with most of their architecture, and the names of those that do not."""
    agreeing = 0
    differing: set[str] = set()
    for architecture_rows in by_architecture(rows):
        # A row of more than one kind sums up workers that do not agree with each other, so it is no majority.
        largest = max(architecture_rows, key=lambda row: len(row.names) if row.kinds == 1 else 0)
        workers = sum(len(row.names) for row in architecture_rows)
        if workers > 1 and 2 * len(largest.names) > workers:
            agreeing += len(largest.names)
            for row in architecture_rows:
                if row is not largest:
                    differing.update(row.names)
    return agreeing, differing


def divergence_texts(comparison: Comparison) -> Iterator[str]:
    """Yield where workers first have a mismatch, and where their bits first differ from the reference worker's."""
    mismatches = {(worker, *_place(first)) for first in comparison.first_divergence for worker in first.workers}
    yield from _first_places("mismatch", comparison, comparison.first_divergence)
    differences = []
    for first in comparison.first_bitwise_difference:
        # A worker whose bits first differ where its first mismatch is has been named already.
        workers = tuple(worker for worker in first.workers if (worker, *_place(first)) not in mismatches)
        if workers:
            differences.append(msgspec.structs.replace(first, workers=workers))
    yield from _first_places(f"bitwise difference from {comparison.reference}", comparison, differences)


def _place(divergence: Divergence) -> tuple[str, ...]:
    return (divergence.load_path, divergence.stage, divergence.layer, divergence.tensor)


def _first_places(noun: str, comparison: Comparison, divergences: Sequence[Divergence]) -> Iterator[str]:
    """Yield a line per divergence: the workers, and the tensor at which they first diverge."""
    for first in divergences:
        where = f" (load path {first.load_path})" if first.load_path != comparison.load_paths[0] else ""
        status = f" ({_STATUS.get(first.status, first.status)})" if first.status != "outside" else ""
        yield f"{some(first.workers)}{where}: first {noun}: {first.stage}, {first.layer}.{first.tensor}{status}"
