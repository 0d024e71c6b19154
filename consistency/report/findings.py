"""The findings of a run as every format shows them: with the worst element, and the commands that show it again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from consistency.capture.names import SETTINGS_LAYER, UPDATED
from consistency.capture.wording import counted
from consistency.case import standard
from consistency.case.stages import MOVES_WEIGHTS, stages_of
from consistency.comparison import kinds
from consistency.comparison.layers import difference_of
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Comparison, Finding, Outcome, TensorComparison
from consistency.comparison.suite import SuiteResult
from consistency.numerics.rules import Rule
from consistency.report.sentences import sentence
from consistency.text import one_line

_AGAIN = "again: "
_SETTING = "which setting: "
COMMANDS = (_AGAIN, _SETTING)
"""How a detail begins that is a command to type: the one that repeats the check, the one that looks for its cause."""

_COMMAND = "consistency "

_MEASURED = frozenset({Rule.BOUND, Rule.RELATIVE, Rule.BLOCK, Rule.USER})
_REFERENCES = {"float64": "float64 on the CPU", "file": "the file"}

_Hits = Sequence[tuple[TensorComparison, Outcome]]


def findings_of(comparison: Comparison, folder: str | None = None) -> list[Finding]:
    """Return the findings in their order; `folder` holds the report and its captures, for the commands."""
    beside = None if comparison.captures else folder
    is_asked = "--repeat" not in comparison.command  # such a run has done what `again:` is for
    shown = enumerate(_with_hits(comparison), 1)
    return [_shown(finding, number, hits, beside, is_asked=is_asked) for number, (finding, hits) in shown]


def reproducible(comparison: Comparison) -> frozenset[int]:
    """Return the numbers of the findings of which a capture beside the report has a tensor."""
    found = _with_hits(comparison) if not comparison.captures else ()
    return frozenset(number for number, (finding, hits) in enumerate(found, 1) if _is_reproducible(finding, hits))


def is_command(text: str) -> bool:
    """Return whether a next step is a command to type, which no format may break or cut."""
    return text.startswith(_COMMAND)


def reproduce_command(folder: str, number: int) -> str:
    """Return the command that shows a finding of a report again."""
    out = "repro" if number == 1 else f"repro-{number}"  # so that each can be typed after the other
    return f"consistency reproduce {shlex.quote(folder)} --finding {number} --out {out}"


def _with_hits(comparison: Comparison) -> Iterator[tuple[Finding, _Hits]]:
    named = {name for finding in comparison.findings for name in finding.tensors}
    tensors = gathered((tensor.name, tensor) for tensor in comparison.tensors if tensor.name in named)
    for finding in comparison.findings:
        yield finding, _hits(finding, tensors)


_OF_A_GROUP = frozenset(stages_of(lambda spec: spec.together))


def _shown(finding: Finding, number: int, hits: _Hits, folder: str | None, *, is_asked: bool) -> Finding:
    shown = msgspec.structs.replace(finding, detail=(*_worst(hits), *finding.evidence), consequences=())
    if folder is None:
        return shown
    again = finding.next if finding.next and is_command(finding.next) else None
    bisect = f"consistency bisect {shlex.quote(folder)} --finding {number}{_allowing(again)}"
    if _is_of_a_group(finding):
        return msgspec.structs.replace(shown, next=bisect)
    differs = [tensor for tensor, _ in hits if tensor.layer != SETTINGS_LAYER]
    if not _is_reproducible(finding, hits):
        is_run = again is not None and again.startswith(f"{_COMMAND}run ")
        return msgspec.structs.replace(shown, next=bisect) if is_run and _is_loaded(finding, differs) else shown
    commands = [f"{_AGAIN}{again}"] if again and is_asked else []
    if again and any(tensor.rule in _MEASURED for tensor in differs):
        commands.append(f"{_SETTING}{bisect}")
    return msgspec.structs.replace(shown, detail=(*shown.detail, *commands), next=reproduce_command(folder, number))


_NOT_ASKED = ("--base", "--adapter", "--inputs", "--wrapper")
_FLAGS = ("--trust-remote-code", "--allow-pickle")


def _allowing(again: str | None) -> str:
    """Return the options by which a command is allowed what the one that repeats the check names: see `received`."""
    words = shlex.split(again or "")
    if any(word.startswith("builtin:") for word in words):
        return ""
    kept = [word for before, word in pairwise(words) if word in (*_NOT_ASKED, *_FLAGS) or before in _NOT_ASKED]
    return f" {shlex.join(kept)}" if kept else ""


def _is_loaded(finding: Finding, differs: Sequence[TensorComparison]) -> bool:
    """Return whether bytes of the model differ, and some worker has the right ones."""
    return finding.severity != "note" and any(
        tensor.stage in MOVES_WEIGHTS and not set(tensor.workers) <= set(finding.workers) for tensor in differs
    )


def _is_of_a_group(finding: Finding) -> bool:
    """Return whether ranks found it together, so that no one device can show it again, and a setting may explain it."""
    stages = {name.partition("::")[0] for name in finding.tensors}
    return finding.severity != "note" and bool(stages) and stages <= _OF_A_GROUP


def _is_reproducible(finding: Finding, hits: _Hits) -> bool:
    """Return whether a tensor was stored that is wrong element by element: a drift's earlier bits are kept nowhere."""
    if finding.severity == "note" or finding.kind == kinds.DRIFT:
        return False
    # of a factor after the optimizer's step, and of what workers are compared in with each other, no value is stored
    kept = [
        (tensor, row) for tensor, row in hits if not tensor.tensor.endswith(f".{UPDATED}") and tensor.rule != Rule.PEER
    ]
    return any(row.worst_index is not None or tensor.stage == standard.TRANSFER for tensor, row in kept)


def _hits(finding: Finding, tensors: Mapping[str, Sequence[TensorComparison]]) -> _Hits:
    """Return the rows that are outside, of the finding's own tensors and workers on its load paths."""
    workers = frozenset(finding.workers)
    others = {name for consequence in finding.consequences for name in consequence.tensors}
    return [
        (tensor, row)
        for name in dict.fromkeys(finding.tensors)
        if name not in others
        for tensor in tensors.get(name, ())
        if not finding.load_paths or tensor.load_path in finding.load_paths
        for row in tensor.outcomes
        if row.status == "outside" and tensor.rule != Rule.LIMIT and not workers.isdisjoint(row.workers)
    ]


def _worst(hits: _Hits) -> Iterator[str]:
    """Yield a line: against what, by which factor, in how many layers, and the worst element with what was allowed."""
    measured = [(tensor, row) for tensor, row in hits if tensor.rule in _MEASURED and row.max_abs is not None]
    if not measured:
        return
    tensor, row = max(measured, key=lambda hit: hit[1].badness)
    factor = row.evidence.get("ratio")
    reference = _REFERENCES.get(row.reference or "", row.reference)
    times = f"{factor:.6g}× " if isinstance(factor, float) and math.isfinite(factor) else "against "
    layers = counted(len({one.layer for one, _ in hits}), "layer")
    where = f"{tensor.layer}.{tensor.tensor}" + (f"{list(row.worst_index)}" if row.worst_index is not None else "")
    difference, allowed = difference_of(tensor.rule, row)
    off = "" if difference is None else f": off by {float(difference):.2g}"
    may = "" if allowed is None else f", allowed {float(allowed):.2g}"
    yield f"{times}{reference} in {layers}; worst {where}{off}{may}"


_MOST_PROBLEMS = 10  # a screen; the report has the rest
_MOST_NAMES = 5


def problems(found: Comparison | SuiteResult) -> Iterator[str]:
    """Yield why a result is not consistent: the verdict in a sentence, then each error with its tensors and devices."""
    if isinstance(found, SuiteResult):
        yield one_line(f"{found.verdict}: {found.sentence}")
        for case in found.cases:
            if case.verdict != "consistent":
                yield one_line(f"  {case.name}: {case.verdict}: {case.headline}")
        return
    yield one_line(f"{found.verdict}: {sentence(found)}")
    errors = [finding for finding in findings_of(found) if finding.severity == "error"]
    for number, finding in enumerate(errors[:_MOST_PROBLEMS], start=1):
        if len(errors) > 1:  # otherwise the verdict has said it
            yield one_line(f"  {number}  {finding.message}")
        yield from (one_line(f"     {line}") for line in finding.detail)
        if not finding.detail:
            yield from (one_line(f"     {name}") for name in finding.tensors[:_MOST_NAMES])
        if finding.next:
            yield one_line(f"     next: {finding.next}")
    if len(errors) > _MOST_PROBLEMS:
        yield f"  and {len(errors) - _MOST_PROBLEMS} more"
