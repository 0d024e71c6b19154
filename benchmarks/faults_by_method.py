"""Plant faults in adapters of many methods, and print the table of `docs/faults-by-method.md`.

    python -m benchmarks.faults_by_method DIR              # make adapters, run, print the page
    python -m benchmarks.faults_by_method DIR --write      # the same, into docs/faults-by-method.md
    python -m benchmarks.faults_by_method DIR --methods IA3,LOHA

Run from the root of the repository. `DIR/MODEL` gets the model and its adapters, those of `benchmarks/zoo.py`,
`DIR/out` the report of each run. Each adapter is first run without a fault: where that run has a finding, none is
planted. Then each fault of `FAULTS_OF` that applies is planted in one of two workers, as `consistency drill` does; all
runs are cases of one suite.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import zoo
from benchmarks.generated_parts import show
from consistency.case import standard
from consistency.case.named_adapters import NamedAdapter
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Stage
from consistency.errors import InputError
from consistency.extras.diagnosis.drill.drill import (
    DrillRow,
    Trial,
    check_healthy,
    drill,
    trial_of,
    without_fault,
)
from consistency.extras.diagnosis.drill.plantable import several_adapters, subject_of
from consistency.extras.peft_api.adapters.spec import ADAPTERS
from consistency.extras.peft_api.sharding.spec import SHARDING
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Fault
from consistency.workflows import judging, pipeline, report_folder
from consistency.workflows.suite import PlannedCase, SuitePlan, captured

PAGE = Path(__file__).parents[1] / "docs" / "faults-by-method.md"
MODEL = zoo.FIRST
DEVICES = ("cpu", "cpu@baseline")
"""The second one gets the faults."""

METHODS = (
    "LORA", "ADALORA", "BOFT", "DEFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "SHIRA",
    "VERA", "CPT", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING",
)  # fmt: skip
"""Low-rank, multiplicative, sparse and spectral methods, those of vectors and norms, and of virtual tokens."""

FAULTS_OF: dict[Stage, tuple[str, ...]] = {
    standard.BASE: ("base-bit-flip", "base-through-bfloat16"),
    standard.ADAPTER: (
        "adapter-zeros", "adapter-bit-flip", "adapter-half-a-page", "adapter-layers-swapped", "adapter-old-bytes",
        "adapter-through-bfloat16", "adapter-nan", "adapter-inactive",
    ),
    standard.MERGED: ("merge-bit-flip", "merge-zeros", "merge-off", "merge-fails", "merge-not-repeatable"),
    standard.FORWARD: ("forward-off", "forward-fails"),
    standard.GRADIENT: ("gradient-off", "gradient-zeros", "optimizer-off"),
    ADAPTERS: ("adapter-left-after-delete", "adapter-stays-active"),
    standard.MEMORY: ("placed-elsewhere",),
    SHARDING: ("labels-changed-on-hop", "ids-past-vocabulary"),
}  # fmt: skip
"""Faults by stage. `transfer`, `operators` and `wrapping` never see an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjected:
    """One adapter and what became of each fault.

    Attributes
    ----------
    healthy : str
        Why none was planted.
    missed : mapping of str to str
        Why a fault was not found, by its name.
    """

    method: str
    rows: Mapping[str, DrillRow]
    healthy: str = ""
    missed: Mapping[str, str] = field(default_factory=dict)


def make(home: Path, methods: Sequence[str]) -> dict[str, Path]:
    """Make the model, and an adapter of each method on its first kind of layer; return their folders."""
    base, found = home / MODEL / "base", {}
    made = zoo.build(zoo.MODELS[MODEL]) if base.exists() else None
    made = made or zoo.save_model(MODEL, base)
    for one in zoo.combinations((MODEL,)):
        if one.method in methods and not one.variant and one.layer in (next(iter(zoo.layers(MODEL))), "model"):
            folder = home / MODEL / "adapters" / one.folder
            if not folder.exists():
                why = zoo.save_adapter(one, made, base, folder)
                assert not why, f"{one.name}: {why}"
            found[one.method] = folder
    return {method: found[method] for method in methods}


def run(home: Path, methods: Sequence[str], *, only: Iterable[str] = ()) -> list[Subjected]:
    """Plant every fault in an adapter of every method, and return what was found."""
    named = [name for names in FAULTS_OF.values() for name in names]
    faults = [FAULTS[name] for name in named if not only or name in only]
    folders = make(home, methods)
    with ExitStack() as stack:
        pairs = {method: stack.enter_context(several_adapters(folder)) for method, folder in folders.items()}
        options = {method: _options(home, folder) for method, folder in folders.items()}
        healthy = _healthy(home, faults, options, pairs)
        trials: dict[tuple[str, str], Trial] = {}
        refused: dict[str, str] = {}
        for method, found in healthy.items():
            try:
                check_healthy(found)
            except InputError as error:
                refused[method] = str(error.parts.get("got", error))
                continue
            subject = subject_of(prepare_case(options[method]), workers=len(DEVICES), healthy=found)
            for fault in faults:
                name = f"{method}.{fault.name}"
                trials[method, fault.name] = trial_of(fault, options[method], subject, pairs[method], name=name)
        found = drill(tuple(trials.values()), out=home / "out", watch=_silent, replace=True)
        rows = dict(zip(trials, found, strict=True))
    missed = {
        (method, fault): _why_missed(home / "out" / f"{method}.{fault}" / "report.json", FAULTS[fault])
        for (method, fault), row in rows.items() if row.planted and not row.found
    }  # fmt: skip
    return [
        Subjected(
            method=method, healthy=refused.get(method, ""),
            rows={fault: row for (of, fault), row in rows.items() if of == method},
            missed={fault: why for (of, fault), why in missed.items() if of == method},
        )
        for method in methods
    ]  # fmt: skip


def _why_missed(report: Path, fault: Fault) -> str:
    """Return how much of what is allowed the rows of the faulty worker took, and why others were not judged."""
    found = json.loads(report.read_text(encoding="utf-8"))
    rows = [row for row in found["outcomes"] if row["stage"] == fault.stages[0] and row["rule"] in ("relative", "block")
            if DEVICES[-1] in found["cohorts"][row["cohort"]]["workers"]]  # fmt: skip
    shares = [float(row["ratio"]) for row in rows if row["ratio"] is not None]
    skipped = {row["reason"] for row in rows if row["status"] == "skipped" and row["reason"]}
    text = f"the error is {max(shares):.2g} of what is allowed" if shares else "nothing was judged"
    return text + "".join(f"; skipped elsewhere: {reason}" for reason in sorted(skipped))


def _options(home: Path, adapter: Path) -> Options:
    return Options(base=str(home / MODEL / "base"), adapter=str(adapter), devices=DEVICES)


def _healthy(
    home: Path,
    faults: Sequence[Fault],
    options: Mapping[str, Options],
    pairs: Mapping[str, tuple[NamedAdapter, ...] | None],
) -> dict[str, Any]:
    """Run every adapter without a fault, and return the comparisons."""
    cases = []
    for method, one in options.items():
        own = dataclasses.replace(without_fault(faults, one, pairs[method]), name=method)
        cases.append(PlannedCase(options=own, plan=pipeline.prepare(own), below=""))
    limits = next(case.plan.limits for case in cases if case.plan is not None)
    plan = SuitePlan(name="healthy", cases=tuple(cases), limits=limits)
    found = {}
    with report_folder.output(home / "healthy", replace=True, writes=[case.folder for case in cases]) as folder:
        for case, captures in captured(plan, folder, report_folder.CAPTURES, watch=_silent, replace=True):
            if captures.error is not None:
                raise captures.error
            read, unread = judging.read_captures(captures.captures)
            found[case.name] = judging.compare_captures(read, unread=[*captures.lost, *unread])
    return {method: found[method] for method in options}


def _silent(_label: str, _event: object) -> None:
    """Show no progress."""


# --- the page -------------------------------------------------------------------------------------------------------


def cell(row: DrillRow | None) -> str:
    """Return what became of a fault: the word it was named by, that it was missed, or that it was not planted."""
    if row is None or not row.planted:
        return "–"
    if not row.found:
        return "**missed**" if row.named is None else f"**{row.named}, and others blamed**"
    return str(row.named) if row.passed else f"**{row.named}** for {row.expected}"


def tables(found: Sequence[Subjected]) -> str:
    """Return a table for each stage: methods by faults."""
    parts = []
    for stage, names in FAULTS_OF.items():
        lines = [("method", *(f"`{name}`" for name in names)), ("---",) * (1 + len(names))]
        lines += [(f"`{one.method}`", *(cell(one.rows.get(name)) for name in names)) for one in found]
        parts.append(f"### {stage}\n\n{_joined(lines)}")
    return "\n\n".join(parts)


def why_not(found: Sequence[Subjected]) -> str:
    """Return a list of why faults were not planted: one line per reason."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if one.healthy:
            reasons[f"without any fault: {one.healthy}"]["every fault"].append(one.method)
        for name, row in one.rows.items():
            if not row.planted:
                text = row.message.replace(f"of the method {one.method} ", "")
                reasons[text][f"`{name}`"].append(one.method)
        for name, why in one.missed.items():
            reasons[f"**missed**, {why}"][f"`{name}`"].append(one.method)
    lines = []
    for text, by_fault in sorted(reasons.items()):
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, methods in by_fault.items():
            groups[tuple(methods)].append(name)
        where = "; ".join(f"{', '.join(names)} in {', '.join(f'`{m}`' for m in of)}" for of, names in groups.items())
        lines.append(f"* {text.strip().splitlines()[0]}: {where}")
    return "\n".join(lines)


def counts(found: Sequence[Subjected]) -> dict[Stage, int]:
    """Return in how many methods other than LoRA a fault of each stage was found, and none of it missed."""
    counted = {}
    for stage, names in FAULTS_OF.items():
        of_stage = [[one.rows[name] for name in names if name in one.rows and one.rows[name].planted]
                    for one in found if one.method != "LORA"]  # fmt: skip
        counted[stage] = sum(bool(rows) and all(row.passed for row in rows) for rows in of_stage)
    return counted


def figures(found: Sequence[Subjected], took: Mapping[str, float]) -> str:
    """Return the sentences about the run as a whole."""
    planted = [row for one in found for row in one.rows.values() if row.planted]
    passed = sum(row.passed for row in planted)
    by_stage = ", ".join(f"`{stage}` {count}" for stage, count in counts(found).items())
    return (
        f"{passed} of {len(planted)} planted faults found and named, in adapters of {len(found)} methods on "
        f"{', '.join(DEVICES)}: {took['wall']:.0f} s, {took['processor']:.0f} s of processor time.\n\n"
        f"Methods other than LoRA in which every planted fault of a stage was found and named: {by_stage}."
    )


def generated(home: Path, methods: Sequence[str]) -> dict[str, str]:
    """Make the generated parts of the page."""
    began, before = time.monotonic(), _processor()
    found = run(home, methods)
    took = {"wall": time.monotonic() - began, "processor": _processor() - before}
    return {"figures": figures(found, took), "tables": tables(found), "reasons": why_not(found)}


def listed(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield stage, method, fault and cell of every cell of a page."""
    stage, names = "", list[str]()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("### "):
            stage = line.removeprefix("### ")
        elif line.startswith("| method"):
            names = [name.strip("`") for name in cells[1:]]
        elif line.startswith("| `"):
            yield from ((stage, cells[0].strip("`"), name, text) for name, text in zip(names, cells[1:], strict=True))


def _joined(lines: Iterable[Iterable[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _processor() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    given = parser.parse_args()
    zoo.quiet()
    show(generated(given.folder.resolve(), given.methods), PAGE, write=given.write)


if __name__ == "__main__":
    main()
