"""What workers say of themselves: stages that failed, wrong digests, the configs of base and adapter.

What a failed stage had recorded is compared. Of the adapter's config it is what a run cannot check: the base that it
was trained on, and fields that PEFT ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from consistency.capture.json_codec import encode_json
from consistency.capture.names import (
    DIGEST_FAULT,
    IGNORED_FIELDS,
    OLDER_LAYOUT,
    RANK_AND_SCALING,
    SETTINGS_LAYER,
    TRAINED_ON,
)
from consistency.capture.wording import some
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_failed_stages(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report each error once, with the stages that are incomplete for it and the workers that met it."""
    stages: dict[str, dict[str, None]] = {}
    workers: dict[str, dict[str, None]] = {}
    for worker in compared:
        for stage, reason in worker.failures.items():
            stages.setdefault(reason, {})[stage] = None
            workers.setdefault(reason, {})[worker.label] = None
    for reason, of_stages in stages.items():
        labels = tuple(workers[reason])
        yield Finding(
            kind=FindingKind.FAILED_STAGE,
            severity="error",
            message=f"{some(list(of_stages))} · not complete on {some(labels)}: {reason}",
            workers=labels,
        )


def find_wrong_digests(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report these devices. Their tensors are compared nevertheless: the host digests copies of them."""
    by_reason: dict[str, list[str]] = {}
    for p in compared:
        if reason := p.info.environment.get(DIGEST_FAULT):
            by_reason.setdefault(str(reason), []).append(p.label)
    for reason, labels in by_reason.items():
        opening = f"{some(labels)} · digests computed on the device are wrong"
        yield Finding(
            kind=FindingKind.WRONG_DIGEST,
            severity="error",
            message=f"{opening}: {reason}; tensors were copied to the host and digested there",
            general=opening,
            workers=tuple(labels),
            next="test the device's integer arithmetic and its copies with the vendor's own tool",
        )


def find_configs(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report each of these once, with the workers that found it."""
    yield from _of_base(compared)
    bases: dict[str, dict[str, None]] = {}
    fields: dict[str, dict[str, None]] = {}
    layouts: dict[str, dict[str, None]] = {}
    for p in compared:
        settings = p.records.get((Stage.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
        evidence = {} if settings is None else settings.evidence
        if evidence.get(TRAINED_ON):
            bases.setdefault(str(evidence[TRAINED_ON]), {})[p.label] = None
        if isinstance(evidence.get(IGNORED_FIELDS), list):
            fields.setdefault(some(list(map(str, evidence[IGNORED_FIELDS]))), {})[p.label] = None
        if evidence.get(OLDER_LAYOUT):
            layouts.setdefault(str(evidence[OLDER_LAYOUT]), {})[p.label] = None
    for text, labels in bases.items():
        yield Finding(
            kind=FindingKind.OTHER_BASE, severity="note", workers=tuple(labels),
            message=f"adapter · adapter_config.json names another base: {text}; shapes that fit prove nothing",
        )  # fmt: skip
    for text, labels in fields.items():
        yield Finding(
            kind=FindingKind.IGNORED_FIELDS, severity="warning", workers=tuple(labels),
            message=f"adapter · PEFT ignores what it does not know of adapter_config.json: {text}",
            next="load it with the PEFT that saved it, or a later one: peft_version in adapter_config.json",
        )  # fmt: skip
    for text, labels in layouts.items():
        yield Finding(
            kind=FindingKind.OLDER_LAYOUT, severity="warning", workers=tuple(labels),
            message=f"adapter · {text} with lora_A and lora_B the other way round, and the shapes fit this PEFT as "
            "well: it computes something else",
            next="load it with the PEFT that saved it, merge it there, and use the merged model",
        )  # fmt: skip


def _of_base(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report bases whose configs differ: each worker is judged against float64 by its own, so that no row shows it.

    Another version of transformers has other fields: only those that both have are compared then.
    """
    found: dict[bytes, list[ComparedWorker]] = {}
    for p in compared:
        if p.info.config:
            found.setdefault(encode_json(p.info.config), []).append(p)
    for workers in list(found.values())[1:]:
        first, labels = next(iter(found.values()))[0], tuple(dict.fromkeys(p.label for p in workers))
        own, wanted = workers[0].info, first.info
        names = own.config.keys() & wanted.config.keys()
        if own.environment.get("transformers") == wanted.environment.get("transformers"):
            names = own.config.keys() | wanted.config.keys()
        pairs = [(name, own.config.get(name), wanted.config.get(name)) for name in sorted(names)]
        texts = [f"{name} is {a!r} and {b!r} on {first.label}" for name, a, b in pairs if a != b]
        if texts:
            yield Finding(
                kind=FindingKind.SETTINGS, severity="error", workers=labels,
                message=f"base · {some(labels)} · another config, so another function: {some(texts)}",
                general=f"base · {some(labels)} · another config, so another function",
                next="capture again with one config.json: consistency diff shows what differs in the files",
            )  # fmt: skip
