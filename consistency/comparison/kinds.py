"""Verdicts, and kinds of findings that are no word of a diagnosis. No torch here.

A finding about tensors has the word of their difference as its kind (`consistency.numerics.words`). All other kinds are
here, or beside the finders of a plug-in, which names them (`consistency.plugins.Plugin.kinds`). What each means, what
causes it and what to do is in `docs/glossary.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NewType

from consistency import plugins
from consistency.capture.adapter_remarks import AdapterFlaw
from consistency.numerics import words

Verdict = Literal["consistent", "inconsistent", "incomplete"]
SuiteVerdict = Literal[Verdict, "unchecked"]
"""`unchecked`: the input of a case could not be used, and nothing worse was found."""

WORST_FIRST: tuple[SuiteVerdict, ...] = ("incomplete", "inconsistent", "unchecked", "consistent")
EXIT_STATUS: Mapping[SuiteVerdict, int] = {"consistent": 0, "inconsistent": 1, "unchecked": 2, "incomplete": 3}

FindingKind = NewType("FindingKind", str)
"""The subject of a finding that is no difference of tensors; `known` returns all kinds of findings."""

_DECLARED: dict[str, bool] = {}
"""Whether a finding reports a part that could not be checked, by its kind."""


def declare(name: str, *, unseen: bool = False) -> FindingKind:
    """Declare a kind of findings, and return it.

    Parameters
    ----------
    unseen : bool, optional
        Whether such a finding reports a part that could not be checked.
    """
    _DECLARED[name] = unseen
    return FindingKind(name)


def declared() -> tuple[FindingKind, ...]:
    """Return every kind that is declared."""
    return tuple(map(FindingKind, _DECLARED))


def known() -> frozenset[str]:
    """Return every kind of findings that is known here, with the words of a diagnosis and the kinds of plug-ins."""
    return frozenset({*words.declared(), *declared(), *AdapterFlaw, *plugins.kinds()})


def is_unseen(kind: str) -> bool:
    """Return whether a finding of this kind reports a part that could not be checked."""
    return _DECLARED.get(kind, False)


# workers, and stages that are not complete
LOST_WORKER = declare("lost-worker", unseen=True)
FAILED_WORKER = declare("failed-worker", unseen=True)
FAILED_STAGE = declare("failed-stage")
NOTHING_COMPARED = declare("nothing-compared", unseen=True)
SKIPPED = declare("skipped")
UNEXPLAINED = declare("unexplained")

# what was compared with what
ENVIRONMENT = declare("environment")
UNTESTED_VERSION = declare("untested-version")
INPUTS = declare("inputs")
SETTING_CHANGED = declare("setting-changed")
SETTING_REFUSED = declare("setting-refused")
TOLERANCE = declare("tolerance")
UNKNOWN_HOSTS = declare("unknown-hosts")
DAMAGED_CAPTURE = declare("damaged-capture", unseen=True)
UNWRITTEN = declare("unwritten")
PLANTED = declare("planted")

# results that should be the same and are not
NOT_REPEATABLE = declare("not-repeatable")
SAME_DEVICE_TYPE = declare("same-device-type")
WRONG_DIGEST = declare("wrong-digest")
MEMORY_GROWTH = declare("memory-growth")

# the adapter and the base
NO_EFFECT = declare("no-effect")
OTHER_BASE = declare("other-base")
IGNORED_FIELDS = declare("ignored-fields")
OLDER_LAYOUT = declare("older-layout")
NON_FINITE_VALUES = declare("non-finite-values")
DTYPE_ON_THE_WAY = declare("dtype-on-the-way")
REQUANTIZED = declare("requantized")
REPACKED_WEIGHTS = declare("repacked-weights")

# the host
NO_ACCELERATOR = declare("no-accelerator")
UNUSED_CARD = declare("unused-card")
KERNEL_LOG = declare("kernel-log")
ECC = declare("ecc")
BUS_ERRORS = declare("bus-errors")
REBOOTED = declare("rebooted")

# histories and baselines
DRIFT = declare("drift")
GONE_DEVICE = declare("gone-device")
SOFTWARE = declare("software")
DAMAGED_RUN = declare("damaged-run")
STALE_BASELINE = declare("stale-baseline")

# fleets and suites
LOST_NODE = declare("lost-node", unseen=True)
UNCHECKED = declare("unchecked")

# weight files
SETTINGS = declare("settings")
