"""The command that a finding tells a user to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from consistency.case import standard
from consistency.case.builtin import builtin_name
from consistency.case.case import Case
from consistency.case.stage import Level
from consistency.case.stages import LEVELS, requested
from consistency.comparison.findings.evidence import ComparisonEvidence

_REPEAT = " --repeat 2"


def run_and_repeat(evidence: ComparisonEvidence, workers: Sequence[str]) -> str | None:
    """Return a command that checks these workers again, and repeats itself; None for captures from elsewhere."""
    reference = evidence.reference
    # captures that are compared may come from other hosts and days: no one command makes them again
    if reference is None or any(worker.capture is not reference.capture for worker in evidence.workers):
        return None
    case = reference.case
    devices = ",".join(dict.fromkeys([reference.info.name, *workers]))
    # a case without a model checks hosts and copies
    if not case.base:
        return shlex.join(["consistency", "doctor", "--devices", devices])
    command = shlex.join(["consistency", "run", *_options(case), "--devices", devices])
    return command if case.repeat > 1 else command + _REPEAT


def run_again(evidence: ComparisonEvidence, workers: Sequence[str]) -> str | None:
    """Return a command that checks these workers as before, for findings that repeats within one run do not show."""
    command = run_and_repeat(evidence, workers)
    return None if command is None else command.removesuffix(_REPEAT)


def compare_with_source(evidence: ComparisonEvidence, stage: str) -> str | None:
    """Return the command that compares the base, or the adapter, with the folder that it was copied from."""
    if evidence.reference is None:
        return None
    case = evidence.reference.case
    folder = case.adapter if stage == standard.ADAPTER else case.base
    if not folder:
        return None
    return f"compare it with what it was copied from: consistency diff SOURCE {shlex.quote(folder)}"


def _options(case: Case) -> Iterator[str]:
    """Yield the options of a case that are not the default, each with its value."""
    yield from _options_of_model(case)
    yield from _options_of_stages(case)
    yield from _options_of_checks(case)


def _options_of_model(case: Case) -> Iterator[str]:
    """Yield the options that name base and adapters, and the conditions in which they run."""
    builtin = None if case.adapters else builtin_name(case.base, case.adapter)
    base = f"builtin:{builtin}" if builtin else case.base
    yield from _option("--base", base)
    if case.adapters:
        yield from _option("--adapter", *map(str, case.adapters))
    elif case.adapter and not builtin:
        yield from _option("--adapter", case.adapter)
    if case.dtype != "auto":
        yield from _option("--dtype", case.dtype)
    if not case.is_pinned:
        yield from _option("--profile", case.profile)
    yield from _option("--set", *map(str, case.settings))


def _options_of_stages(case: Case) -> Iterator[str]:
    """Yield the options that choose the stages, and how they are run."""
    if case.level != Level.STANDARD:
        yield from _option("--level", case.level)
    if set(case.stages) != set(requested(case.level, case)):
        yield from _option("--stages", ",".join(case.stages))
    if case.wrapper:
        yield from _option("--wrapper", case.wrapper)
    if case.device_map:
        yield from _option("--device-map", str(case.device_map))
    # a level has its own number of repeats
    if case.repeat > max(1, LEVELS[case.level].repeat):
        yield from _option("--repeat", str(case.repeat))
    if case.steps:
        yield from _option("--steps", str(case.steps))


def _options_of_checks(case: Case) -> Iterator[str]:
    """Yield the options of inputs, loading and tolerances."""
    if case.inputs:
        yield from _option("--inputs", case.inputs)
    if case.load_paths:
        yield from _option("--load-paths", ",".join(case.load_paths))
    yield from _option("--tolerance", *map(str, case.tolerance))
    if case.placement != "auto":
        yield from _option("--placement", case.placement)
    if case.allow_pickle:
        yield "--allow-pickle"
    if case.trust_remote_code:
        yield "--trust-remote-code"


def _option(name: str, *values: str) -> Iterator[str]:
    """Yield an option with each of its values."""
    for value in values:
        yield from (name, value)
