"""Make the findings of a comparison: call every finder in its place, and put the findings into the order of a report.

Nobody lists the finders. A module of this folder declares its own in `FINDERS`, and a plug-in names those that it adds:
one whose module is deleted is not there, and the others report what they did before.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from consistency import plugins
from consistency.comparison import findings, kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder
from consistency.comparison.findings.remark import with_remarks
from consistency.comparison.result import Finding, TensorComparison, in_order, rows_of
from consistency.numerics import words

T = TypeVar("T")


def collect(evidence: ComparisonEvidence) -> tuple[Finding, ...]:
    """Return everything to act on, most severe first.

    Parameters
    ----------
    evidence : ComparisonEvidence
        Without `unclaimed` and `findings`, which are filled here.
    """
    entries = in_their_order()
    unclaimed = evidence.tensors
    for entry in entries:
        unclaimed = entry.without_own(evidence, unclaimed)
    collected: list[Finding] = []
    for _, phase_entries in itertools.groupby(entries, key=lambda entry: entry.finder.phase):
        # a finder reads the findings of earlier phases, and none of its own phase
        phase_evidence = replace(evidence, unclaimed=unclaimed, findings=tuple(collected))
        for entry in phase_entries:
            collected += entry.find(phase_evidence)
    return in_order(with_remarks(finding, evidence) for finding in collected)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A finder, and where it comes from."""

    finder: Finder
    is_own: bool  # whether this distribution declares it, so that its errors are raised

    def find(self, evidence: ComparisonEvidence) -> tuple[Finding, ...]:
        def find() -> tuple[Finding, ...]:
            # put in order here, so that an object that is no finding, or has an unknown severity, fails in its finder
            findings_in_order = in_order(self.finder.find(evidence))
            _check_kinds(findings_in_order, evidence)
            return findings_in_order

        return self._attempt(find, ())

    def without_own(
        self, evidence: ComparisonEvidence, tensors: Sequence[TensorComparison]
    ) -> Sequence[TensorComparison]:
        """Return tensors without the rows that this finder reports alone."""
        without_own = self.finder.without_own
        if without_own is None:
            return tensors
        return self._attempt(lambda: without_own(evidence, tensors), tensors)

    def _attempt(self, call: Callable[[], T], instead: T) -> T:
        """Return the result of a call of the finder.

        A finder of another distribution may raise anything, and costs its own findings alone: `instead` is returned.
        """
        try:
            return call()
        except Exception as error:
            if self.is_own:
                raise
            plugins.note_failure(f"the finder {self.finder.name}", error)
            return instead


def _check_kinds(reported: tuple[Finding, ...], evidence: ComparisonEvidence) -> None:
    """Check that the kinds of findings are declared; a kind may also be a word of a row in the capture.

    Raises
    ------
    ValueError
        A kind is not declared.
    """
    unknown = {str(finding.kind) for finding in reported}.difference(kinds.declared(), words.declared())
    # all rows are gone through only where it is needed
    if unknown:
        unknown -= kinds.known() | {str(row.word or row.status) for _, row in rows_of(evidence.tensors)}
    if unknown:
        raise ValueError(f"no kind of findings is declared as {', '.join(sorted(unknown))}")


def in_their_order() -> list[_Entry]:
    """Return all finders in the order in which they are called.

    Of finders with one place, those of this package come first.
    """
    entries = [_Entry(finder=finder, is_own=True) for finder in of_this_package()]
    for reference, finder in plugins.offered("finders"):
        if isinstance(finder, Finder):
            entries.append(_Entry(finder=finder, is_own=plugins.is_own(reference)))
            continue
        # this distribution's own mistake is raised, another one's is noted
        error = TypeError(f"not a {Finder.__module__}.Finder, but {type(finder).__name__}")
        if plugins.is_own(reference):
            raise error
        plugins.note_failure(f"the finder {reference}", error)
    return sorted(entries, key=lambda entry: entry.finder.place)


def of_this_package() -> Iterator[Finder]:
    """Yield the finders that modules of this folder declare, and the module `findings` of a stage's folder."""
    names = [module.name for module in pkgutil.iter_modules(findings.__path__, f"{findings.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    for module in (*modules, *plugins.modules_of("stages", "findings")):
        declared: tuple[Finder, ...] = getattr(module, "FINDERS", ())
        yield from declared
