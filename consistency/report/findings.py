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
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Comparison, Finding, Outcome, TensorComparison
from consistency.comparison.suite import SuiteResult
from consistency.numerics.rules import Rule
from consistency.report.sentences import sentence
from consistency.text import one_line

_AGAIN = "again: "
_SETTING = "which setting: "
COMMANDS = (_AGAIN, _SETTING)
"""Beginnings of a detail that is a command to type: to repeat the check, and to look for the setting at fault."""

_COMMAND = "consistency "

_MEASURED = frozenset({Rule.BOUND, Rule.RELATIVE, Rule.BLOCK, Rule.USER})
_REFERENCES = {"float64": "float64 on the CPU", "file": "the file"}

_Hits = Sequence[tuple[TensorComparison, Outcome]]
"""The outcomes outside their tolerance that a finding is about, each with its tensor."""


def findings_of(comparison: Comparison, folder: str | None = None) -> list[Finding]:
    """Return the findings in their order; `folder` holds the report and its captures, for the commands."""
    if comparison.captures:  # of other runs: no command finds them beside this report
        folder = None
    offers_repeat = "--repeat" not in comparison.command  # such a run has done what `again:` is for
    return [
        _shown(finding, number, hits, folder, offers_repeat=offers_repeat)
        for number, (finding, hits) in enumerate(_with_hits(comparison), 1)
    ]


def reproducible(comparison: Comparison) -> frozenset[int]:
    """Return the numbers of the findings for which a capture beside the report has stored a tensor."""
    if comparison.captures:
        return frozenset()
    findings = enumerate(_with_hits(comparison), 1)
    return frozenset(number for number, (finding, hits) in findings if _is_reproducible(finding, hits))


def is_command(text: str) -> bool:
    """Return whether a next step is a command to type, which no format may break or cut."""
    return text.startswith(_COMMAND)


def reproduce_command(folder: str, number: int) -> str:
    """Return the command that shows a finding of a report again."""
    out = "repro" if number == 1 else f"repro-{number}"  # so that the commands of several can be typed in turn
    return f"consistency reproduce {shlex.quote(folder)} --finding {number} --out {out}"


def _with_hits(comparison: Comparison) -> Iterator[tuple[Finding, _Hits]]:
    """Yield each finding with its hits; tensors are looked up by name, since a report may have very many."""
    named = {name for finding in comparison.findings for name in finding.tensors}
    tensors = group_by_key((tensor.name, tensor) for tensor in comparison.tensors if tensor.name in named)
    for finding in comparison.findings:
        yield finding, _hits(finding, tensors)


_GROUP_STAGES = frozenset(stages_of(lambda spec: spec.together))


def _shown(finding: Finding, number: int, hits: _Hits, folder: str | None, *, offers_repeat: bool) -> Finding:
    """Return a finding with its worst element in the details, and the command that shows it again as its next step.

    Where no device can show it again by itself, the next step is the command that looks for the setting at fault.
    """
    shown = msgspec.structs.replace(finding, detail=(*_worst_element(hits), *finding.evidence), consequences=())
    if folder is None:
        return shown
    repeat = finding.next if finding.next and is_command(finding.next) else None
    bisect = f"consistency bisect {shlex.quote(folder)} --finding {number}{_allowing_options(repeat)}"
    if _is_of_a_group(finding):
        return msgspec.structs.replace(shown, next=bisect)
    differing_tensors = [tensor for tensor, _ in hits if tensor.layer != SETTINGS_LAYER]
    # an engine's outputs are written again by the engine: there is no device on which a setting could be changed
    is_run = repeat is not None and repeat.startswith(f"{_COMMAND}run ")
    if not _is_reproducible(finding, hits):
        if is_run and _has_wrong_weights(finding, differing_tensors):
            return msgspec.structs.replace(shown, next=bisect)
        return shown
    commands = []
    if repeat and offers_repeat:
        commands.append(f"{_AGAIN}{repeat}")
    if is_run and any(tensor.rule in _MEASURED for tensor in differing_tensors):
        commands.append(f"{_SETTING}{bisect}")
    return msgspec.structs.replace(shown, detail=(*shown.detail, *commands), next=reproduce_command(folder, number))


_OPTIONS_TO_ALLOW = ("--base", "--adapter", "--inputs", "--wrapper")
_FLAGS_TO_ALLOW = ("--trust-remote-code", "--allow-pickle")


def _allowing_options(repeat: str | None) -> str:
    """Return the options that allow a command what the command that repeats the check names: see `received`."""
    words = shlex.split(repeat or "")
    if any(word.startswith("builtin:") for word in words):
        return ""
    options = []
    for before, word in pairwise(words):
        is_option = word in (*_OPTIONS_TO_ALLOW, *_FLAGS_TO_ALLOW)
        is_value = before in _OPTIONS_TO_ALLOW
        if is_option or is_value:
            options.append(word)
    return f" {shlex.join(options)}" if options else ""


def _has_wrong_weights(finding: Finding, differing_tensors: Sequence[TensorComparison]) -> bool:
    """Return whether bytes of the model differ, and some worker has the right ones."""
    return finding.severity != "note" and any(
        tensor.stage in MOVES_WEIGHTS and not set(tensor.workers) <= set(finding.workers)
        for tensor in differing_tensors
    )


def _is_of_a_group(finding: Finding) -> bool:
    """Return whether ranks found it together, so that no one device can show it again, and a setting may explain it."""
    stages = {name.partition("::")[0] for name in finding.tensors}
    return finding.severity != "note" and bool(stages) and stages <= _GROUP_STAGES


def _is_reproducible(finding: Finding, hits: _Hits) -> bool:
    """Return whether a tensor was stored that is wrong element by element: a drift's earlier bits are kept nowhere."""
    if finding.severity == "note" or finding.kind == kinds.DRIFT:
        return False
    for tensor, outcome in hits:
        # No value is stored of a factor after the optimizer's step, or of the numbers that workers compare with each
        # other.
        is_stored = not tensor.tensor.endswith(f".{UPDATED}") and tensor.rule != Rule.PEER
        has_element = outcome.worst_index is not None or tensor.stage == standard.TRANSFER
        if is_stored and has_element:
            return True
    return False


def _hits(finding: Finding, tensors: Mapping[str, Sequence[TensorComparison]]) -> _Hits:
    """Return the outcomes outside tolerance of the finding's own tensors and workers, on its load paths."""
    workers = frozenset(finding.workers)
    tensors_of_consequences = {name for consequence in finding.consequences for name in consequence.tensors}
    hits = []
    for name in dict.fromkeys(finding.tensors):
        if name in tensors_of_consequences:
            continue
        for tensor in tensors.get(name, ()):
            is_on_path = not finding.load_paths or tensor.load_path in finding.load_paths
            if not is_on_path or tensor.rule == Rule.LIMIT:  # a fact with a limit is no tensor
                continue
            for outcome in tensor.outcomes:
                if outcome.status == "outside" and not workers.isdisjoint(outcome.workers):
                    hits.append((tensor, outcome))
    return hits


def _worst_element(hits: _Hits) -> Iterator[str]:
    """Yield a line with the reference, the ratio, the number of layers, and the worst element with its tolerance."""
    measured = [(tensor, row) for tensor, row in hits if tensor.rule in _MEASURED and row.max_abs is not None]
    if not measured:
        return
    tensor, outcome = max(measured, key=lambda hit: hit[1].badness)
    factor = outcome.evidence.get("ratio")
    reference = _REFERENCES.get(outcome.reference or "", outcome.reference)
    has_factor = isinstance(factor, float) and math.isfinite(factor)
    relation = f"{factor:.6g}× " if has_factor else "against "
    layers = counted(len({hit_tensor.layer for hit_tensor, _ in hits}), "layer")
    element = f"{tensor.layer}.{tensor.tensor}"
    if outcome.worst_index is not None:
        element += f"{list(outcome.worst_index)}"
    difference, allowed = difference_of(tensor.rule, outcome)
    if difference is not None:
        element += f": off by {float(difference):.2g}"
    if allowed is not None:
        element += f", allowed {float(allowed):.2g}"
    yield f"{relation}{reference} in {layers}; worst {element}"


_MOST_PROBLEMS = 10  # a screen; the report has the rest
_MOST_NAMES = 5


def problems(result: Comparison | SuiteResult) -> Iterator[str]:
    """Yield why a result is not consistent: the verdict in a sentence, then each error with its tensors and devices."""
    if isinstance(result, SuiteResult):
        yield one_line(f"{result.verdict}: {result.sentence}")
        for case in result.cases:
            if case.verdict != "consistent":
                yield one_line(f"  {case.name}: {case.verdict}: {case.headline}")
        return
    yield one_line(f"{result.verdict}: {sentence(result)}")
    errors = [finding for finding in findings_of(result) if finding.severity == "error"]
    for number, finding in enumerate(errors[:_MOST_PROBLEMS], start=1):
        if len(errors) > 1:  # otherwise the verdict has said it
            yield one_line(f"  {number}  {finding.message}")
        evidence = finding.detail or finding.tensors[:_MOST_NAMES]
        yield from (one_line(f"     {text}") for text in evidence)
        if finding.next:
            yield one_line(f"     next: {finding.next}")
    if len(errors) > _MOST_PROBLEMS:
        yield f"  and {len(errors) - _MOST_PROBLEMS} more"
