"""What every report states in the same words: the verdict, a cell of the table, load paths, where workers diverge."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence

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
from consistency.comparison.outcomes import names_in
from consistency.comparison.result import BAD, Comparison, Divergence
from consistency.comparison.suite import CaseResult
from consistency.report.ranges import folded
from consistency.report.summary import MOST_COLUMNS, NEARLY_ALL, Rows, by_architecture, ratio_text
from consistency.text import one_line

_NEED_ADAPTER = frozenset(stage for stage, spec in SPECS.items() if spec.needs_adapter)
_MOST_WORDS = 64  # of a command line: the captures of eight hosts of eight devices
_MOST_LOAD_PATHS = 4  # names of load paths that fit a line

_STATUS: Mapping[str, str] = {"within": "within tolerance", "equal": "matches its own file", "outside": "mismatch"}


_HALF = frozenset({"float16", "bfloat16"})


def facts(comparison: Comparison, elapsed_s: float | None = None) -> list[str]:
    """Return what was checked, in a few words each; how long it took is the comparison's own where none is given."""
    elapsed_s = comparison.elapsed_s if elapsed_s is None else elapsed_s
    counts = [counted(len(comparison.workers), "worker"), counted(len(comparison.tensors), "tensor")]
    found = [*dtype_texts(comparison), *counts]
    mains = [load_path for load_path in comparison.load_paths if not is_alternative(load_path)]
    sides = len(comparison.load_paths) - len(mains)
    found += [f"load paths {' and '.join(mains)}" if len(mains) > 1 else ""]
    found += [counted(sides, "alternative load path") if sides else ""]
    found += [f"level {comparison.level}", *profile_texts(comparison), *soak_texts(comparison)]
    found += [] if elapsed_s is None else [f"{elapsed_s:.0f} s"]
    return [text for text in found if text]


def dtype_texts(comparison: Comparison) -> list[str]:
    """Return the dtype of the model; a run without one has none."""
    return [comparison.dtype] if comparison.dtype not in ("", "auto") else []


def origin_texts(comparison: Comparison) -> list[str]:
    """Return when, where and with which versions a report was made; nothing where that is unknown."""
    if comparison.created is None:
        return []
    return [time_text(comparison.created), comparison.host, versions_text(comparison.versions)]


def versions_text(versions: Mapping[str, str]) -> str:
    """Write the versions of this tool and of the libraries: `consistency 0.1.0, torch 2.13.0`."""
    return ", ".join(f"{name} {version}" for name, version in {"consistency": __version__, **versions}.items())


def time_text(created: str) -> str:
    """Write a time of a report: `2026-11-22 09:02 UTC`; one that a stranger wrote differently stays as it is."""
    time = time_of(created)
    return created if time is None else f"{time:%Y-%m-%d %H:%M} UTC"


def command_text(command: Sequence[str]) -> str:
    """Write a command line as a shell takes it; in one of very many words, those that are alike become a pattern."""
    return shlex.join(folded(command) if len(command) > _MOST_WORDS else command)


def source_texts(comparison: Comparison) -> list[str]:
    """Return where each of several captures is from."""
    if len(comparison.sources) < 2:
        return []
    return [
        f"capture {one.name}: {time_text(one.created)} · {one.host} · consistency {one.tool}"
        for one in comparison.sources
    ]


def has_own_settings(comparison: Comparison | CaseResult) -> bool:
    """Return whether the profile, or the settings on top of it, are not the default."""
    return comparison.profile not in ("", "pinned") or bool(comparison.settings)


def profile_texts(comparison: Comparison | CaseResult) -> list[str]:
    """Return the profile and the settings on top of it, where they are not the default."""
    return [f"profile {comparison.profile}", *comparison.settings] if has_own_settings(comparison) else []


def soak_texts(comparison: Comparison) -> list[str]:
    """Return how long the workers soaked, how often they repeated, and in how many repeats anything differed."""
    soaks = [(worker.name, worker.soak) for worker in comparison.workers if worker.soak is not None]
    if not soaks:
        return []
    longest = max(soak.asked_s for _, soak in soaks)
    load = " under load" if any(soak.load is not None and soak.load.products for _, soak in soaks) else ""
    counts = sorted({soak.repeats for _, soak in soaks})
    text = counted(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"
    differ = [
        f"{soak.changed.count} of {soak.begun} differ" + (f" on {name}" if len(soaks) > 1 else "")
        for name, soak in soaks
        if soak.changed is not None
    ]
    cut = [f"{name} was lost during it" for name, soak in soaks if not soak.complete]
    ended = [f"{name}: {soak.load.error}" for name, soak in soaks if soak.load is not None and soak.load.error]
    result = some(differ) if differ else "none differs"
    return [f"soak{load}: {text} in {duration_text(longest)}, {result}", *cut, *ended]


def sentence(comparison: Comparison) -> str:
    """Return the verdict in one sentence, and which devices had the base streamed, are simulated or have a fault."""
    if (statement := plugins.statement_of(comparison)) is not None:
        return statement.sentence
    offloaded = [w.name for w in comparison.workers if str(w.environment.get("placement")).startswith("offload")]
    simulated = [w.name for w in comparison.workers if w.simulated]
    found = (("base offloaded", offloaded), ("simulated", simulated), ("planted fault", comparison.planted))
    return _of_workers(comparison) + "".join(f"; {what}: {some(names)}" for what, names in found if names)


def _of_workers(comparison: Comparison) -> str:
    errors = [f for f in comparison.findings if f.severity == "error"]
    if comparison.verdict == "consistent":
        covered = coverage(comparison.tensors)
        accepted = sum(finding.accepted is not None for finding in comparison.findings)
        what = f"nothing new on {_workers(comparison)}: the baseline accepts {counted(accepted, 'finding')}"
        parts = [what if accepted else _what_matches(comparison, covered), _no_adapter(comparison, covered)]
        parts += [_software_mismatch(covered) if not accepted else "", _not_compared(comparison, covered)]
        return "; ".join(filter(None, [*parts, _worst_error(comparison)]))
    if comparison.verdict == "incomplete":
        nothing = [f.message for f in errors if f.kind in (kinds.NOTHING_COMPARED, kinds.GONE_DEVICE)]
        lost = [node for f in errors if f.kind == kinds.LOST_NODE for node in f.detail]
        lost += [w.name for w in comparison.workers if w.status != "ok"]
        what = f"{some(lost)} did not finish" if lost else "part of what was requested could not be checked"
        said = (
            kinds.LOST_WORKER,
            kinds.FAILED_WORKER,
            kinds.LOST_NODE,
            kinds.NOTHING_COMPARED,
            *(() if lost else (kinds.GONE_DEVICE,)),
        )
        others = sum(f.kind not in said for f in errors)
        what = nothing[0] if nothing and not lost else what
        return what + (f"; {counted(others, 'other finding')}" if others else "")
    if not errors:  # of a stranger's file
        return "no finding says why"
    first = errors[0].message
    return first if len(errors) == 1 else f"{first} (and {counted(len(errors) - 1, 'other finding')})"


def _what_matches(comparison: Comparison, covered: Mapping[str, Coverage]) -> str:
    """State which weights are right and on how many workers; without any, the stages that found no mismatch."""
    names = dict.fromkeys(worker.name for worker in comparison.workers)
    right = {stage: covered[stage] for stage in (standard.BASE, standard.ADAPTER) if stage in covered}
    right = {stage: one for stage, one in right.items() if not one.wrong}
    workers = _workers(comparison)
    if not covered:
        return "nothing was compared"
    if not right:
        fine = [one_line(stage) for stage, one in covered.items() if not one.wrong]
        return f"no mismatch in {listed(fine)} on {workers}" if fine else f"no difference between {workers}"
    if all(one.workers.keys() >= names.keys() for one in right.values()):
        what, verb = (f"the {next(iter(right))}", "agrees") if len(right) == 1 else (" and ".join(right), "agree")
        return f"{what} {verb} {'with the files' if len(names) == 1 else f'on {workers}'}"
    texts = [f"the {stage} on {len(one.workers.keys() & names.keys())} of {workers}" for stage, one in right.items()]
    return f"agree: {listed(texts)}"


def _workers(comparison: Comparison) -> str:
    return counted(len({worker.name for worker in comparison.workers}), "worker")


def _no_adapter(comparison: Comparison, covered: Mapping[str, Coverage]) -> str:
    is_absent = bool(comparison.base) and comparison.adapter is None and standard.ADAPTER not in covered
    return "no adapter was given" if is_absent else ""


def _software_mismatch(covered: Mapping[str, Coverage]) -> str:
    """Name the stages with a mismatch that is no device's fault: the verdict is of the devices alone."""
    wrong = [one_line(stage) for stage, one in covered.items() if one.wrong]
    return f"mismatch in {listed(wrong)}, the same on every device: see the warnings" if wrong else ""


def _not_compared(comparison: Comparison, covered: Mapping[str, Coverage]) -> str:
    """Name the stages that were requested and could not compare anything, but for those that need an adapter."""
    left = dict.fromkeys(tensor.stage for tensor in comparison.tensors if tensor.stage not in covered)
    if _no_adapter(comparison, covered):
        left = {stage: None for stage in left if stage not in _NEED_ADAPTER}
    return f"{listed([one_line(stage) for stage in left])} not compared" if left else ""


def _worst_error(comparison: Comparison) -> str:
    worst = worst_error(comparison)
    if worst is None:
        return ""
    is_rounding = comparison.dtype in _HALF and NEARLY_ALL < worst[0] <= 1
    why = f", where one rounding to {comparison.dtype} alone may take 1.00" if is_rounding else ""
    return f"the model's worst error/tolerance is {ratio_text(worst[0])} ({worst[1]}{why})"


def alternative_path_texts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield how the alternative load paths ended, each with its kind of cell; those without a mismatch in one line."""
    equal, others = [], []
    for path in filter(is_alternative, comparison.load_paths):
        tensors = [tensor for tensor in comparison.tensors if tensor.load_path == path]
        wrong = names_in(row.workers for tensor in tensors for row in tensor.outcomes if row.status in BAD)
        if wrong:
            bad, names = sum(tensor.is_wrong for tensor in tensors), some(_in_order(comparison, wrong))
            others.append(("outside", f"load path {path}: ✗ {bad}/{len(tensors)} on {names}"))
        elif any(row.status not in ("skipped", "blocked") for tensor in tensors for row in tensor.outcomes):
            equal.append(path)
        else:
            others.append(("skipped", f"load path {path}: skipped"))
    if equal:
        names = f" ({', '.join(equal)})" if len(equal) <= _MOST_LOAD_PATHS else ""
        every = "all " if len(equal) > 1 else ""
        yield "equal", f"{counted(len(equal), 'more load path')} checked, {every}equal{names}"
    yield from others


def _in_order(comparison: Comparison, names: Container[str]) -> list[str]:
    return [name for name in dict.fromkeys(worker.name for worker in comparison.workers) if name in names]


def agreement_texts(comparison: Comparison, found: Rows) -> Iterator[str]:
    """Yield, for more workers than a reader looks through, how many agree with their architecture and which do not.

    An architecture of which no more than half agree has no majority to differ from.
    """
    if len(comparison.workers) <= MOST_COLUMNS:
        return
    for load_path, rows in found.items():
        if is_alternative(load_path):
            continue
        agree, differ = 0, set()
        for of_one in by_architecture(rows):
            largest = max(of_one, key=lambda row: len(row.names) if row.kinds == 1 else 0)
            of = sum(len(row.names) for row in of_one)
            if of > 1 and 2 * len(largest.names) > of:
                agree += len(largest.names)
                differ |= {name for row in of_one if row is not largest for name in row.names}
        if agree:
            odd = _in_order(comparison, differ)
            where = f" (load path {load_path})" if load_path != comparison.load_paths[0] else ""
            names = f"; {some(odd)} {'differs' if len(odd) == 1 else 'differ'}" if odd else ""
            yield f"{agree:,} of {agree + len(odd):,} workers agree bitwise within their architectures{where}{names}"


def divergence_texts(comparison: Comparison) -> Iterator[str]:
    """Yield where workers first have a mismatch, and where their bits first differ from the reference worker's."""
    mismatches = {(worker, *_place(one)) for one in comparison.first_divergence for worker in one.workers}
    reference = comparison.reference
    yield from _first("mismatch", comparison, comparison.first_divergence)
    bits = []
    for one in comparison.first_bitwise_difference:
        others = tuple(worker for worker in one.workers if (worker, *_place(one)) not in mismatches)
        bits += [msgspec.structs.replace(one, workers=others)] if others else []
    yield from _first(f"bitwise difference from {reference}", comparison, bits)


def _place(one: Divergence) -> tuple[str, ...]:
    return (one.load_path, one.stage, one.layer, one.tensor)


def _first(what: str, comparison: Comparison, found: Sequence[Divergence]) -> Iterator[str]:
    for one in found:
        where = f" (load path {one.load_path})" if one.load_path != comparison.load_paths[0] else ""
        status = f" ({_STATUS.get(one.status, one.status)})" if one.status != "outside" else ""
        yield f"{some(one.workers)}{where}: first {what}: {one.stage}, {one.layer}.{one.tensor}{status}"
