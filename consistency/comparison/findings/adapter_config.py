"""What an adapter's config says that a run cannot check: the base that it was trained on, fields that PEFT ignores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.capture.names import IGNORED_FIELDS, RANK_AND_SCALING, SETTINGS_LAYER, TRAINED_ON
from consistency.capture.wording import some
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_adapter_config(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report each of these once, with the workers that found it."""
    bases: dict[str, dict[str, None]] = {}
    fields: dict[str, dict[str, None]] = {}
    for p in compared:
        settings = p.records.get((Stage.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
        evidence = {} if settings is None else settings.evidence
        if evidence.get(TRAINED_ON):
            bases.setdefault(str(evidence[TRAINED_ON]), {})[p.label] = None
        if isinstance(evidence.get(IGNORED_FIELDS), list):
            fields.setdefault(some(list(map(str, evidence[IGNORED_FIELDS]))), {})[p.label] = None
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
