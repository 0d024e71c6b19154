"""Check 6, the other part: the loss of one rank that leaves those of the others.

Ranks have other batches, so that their losses differ, and data that are sorted or few differ always. So a rank is
compared with itself: how often its loss was the highest, or the lowest, of all in the same step, between the last
two checks and between the two before. Where nothing has changed, both counts are drawn from the same steps, and the
hypergeometric distribution tells how likely they are, whatever the losses are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.extras.watching.kinds import LOSS_LEAVES
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names

_CHANCE = 1e-9
"""Chance of a healthy interval below which a rank has left the others: of a million checks one in a thousand."""


def loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output; None where it has none of one number."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach().reshape(())
    return None


@dataclass(frozen=True, slots=True)
class _Extremes:
    """Counts of the steps in which the loss of each rank was the highest of all ranks, and the lowest."""

    steps: int
    highest: tuple[int, ...]
    lowest: tuple[int, ...]


@dataclass(slots=True)
class LossByRank:
    """The losses of this rank since the last check, as tensors on its device, and what was counted before."""

    losses: list[torch.Tensor] = field(default_factory=list)
    _before: _Extremes | None = None

    def note(self, loss: Any) -> None:
        """Note the loss of a micro-batch, without waiting for the device."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach().reshape(()))

    def check(self, own_norm: float | None, talk: RankTalk, between: str) -> CheckOutcome:
        """Compare the losses of all ranks.

        Parameters
        ----------
        own_norm : float or None
            Norm of what this rank's own passes gave the gradient of one tensor, before it was added up.
        """
        outcome = CheckOutcome(check="losses of the ranks")
        losses = torch.stack(self.losses).double().cpu().tolist() if self.losses else []
        self.losses = []
        by_rank = talk.gather((losses, own_norm))
        losses_by_rank = [losses for losses, _ in by_rank]
        if talk.world == 1:
            outcome.not_checked = "one rank"
            return outcome
        if not losses_by_rank[0] or len({len(losses) for losses in losses_by_rank}) > 1:
            outcome.not_checked = "the model gives no loss; or the ranks have unequally many"
            return outcome
        means = [math.fsum(losses) / len(losses) for losses in losses_by_rank]
        outcome.figures["loss by rank"] = [_shown(mean) for mean in means]
        norms = [norm for _, norm in by_rank if norm is not None]
        if len(norms) == talk.world:
            outcome.figures["gradient norm by rank"] = [_shown(norm) for norm in norms]
        now, before = _extremes(losses_by_rank), self._before
        self._before = now
        if talk.rank == 0 and before is not None:
            outcome.discoveries = _that_left(before, now, means, between)
        return outcome


def _shown(value: float) -> float | str:
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


def _extremes(losses_by_rank: Sequence[Sequence[float]]) -> _Extremes:
    """Count the steps in which each rank has the highest and the lowest loss; NaN is higher than any number."""
    highest, lowest = [0] * len(losses_by_rank), [0] * len(losses_by_rank)
    for losses in zip(*losses_by_rank, strict=True):
        sizes = [math.inf if math.isnan(loss) else loss for loss in losses]
        for counts, extreme in ((highest, max(sizes)), (lowest, min(sizes))):
            if sizes.count(extreme) == 1:
                counts[sizes.index(extreme)] += 1
    return _Extremes(len(losses_by_rank[0]), tuple(highest), tuple(lowest))


def _that_left(before: _Extremes, now: _Extremes, means: Sequence[float], between: str) -> list[Discovery]:
    """Return a note for the rank whose loss has gone furthest from those of the others, where one has."""
    candidates = []
    for word, earlier, later in (("above", before.highest, now.highest), ("below", before.lowest, now.lowest)):
        for rank, (old, new) in enumerate(zip(earlier, later, strict=True)):
            candidates.append((chance_of_as_many(old, before.steps, new, now.steps), rank, word, old, new))
    chance, rank, word, old, new = min(candidates)
    if chance >= _CHANCE:
        return []
    # of two ranks, one that goes up is one of which the other goes down
    is_named = len(means) > 2
    others = "those of all others" if is_named else "that of the other"
    return [
        Discovery(
            kind=LOSS_LEAVES,
            severity="note",
            message=f"the loss of {rank_names([rank])} left {others}: {word} in {new} of {now.steps} passes, in {old} "
            f"of {before.steps} before; means by rank {', '.join(f'{mean:.4g}' for mean in means)}: {between}",
            ranks=(rank,) if is_named else (0, 1),
            next="look at the data that this rank reads from there on; where they are of the same kind, at its card",
        )
    ]


def chance_of_as_many(before: int, steps_before: int, now: int, steps: int) -> float:
    """Return the chance that of all marked steps at least so many are among the later ones.

    All orders of the steps are equally likely where nothing has changed: then the number is hypergeometric.
    """
    marked, total = before + now, steps_before + steps
    ways = sum(math.comb(steps, n) * math.comb(steps_before, marked - n) for n in range(now, min(marked, steps) + 1))
    return ways / math.comb(total, marked)
