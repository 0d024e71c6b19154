"""The weights that nobody trains, as the library gathers them for a pass: each has to be what the ranks hold.

They are most of what is gathered, and the first gather of a training moves them alone. Of a wrong one, the rows that
differ tell which rank's part arrived wrong.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from consistency.capture.names import module_place, split_name
from consistency.capture.wording import some
from consistency.extras.training.parts_judging import GATHERED
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.extras.training.ranks.parts import RankPart, part_of
from consistency.extras.training.shards.spec import SHARDS
from consistency.numerics.diagnosis_moved import diagnose_moved
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.worker.context import Context


class FrozenGathered:
    """The parameters that nobody trains, and for each the first gather that gave other values.

    Parameters
    ----------
    model : torch.nn.Module
        The sharded model.
    trained : collection of str
        Names of the parameters that are trained.
    """

    def __init__(self, context: Context, ranks: JoinedGroup, model: torch.nn.Module, trained: Collection[str]) -> None:
        self._context = context
        self._ranks = ranks
        whole = dict(context.model.named_parameters())
        self._expected = {name: tensor.detach() for name, tensor in whole.items() if name not in trained}
        self._digests: dict[str, str] = {}
        self._parts: dict[str, list[RankPart]] = {}
        for name, parameter in model.named_parameters():
            if name in self._expected:
                self._parts[name] = [
                    part_of(parameter, rank=number, world=ranks.world) for number in range(ranks.world)
                ]
        self._wrong: dict[str, tuple[int, torch.Tensor]] = {}
        """The step, and what was gathered, by the name of the parameter."""

    def see(self, step: int, name: str, gathered: torch.Tensor) -> None:
        """Compare a parameter that was gathered for a step with what the ranks hold."""
        expected = self._expected.get(name)
        if expected is None or name in self._wrong or name not in self._parts:
            return
        if name not in self._digests:
            self._digests[name] = digest(expected).value
        if digest(gathered).value != self._digests[name]:
            self._wrong[name] = step, gathered.to("cpu")

    def record(self) -> bool:
        """Record every parameter that was gathered wrong on this rank; return whether none was."""
        for name, (step, gathered) in self._wrong.items():
            layer, tensor = split_name(name)
            expected = self._expected[name].to("cpu")
            senders = self._senders(name, gathered, expected)
            measured = measure(gathered, expected)
            diagnosis = diagnose_moved(gathered, expected, measured)
            self._context.record.fact(
                SHARDS,
                module_place(layer),
                f"{tensor}.{GATHERED}",
                status="outside",
                word=diagnosis.word,
                evidence={"wrong_elements": measured.mismatched, "step": step + 1, "sent_by": senders},
                reason=f"in step {step + 1} a gather of weights gave this rank other values than {some(senders)} holds",
            )
        return not self._wrong

    def _senders(self, name: str, gathered: torch.Tensor, expected: torch.Tensor) -> list[str]:
        """Return the ranks whose parts of a parameter arrived wrong."""
        senders = []
        for rank, part in zip(self._ranks.names, self._parts[name], strict=True):
            if not torch.equal(part.cut_from(gathered), part.cut_from(expected)):
                senders.append(rank)
        return senders
