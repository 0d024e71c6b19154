"""The texts that devices write, on the page of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.report.page.section import PageSection, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTexts:
    """What devices write after a prompt, and by step what rounding may do to the gap of the two largest logits.

    Of each text: the tokens before the parting, the one at which it parts, what follows, and its workers.
    """

    prompt: str
    texts: tuple[tuple[tuple[str, str, str], list[str]], ...]
    near: tuple[float, ...]  # as a share of the gap


def texts(tensors: Sequence[TensorComparison]) -> list[PromptTexts]:
    """Return the texts of a run, by prompt; what a capture has in another form is left out."""
    found = []
    for tensor in tensors:
        rows = [row for row in tensor.outcomes if isinstance(row.evidence.get("written"), list)]
        if rows:
            near = tuple(share or 0.0 for share in numbers(rows[0].evidence, "near"))
            alike = gathered((_parted(row), worker) for row in rows for worker in row.workers)
            found.append(PromptTexts(prompt=tensor.layer, texts=tuple(alike.items()), near=near))
    return found


def _parted(row: Outcome) -> tuple[str, str, str]:
    pieces, at = [str(one) for one in row.evidence["written"]], row.evidence.get("token")
    end = at if isinstance(at, int) else len(pieces)
    return "".join(pieces[:end]), "".join(pieces[end : end + 1]), "".join(pieces[end + 1 :])


def _values(comparison: Comparison) -> dict[str, Any]:
    found = texts(comparison.tensors)
    return {"texts": found} if found else {}


SECTION = PageSection(package=__package__, template="texts.html", values=_values)
