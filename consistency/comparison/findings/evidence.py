"""The input of the finders of a comparison: its workers, the judged tensors, and the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consistency.comparison.result import Finding, TensorComparison
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.workers import ComparedWorker
from consistency.devices.host.facts import HostFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonEvidence:
    """Everything that finders may read.

    Attributes
    ----------
    workers : sequence of ComparedWorker
        The workers of all captures, under distinct names.
    reference : ComparedWorker or None
        The worker that the others are compared with; None where no worker has records.
    tensors : sequence of TensorComparison
        Every tensor on every load path, with its judged rows.
    unclaimed : sequence of TensorComparison
        The tensors without the rows that a finder reports alone (`Finder.without_own`): the causes explain these.
    hosts : sequence of HostFacts
        The facts of one host per capture that has them.
    damage : sequence of str
        Why captures, or parts of them, could not be read.
    groups : SiteGroups
        The groups of hosts that the site declares.
    findings : sequence of Finding
        The findings of earlier phases.
    """

    workers: Sequence[ComparedWorker] = ()
    reference: ComparedWorker | None = None
    tensors: Sequence[TensorComparison] = ()
    unclaimed: Sequence[TensorComparison] = ()
    hosts: Sequence[HostFacts] = ()
    damage: Sequence[str] = ()
    groups: SiteGroups = NO_GROUPS
    findings: Sequence[Finding] = ()
