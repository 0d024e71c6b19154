"""Verdicts, and kinds of findings that are no word of a diagnosis and no mistake of an inference engine. No torch here.

A finding about tensors has the word of their difference as its kind (`consistency.numerics.words.Word`), one about an
inference engine the mistake that explains its outputs (`consistency.capture.engine_causes.Cause`). All others are here.
What each means, what causes it and what to do is in `docs/glossary.md`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal

Verdict = Literal["consistent", "inconsistent", "incomplete"]
SuiteVerdict = Literal[Verdict, "unchecked"]
"""`unchecked`: the input of a case could not be used, and nothing worse was found."""

WORST_FIRST: tuple[SuiteVerdict, ...] = ("incomplete", "inconsistent", "unchecked", "consistent")
EXIT_STATUS: Mapping[SuiteVerdict, int] = {"consistent": 0, "inconsistent": 1, "unchecked": 2, "incomplete": 3}


class FindingKind(enum.StrEnum):
    """What a finding is about, where it is not a difference of tensors."""

    # workers and what they did not do
    LOST_WORKER = "lost-worker"
    FAILED_WORKER = "failed-worker"
    FAILED_STAGE = "failed-stage"
    NOTHING_COMPARED = "nothing-compared"
    SKIPPED = "skipped"
    UNEXPLAINED = "unexplained"

    # what was compared with what
    ENVIRONMENT = "environment"
    INPUTS = "inputs"
    SETTING_CHANGED = "setting-changed"
    SETTING_REFUSED = "setting-refused"
    TOLERANCE = "tolerance"
    UNKNOWN_HOSTS = "unknown-hosts"
    DAMAGED_CAPTURE = "damaged-capture"
    UNWRITTEN = "unwritten"
    PLANTED = "planted"

    # results that should be the same and are not
    NOT_REPEATABLE = "not-repeatable"
    SAME_DEVICE_TYPE = "same-device-type"
    WRONG_DIGEST = "wrong-digest"
    MEMORY_GROWTH = "memory-growth"

    # a model that several devices train together
    REPLICA_DRIFT = "replica-drift"
    HEALTHY_SPLIT = "healthy-split"

    # the text that a device writes
    UNDECIDED_TEXT = "undecided-text"

    # a training by each device alone
    LEFT_TRAJECTORY = "left-trajectory"
    KEPT_TRAJECTORY = "kept-trajectory"

    # the adapter and the base
    NO_EFFECT = "no-effect"
    OTHER_BASE = "other-base"
    IGNORED_FIELDS = "ignored-fields"
    OLDER_LAYOUT = "older-layout"
    NON_FINITE_VALUES = "non-finite-values"
    DTYPE_ON_THE_WAY = "dtype-on-the-way"
    REQUANTIZED = "requantized"
    REPACKED_WEIGHTS = "repacked-weights"

    # inference engines
    BATCH_VARIANT = "batch-variant"
    PART_COMPARED = "part-compared"

    # the host
    NO_ACCELERATOR = "no-accelerator"
    UNUSED_CARD = "unused-card"
    KERNEL_LOG = "kernel-log"
    ECC = "ecc"
    BUS_ERRORS = "bus-errors"
    REBOOTED = "rebooted"

    # histories and baselines
    DRIFT = "drift"
    GONE_DEVICE = "gone-device"
    SOFTWARE = "software"
    DAMAGED_RUN = "damaged-run"
    STALE_BASELINE = "stale-baseline"

    # fleets and suites
    LOST_NODE = "lost-node"
    UNCHECKED = "unchecked"

    # weight files
    SETTINGS = "settings"
    ROUNDED = "rounded"
    NAMES = "names"
    DIFFERENCE = "difference"


UNSEEN: frozenset[str] = frozenset(
    {
        FindingKind.LOST_WORKER, FindingKind.FAILED_WORKER, FindingKind.DAMAGED_CAPTURE, FindingKind.LOST_NODE,
        FindingKind.NOTHING_COMPARED,
    }
)  # fmt: skip
"""Kinds of findings that report a part that could not be checked."""
