"""The texts that devices write, on the page of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.report.page.section import PageSection, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTexts:
    """The texts that devices write after a prompt.

    Attributes
    ----------
    texts : tuple
        For each text: the tokens before the parting, the one at which it parts, and the tokens after it; and the
        workers that wrote it.
    near : tuple of float
        For each step, what rounding may do to the gap of the two largest logits, as a fraction of the gap.
    """

    prompt: str
    texts: tuple[tuple[tuple[str, str, str], list[str]], ...]
    near: tuple[float, ...]


def texts(tensors: Sequence[TensorComparison]) -> list[PromptTexts]:
    """Return the texts of a run, by prompt; rows whose evidence has another form are left out."""
    prompts = []
    for tensor in tensors:
        outcomes = [outcome for outcome in tensor.outcomes if isinstance(outcome.evidence.get("written"), list)]
        if not outcomes:
            continue
        near = tuple(fraction or 0.0 for fraction in numbers(outcomes[0].evidence, "near"))
        workers_by_text = group_by_key(_texts_and_workers(outcomes))
        prompts.append(PromptTexts(prompt=tensor.layer, texts=tuple(workers_by_text.items()), near=near))
    return prompts


def _texts_and_workers(outcomes: Sequence[Outcome]) -> Iterator[tuple[tuple[str, str, str], str]]:
    for outcome in outcomes:
        text = _split_at_parting(outcome)
        for worker in outcome.workers:
            yield text, worker


def _split_at_parting(outcome: Outcome) -> tuple[str, str, str]:
    """Return the text before the token at which it parts, that token, and the text after it."""
    pieces = [str(piece) for piece in outcome.evidence["written"]]
    parting = outcome.evidence.get("token")
    if not isinstance(parting, int):
        parting = len(pieces)
    return "".join(pieces[:parting]), "".join(pieces[parting : parting + 1]), "".join(pieces[parting + 1 :])


def _values(comparison: Comparison) -> dict[str, Any]:
    prompts = texts(comparison.tensors)
    return {"texts": prompts} if prompts else {}


SECTION = PageSection(package=__package__, template="texts.html", values=_values)
