"""Statuses of rows and workers, verdicts and severities; which there are is said by the types that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from consistency.capture.records import RecordStatus, WorkerStatus
from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry
from consistency.cli.glossary.entry import entries as entries_of
from consistency.comparison.result import Severity, Verdict
from consistency.comparison.suite import SuiteVerdict

VERDICT = Family(name="verdict", title="verdicts")
SEVERITY = Family(name="severity of a finding", title="severities of findings")
STATUS = Family(name="status of a row", title="statuses of a row, which is one tensor or fact on one worker")
WORKER = Family(name="outcome of a worker", title="outcomes of a worker")

VERDICTS: tuple[str, ...] = (*get_args(Verdict), *get_args(get_args(SuiteVerdict)[1]))
"""Those of a run, and what a case of a suite has beside them."""

SEVERITIES: tuple[str, ...] = get_args(Severity)
STATUSES: tuple[str, ...] = get_args(RecordStatus)
WORKER_OUTCOMES: tuple[str, ...] = get_args(WorkerStatus)

EXPLANATIONS: Mapping[Family, Mapping[str, Explanation]] = {
    VERDICT: {
        "consistent": Explanation(
            summary="everything that was compared agrees, exactly or within its rule",
            meaning="No finding is an error, and no part of what was requested is missing. Warnings and notes do not "
            "change it; what the level did not check is listed at the end of the report.",
            cause="Equal bytes, and results within the bounds that their rules derive.",
            action="Nothing. Keep the run with --history, if devices are to be watched.",
            example="CONSISTENT   the adapter agrees on 2 workers",
        ),
        "inconsistent": Explanation(
            summary="at least one finding is an error",
            meaning="Something differs where it may not. The findings say what, where and, as far as the load paths "
            "and other workers show it, why.",
            cause="Wrong bytes, results outside their rule, a drift, different inputs; see the kind of each finding.",
            action="Begin with the first finding: later ones may follow from it. `consistency show DIR --finding 1` "
            "has all of its tensors.",
            example="INCONSISTENT   3 of 100 tensors differ",
        ),
        "incomplete": Explanation(
            summary="a part of what was requested could not be checked",
            meaning="A worker was lost or failed, a stage raised, a device or node is gone, a capture is damaged, or "
            "nothing was compared. It is said whether or not the rest agrees.",
            cause="See `lost-worker`, `failed-stage`, `nothing-compared`, `gone-device`, `lost-node` and "
            "`damaged-capture`.",
            action="Fix what was lost and run again: until then agreement cannot be claimed.",
            example="INCOMPLETE   cuda:1 did not finish",
        ),
        "unchecked": Explanation(
            summary="a case of a suite, or a whole one, was not checked at all",
            meaning="The input of the case cannot be used, or the suite stopped before it. `consistency status` says "
            "it of a result without anything that was checked.",
            cause="A missing folder, an adapter that does not fit, --fail-fast.",
            action="The row of the case has the reason.",
            example="3  case unusable · could not be checked: no such folder for the adapter",
        ),
    },
    SEVERITY: {
        "error": Explanation(
            summary="makes the verdict inconsistent",
            meaning="Something is wrong that should not be: the only severity that changes a verdict.",
            cause="A mismatch, a drift, something lost.",
            action="Act on it, or accept it with a reason (`consistency baseline accept`), which makes it a note.",
            example="1  adapter · cuda:1 · zeros in 3 of 3 lora_B tensors",
        ),
        "warning": Explanation(
            summary="to be known, and no verdict depends on it",
            meaning="It may explain other findings, or is a risk, or is what software does on every device alike.",
            cause="Different software, unexpected device use by PEFT's default, rising counters, ignored fields.",
            action="Read it; fix it where it costs little.",
            example="1  warning: memory · npu:1 · loading the adapter allocated 256 KiB on npu:0 and released it",
        ),
        "note": Explanation(
            summary="information: nothing to do",
            meaning="What was left out and why, what a tolerance judged, what merging costs, what was accepted.",
            cause="See its kind.",
            action="Nothing.",
            example="note: memory · 3 checks skipped on npu:1: contexts cannot be observed on npu",
        ),
    },
    STATUS: {
        "equal": Explanation(
            summary="bitwise equal to its reference, or a fact that holds exactly",
            meaning="The bytes are those of the file or of the reference worker, the result is the exact value as it "
            "is stored, or a fact is as it has to be.",
            cause="Nothing changed the bytes.",
            action="Nothing.",
            example="=   in the table of workers and stages",
        ),
        "within": Explanation(
            summary="different, by no more than its rule allows",
            meaning="The worst element's error is at most what is allowed for it, or a fact is below its limit.",
            cause="Rounding in another order, mostly: the word is `accumulation-order`.",
            action="Nothing. `consistency show DIR --layers` lists how near to the bound each layer is.",
            example="cuda:0: within, 0.31× tolerance",
        ),
        "outside": Explanation(
            summary="different, by more than its rule allows",
            meaning="Bytes that were moved are not the same, an element's error exceeds what is allowed, or a fact "
            "exceeds its limit. It makes the run inconsistent.",
            cause="The row's word says what the difference looks like.",
            action="`consistency explain` the word, and see the finding that names the tensor.",
            example="npu:1: outside, zeros, at [80, 2]",
        ),
        "missing": Explanation(
            summary="expected, and not there on this worker",
            meaning="Another worker, the model or the file has the tensor. It makes the run inconsistent.",
            cause="See the word `missing`.",
            action="The reason follows in the finding.",
            example="adapter · cpu · lora_B of model.layers.0.self_attn.q_proj missing",
        ),
        "unexpected": Explanation(
            summary="there, and expected by nothing",
            meaning="A tensor without a counterpart in the model, in the reference file or on the reference worker. It "
            "makes the run inconsistent.",
            cause="See the word `unexpected`.",
            action="Check that adapter and base belong together.",
            example="adapter · cpu · 8 of 64 tensors without a counterpart",
        ),
        "skipped": Explanation(
            summary="left out, with a reason",
            meaning="It could not be judged, or need not be: nothing is claimed of it, and the run is not failed.",
            cause="No such kernel, no float64 value, a rule that would let zeros pass, a stage without its input.",
            action="Read the reason in the note.",
            example="note: memory · 3 checks skipped on npu:1: contexts cannot be observed on npu",
        ),
        "blocked": Explanation(
            summary="not reached: the worker or the stage ended before it",
            meaning="The worker was lost or its stage raised. A comparison with such a row is incomplete.",
            cause="See `lost-worker` and `failed-stage`.",
            action="Fix that first.",
            example="cuda:1: blocked   the worker was lost before it: killed by SIGKILL",
        ),
        "measured": Explanation(
            summary="recorded by a worker that could not judge it itself",
            meaning="In a capture only: the comparison with other workers decides. Where none of its rules can, the "
            "row is `skipped`.",
            cause="A result without an exact value on the worker: rules `relative` and `peer`.",
            action="Compare the capture with another one.",
            example="a record of stage forward in records.jsonl before the comparison",
        ),
    },
    WORKER: {
        "ok": Explanation(
            summary="the worker ran to its end",
            meaning="The process ended by itself after its last stage. A stage of it may have failed; that is another "
            "finding.",
            cause="All stages were run or skipped.",
            action="Nothing.",
            example='"status": "ok" of a worker in report.json',
        ),
        "lost": Explanation(
            summary="its process was killed, crashed, hung or ran out of memory",
            meaning="It could not say that it had ended. The verdict is `incomplete`; what it recorded is compared.",
            cause="See the kind `lost-worker`.",
            action="Look at the signal, the last event and the stack in the finding.",
            example="worker cuda:1 was lost: gave no sign of life for 300 s; last event: forward",
        ),
        "failed": Explanation(
            summary="it ended itself with an error of its device, its input or its disk",
            meaning="It says itself why it cannot check. The verdict is `incomplete`.",
            cause="See the kind `failed-worker`.",
            action="Do what the reason says.",
            example="worker cuda:2 failed: cuda:2 cannot be used: its compute mode is prohibited",
        ),
    },
}


def entries() -> tuple[GlossaryEntry, ...]:
    """Return an entry per verdict, severity, status of a row and outcome of a worker."""
    return tuple(one for family, table in EXPLANATIONS.items() for one in entries_of(family, table.items()))
