"""Rows -> findings: one sentence per cause, most severe first, with the next command.

*All 128 lora_B tensors on cuda:1 and cuda:3* is one finding, not 256.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator, Sequence

from consistency.capture.names import NO_OUTPUT, WHOLE_MODEL
from consistency.capture.soak import Soak
from consistency.capture.wording import counted, some
from consistency.case.builtin import builtin_name
from consistency.case.duration import duration_text
from consistency.case.stages import LEVELS, MOVES_WEIGHTS, Level, Stage, requested
from consistency.comparison.findings.causes import find_causes
from consistency.comparison.findings.engines import find_engines, of_devices
from consistency.comparison.findings.host import find_host_problems
from consistency.comparison.findings.load_paths import find_casts
from consistency.comparison.findings.model import find_no_effect, find_quantized
from consistency.comparison.findings.nothing_compared import find_not_finite, find_nothing_compared, find_unexplained
from consistency.comparison.findings.repeats import find_soak, ran_before, without_version
from consistency.comparison.findings.same_program import find_same_program, find_unknown_hosts
from consistency.comparison.findings.tolerances import find_tolerances
from consistency.comparison.findings.training import find_ranks, find_trajectories, without_trajectories
from consistency.comparison.findings.transfers import find_transfer
from consistency.comparison.findings.workers import (
    find_configs,
    find_device_use,
    find_failed_stages,
    find_wrong_digests,
)
from consistency.comparison.judge import NOT_FINITE
from consistency.comparison.kinds import FindingKind
from consistency.comparison.outcomes import Workers, gathered, names_in
from consistency.comparison.result import BAD, Finding, TensorComparison, in_order, tensor_name
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.workers import ComparedWorker, in_order_of
from consistency.devices.host.facts import HostFacts

_MOST_CARDS = 3
_FRAMES, _INNERMOST_FIRST = 12, "(most recent call first)"
_SOFTWARE = ("torch", "cuda", "hip", "cudnn", "transformers", "peft", "safetensors", "accelerate", "numpy", "python")

REPEAT = " --repeat 2"

_UNUSED = "these inputs do not reach it, or the model reads its weight itself, which leaves its adapter out"

AS_DEPLOYED = "; the profile deployed promises no equal bits"


def find(
    compared: Sequence[ComparedWorker],
    reference: ComparedWorker | None,
    tensors: Sequence[TensorComparison],
    *,
    hosts: Sequence[HostFacts],
    damage: Sequence[str],
    groups: SiteGroups = NO_GROUPS,
) -> tuple[Finding, ...]:
    """Return everything to act on, most severe first."""
    found = [
        *(Finding(kind=FindingKind.DAMAGED_CAPTURE, severity="error", message=text) for text in damage),
        *_lost(compared),
        *find_failed_stages(compared),
        *find_nothing_compared(compared, tensors),
        *find_not_finite(compared, tensors),
        *_software(compared),
        *_inputs(compared),
        *find_wrong_digests(compared),
        *_not_repeatable(compared, tensors),
        *find_transfer(compared, tensors),
        *find_causes(
            [t for t in without_trajectories(of_devices(tensors, compared)) if t.stage != Stage.TRANSFER],
            next_step=functools.partial(_next, compared, reference),
            compare_file=functools.partial(_compare_file, reference),
        ),
        *find_engines(compared, tensors),
        *find_device_use(tensors),
        *find_ranks(tensors),
        *_texts(tensors),
        *find_trajectories(tensors, next_step=functools.partial(_once_more, compared, reference)),
        *find_casts(tensors, {p.label: p.info.environment.get("dtype") for p in compared}),
        *find_soak(
            compared, next_step=functools.partial(_soak_again, compared, reference), as_deployed=AS_DEPLOYED
        ),
        *find_same_program(compared, tensors, groups=groups, as_deployed=AS_DEPLOYED),
        *find_host_problems(hosts, workers=[p.label for p in compared]),
        *_settings(compared),
        *find_unknown_hosts(compared, groups),
        *find_no_effect(compared),
        *find_configs(compared),
        *find_quantized(compared),
        *find_tolerances(compared),
        # so that the report of a drill is not mistaken for one of a real fault
        *(
            Finding(
                kind=FindingKind.PLANTED, severity="note", workers=(p.label,),
                message=f"the fault {p.info.planted} was planted in {p.label} on purpose",
            )
            for p in compared if p.info.planted is not None
        ),
        *_skipped(compared, tensors),
    ]  # fmt: skip
    return in_order([*found, *find_unexplained(tensors, found)])


_MAKE_ROOM = "make room on the disk of --out, or give another --out: what was recorded before is compared here"
_AFTER_LOSS = (
    ("is the disk full?", _MAKE_ROOM),
    ("No space left on device", _MAKE_ROOM),
    ("killed by SIGKILL", "look for the kernel's out-of-memory killer: dmesg -T | grep -i 'killed process'"),
    ("exceeded --timeout", "give it more time with --timeout, or look at the stack above for what it waits for"),
    ("gave no sign of life", "look at the stack above for what it waits for, and at the device's log (dmesg)"),
)
"""What a reason has in it, and what to do then."""


def _lost(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    same = gathered(((p.info.status, p.info.reason, p.info.stack), p) for p in compared if p.info.status != "ok")
    for (status, reason, stack), lost in same.items():
        verb = "failed" if status != "lost" else "was lost" if len(lost) == 1 else "were lost"
        opening = f"{'worker' if len(lost) == 1 else 'workers'} {some([_place(p) for p in lost])} {verb}"
        yield Finding(
            kind=FindingKind.LOST_WORKER if status == "lost" else FindingKind.FAILED_WORKER,
            severity="error",
            message=f"{opening}: {reason}",
            general=f"{opening}: {(reason or '').partition(';')[0]}",
            workers=tuple(p.label for p in lost),
            cause=reason,
            detail=(*_cards(lost), *_innermost(stack or "")),
            next=next((todo for text, todo in _AFTER_LOSS if status == "lost" and text in (reason or "")), None),
        )


def _innermost(stack: str) -> list[str]:
    """Return the innermost frames of a stack: the last of a traceback, the first of what `faulthandler` writes.

    It writes every thread, the main one last; which one took its signal says nothing.
    """
    if _INNERMOST_FIRST in stack:
        return stack.strip().rpartition("\n\n")[2].splitlines()[:_FRAMES]
    return stack.splitlines()[-_FRAMES:]


def _cards(lost: Sequence[ComparedWorker]) -> Iterable[str]:
    """Name the cards of lost workers as other tools do: the number of a device is its place in one process."""
    for p in lost[:_MOST_CARDS]:
        named = (p.info.model, p.info.uuid, p.info.pci_bus_id and f"PCI {p.info.pci_bus_id}")
        if p.info.uuid or p.info.pci_bus_id:
            yield f"{p.label} is {', '.join(filter(None, named))}"


def _software(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report different software; such captures are compared nevertheless."""
    for name in ("profile", *_SOFTWARE):
        values: dict[str, list[str]] = {}
        for p in compared:
            facts = {"profile": _profile(p), **p.info.environment}
            if name in facts:
                values.setdefault(str(facts[name]), []).append(p.label)
        if len(values) > 1:
            text = "; ".join(f"{value}: {some(labels)}" for value, labels in values.items())
            yield Finding(
                kind=FindingKind.ENVIRONMENT, severity="warning", message=f"{name} differs between workers: {text}"
            )


def _inputs(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    digests = gathered((p.info.inputs_digest, p.label) for p in compared if p.info.inputs_digest is not None)
    if len(digests) > 1:
        first, *others = digests.values()
        workers = tuple(label for labels in others for label in labels)
        yield Finding(
            kind=FindingKind.INPUTS,
            severity="error",
            message=f"forward · {some(workers)} had different inputs than {some(first)}: outputs cannot be compared",
            workers=workers,
            next="give the same --inputs, --level, base and tokenizer to every capture",
        )


def _settings(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    found: dict[tuple[FindingKind, str, str | None], list[str]] = {}
    for p in compared:
        for c in p.info.changes:
            text = f"{c.setting} changed to {c.in_force} during {c.stage}"
            wanted = None if c.asked is None and c.setting not in p.info.asked else str(c.asked)
            found.setdefault((FindingKind.SETTING_CHANGED, text, wanted), []).append(p.label)
        for name, asked in p.info.asked.items():
            if name in p.info.in_force and p.info.in_force[name] != asked:
                text = f"{name} is {p.info.in_force[name]}"
                found.setdefault((FindingKind.SETTING_REFUSED, text, str(asked)), []).append(p.label)
    for (kind, text, asked), labels in found.items():
        rest = "the profile leaves it" if asked is None else f"{asked} was requested"
        yield Finding(
            kind=kind,
            severity="note" if asked is None else "warning",
            message=f"{text} on {some(labels)}; {rest}",
            workers=tuple(labels),
        )


def _not_repeatable(compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    """Report results that changed between runs; only pinned settings promise that they do not."""
    as_deployed = {p.label for p in compared if not p.case.is_pinned}
    in_soak = {(p.label, tensor_name(*key)) for p in compared for key in p.changes}  # `find_soak` reports these
    by_label = gathered((p.label, p) for p in compared)
    found: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for tensor in tensors:
        for row in tensor.outcomes:
            # an adapter that is wrong when loaded over poison differs from the first load: that is reported already,
            # and does not show whether it is wrong again
            reported = tensor.stage == Stage.ADAPTER and row.status in BAD
            if row.repeated is False and not reported:
                for worker in row.workers:
                    if (worker, tensor.name) not in in_soak:
                        key = (tensor.stage, tensor.layer, tensor.tensor)
                        operations = ran_before(by_label[worker], tensor.load_path, key)
                        found.setdefault((worker, tensor.stage, operations), []).append(tensor.name)
    by_tensors: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for (worker, stage, operations), where in found.items():
        why = without_version(operations) if operations else ""
        if worker in as_deployed and stage not in MOVES_WEIGHTS:  # bytes that were moved are the same every time
            why += AS_DEPLOYED
        by_tensors.setdefault((stage, tuple(where), why), []).append(worker)
    for (stage, same, why), workers in by_tensors.items():
        yield Finding(
            kind=FindingKind.NOT_REPEATABLE,
            severity="note" if why else "error",
            message=(
                f"{stage} · {some(workers)} · {counted(len(same), 'tensor')} changed bitwise on a repeat run on the "
                f"same device{why}"
            ),
            general=f"{stage} · {some(workers)} · tensors changed bitwise on a repeat run on the same device",
            workers=tuple(workers),
            tensors=tuple(dict.fromkeys(same)),
        )


def _texts(tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Report each text that parts from the reference's where rounding explains it, and how soon two part."""
    found: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        for row in tensor.outcomes if tensor.stage == Stage.GENERATION else ():
            if row.status == "within" and row.reason:
                text = row.reason if tensor.layer == WHOLE_MODEL else f"another text for {tensor.layer}: {row.reason}"
                found.setdefault((tensor.name, text), []).extend(row.workers)
    for (name, text), workers in found.items():
        yield Finding(
            kind=FindingKind.UNDECIDED_TEXT, severity="note", message=f"{Stage.GENERATION} · {some(workers)} · {text}",
            workers=tuple(workers), tensors=(name,),
        )  # fmt: skip


def _skipped(compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]) -> Iterable[Finding]:
    reasons: dict[tuple[str, str], tuple[list[Workers], dict[str, str]]] = {}
    facts = {tensor.name for tensor in tensors if tensor.rule == "limit"}
    # findings already: what has no number to compare with, and what is missing because a stage did not run
    said = {(t.stage, row.reason) for t in tensors for row in t.outcomes if row.status == "missing"}
    said |= {(stage.value, NOT_FINITE) for stage in Stage}
    for tensor in tensors:
        for row in tensor.outcomes:
            if row.status == "skipped" and (tensor.stage, row.reason) not in said:
                found = reasons.setdefault((tensor.stage, row.reason or "no reason given"), ([], {}))
                found[0].append(row.workers)
                found[1][tensor.name] = tensor.layer
    for (stage, reason), (skipping, names) in reasons.items():
        by_worker, where = in_order_of(compared, names_in(skipping)), list(names)
        what = counted(len(where), "check" if facts.issuperset(where) else "tensor")
        yield Finding(
            kind=FindingKind.SKIPPED,
            severity="note",
            message=f"{stage} · {what} skipped on {some(by_worker)}: {reason}",
            general=f"{stage} · skipped on {some(by_worker)}: {reason}",
            workers=tuple(by_worker),
            tensors=tuple(where),
            detail=(f"of {some(list(dict.fromkeys(names.values())))}: {_UNUSED}",) if reason == NO_OUTPUT else (),
        )


def _soak_again(
    compared: Sequence[ComparedWorker], reference: ComparedWorker | None, worker: ComparedWorker, soak: Soak
) -> str | None:
    """Return a command that soaks one device again."""
    found = _once_more(compared, reference, [worker.label])
    load = " --load" if soak.load is not None else ""
    return None if found is None else f"{found} --for {duration_text(soak.asked_s)}{load}"


def _once_more(
    compared: Sequence[ComparedWorker], reference: ComparedWorker | None, workers: Sequence[str]
) -> str | None:
    """Return a command that repeats the check as it was, where runs within one are not compared."""
    found = _next(compared, reference, workers)
    return None if found is None else found.removesuffix(REPEAT)


def _next(compared: Sequence[ComparedWorker], reference: ComparedWorker | None, workers: Sequence[str]) -> str | None:
    """Return a command that repeats the check; captures from elsewhere have none."""
    if reference is None or any(p.capture is not reference.capture for p in compared):
        return None
    case = reference.case
    devices = dict.fromkeys([reference.info.name, *workers])
    if not case.base:
        return shlex.join(["consistency", "doctor", "--devices", ",".join(devices)])
    builtin = None if case.adapters else builtin_name(case.base, case.adapter)
    words = ["consistency", "run", "--base", f"builtin:{builtin}" if builtin else case.base]
    given = [str(one) for one in case.adapters] or ([case.adapter] if case.adapter and not builtin else [])
    words += _given("--adapter", *given)
    words += _given("--dtype", *([case.dtype] if case.dtype != "auto" else []))
    words += _given("--profile", *([] if case.is_pinned else [case.profile]))
    words += _given("--set", *map(str, case.settings))
    words += _given("--level", *([case.level] if case.level != Level.STANDARD else []))
    asked = set(case.stages) != set(requested(case.level, case))
    words += _given("--stages", *([",".join(case.stages)] if asked else []))
    words += _given("--wrapper", *filter(None, [case.wrapper]))
    words += _given("--device-map", *([str(case.device_map)] if case.device_map else []))
    words += _given("--repeat", *([str(case.repeat)] if case.repeat > max(1, LEVELS[case.level].repeat) else []))
    words += _given("--steps", *([str(case.steps)] if case.steps else []))
    words += _given("--inputs", *filter(None, [case.inputs]))
    words += _given("--load-paths", *([",".join(case.load_paths)] if case.load_paths else []))
    words += _given("--tolerance", *map(str, case.tolerance))
    words += _given("--placement", *([case.placement] if case.placement != "auto" else []))
    words += ["--allow-pickle"] * case.allow_pickle + ["--trust-remote-code"] * case.trust_remote_code
    return shlex.join([*words, "--devices", ",".join(devices)]) + ("" if case.repeat > 1 else REPEAT)


def _given(option: str, *values: str) -> Iterator[str]:
    """Yield an option with each of its values."""
    for value in values:
        yield from (option, value)


def _compare_file(reference: ComparedWorker | None, stage: str) -> str | None:
    """Return what compares the base or the adapter with the folder that it was copied from."""
    folder = None if reference is None else reference.case.adapter if stage == Stage.ADAPTER else reference.case.base
    return f"compare it with what it was copied from: consistency diff SOURCE {shlex.quote(folder)}" if folder else None


def _profile(p: ComparedWorker) -> str:
    return " ".join([p.case.profile, *map(str, p.case.settings)])


def _place(p: ComparedWorker) -> str:
    return p.label if p.load_path == "isolated" else f"{p.label} ({p.load_path})"
