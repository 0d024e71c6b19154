"""Compare every tensor that moves between the shards of a model, before and after the move.

accelerate moves a module's arguments to the module's device in `AlignDevicesHook.pre_forward`, and the model's output
back in `post_forward`; transformers' losses move the labels to the logits. Nothing else is replaced, and each
replacement calls the real function. The first tensor that a move has changed ends the forward pass there: an invalid id
would assert in the next kernel, and take the device's context with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.extras.peft_api.sharding.spec import CHANGED_ON_THE_WAY, LABELS_CHANGED
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.words import Word
from consistency.worker.model.id_checks import LABELS, TOKEN_IDS
from consistency.worker.model.running import base_of

_IDS = "ids"
"""Name of the positional argument of a table of embeddings."""


class ChangedInTransferError(Exception):
    """A tensor that differs between the two sides of a move."""

    def __init__(self, word: Word, sentence: str, evidence: dict[str, Any]) -> None:
        super().__init__(sentence)
        self.word = word
        self.sentence = sentence
        self.evidence = evidence

    def __str__(self) -> str:
        return self.sentence


@dataclass(slots=True, kw_only=True)
class Moves:
    """The moves of one forward pass."""

    given: Mapping[str, torch.Tensor]
    """The inputs on the CPU, as they were before any move."""
    by_host: bool = False
    """Whether every move is staged through the CPU."""
    count: int = 0
    """How many tensors were moved and checked."""
    devices: set[str] = field(default_factory=set)
    """Where they were moved to."""

    def move(self, name: str, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Move an input to a device, and check it there."""
        staged = tensor.to("cpu") if self.by_host else tensor
        moved = staged.to(device)
        self.look(name, tensor, moved, where="")
        return moved

    def look(self, name: str, before: Any, after: Any, *, where: str) -> None:
        """Compare what arrived with what was sent; for an input of the model, with the copy on the CPU.

        `where` is the module inside the model that it was moved for, empty for the model itself.
        """
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            if before is not after:  # the same object: nothing moved
                self._look_at(name, before, after, where)
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            changes = []
            for key in (key for key in before if key in after):
                try:
                    self.look(str(key), before[key], after[key], where=where)
                except ChangedInTransferError as change:
                    changes.append((str(key), change))
            if changes:
                first = changes[0][1]
                others = [name for name, _ in changes[1:]]
                if others:
                    first.sentence += f"; so have {', '.join(others)}"
                    first.evidence["also"] = others
                raise first
        elif isinstance(before, (tuple, list)) and isinstance(after, (tuple, list)):
            for one, other in zip(before, after, strict=False):
                self.look(name, one, other, where=where)

    def _look_at(self, name: str, before: torch.Tensor, after: torch.Tensor, where: str) -> None:
        self.count += 1
        self.devices.add(str(after.device))
        if before.shape != after.shape or before.dtype != after.dtype or not before.numel():
            return
        if before.is_floating_point():
            if digest(before).value != digest(after).value:
                raise self._changed(CHANGED_ON_THE_WAY, name or "hidden states", before, after, where)
            return
        # inside the model a name may mean something else: a decoder calls its own ids `input_ids`
        known = None if where else self.given.get(name)
        sent = before if known is None or known.shape != before.shape or known.dtype != before.dtype else known
        if not torch.equal(sent.to("cpu"), after.to("cpu")):
            kinds = {LABELS: LABELS_CHANGED, **dict.fromkeys((*TOKEN_IDS, _IDS), words.IDS_CHANGED)}
            raise self._changed(kinds.get(name, CHANGED_ON_THE_WAY), name or "integers", sent, after, where)

    def _changed(
        self, word: Word, name: str, before: torch.Tensor, after: torch.Tensor, where: str
    ) -> ChangedInTransferError:
        sent, came = before.detach().to("cpu"), after.detach().to("cpu")
        differs = sent != came
        if sent.is_floating_point():
            differs &= ~(sent.isnan() & came.isnan())
        what = {LABELS_CHANGED: "labels", words.IDS_CHANGED: "ids"}.get(word, name)
        staged = " through the host" if self.by_host else ""
        into = f", into {where}" if where else ""
        sentence = f"{what} changed during transfer to device {after.device}{staged}{into}"
        evidence: dict[str, Any] = {
            "input": name,
            "from": str(before.device),
            "to": str(after.device),
            "into": where,
            "wrong": int(differs.sum()),
            "elements": sent.numel(),
        }
        if evidence["wrong"]:  # else only signs of zeros or payloads of NaN differ
            first = tuple(int(i) for i in differs.nonzero()[0])
            was, now = sent[first].item(), came[first].item()
            sentence += f": {name}{list(first)} was {_shown(was)}, is {_shown(now)}"
            sentence += f"; {evidence['wrong']} of {sent.numel()} elements"
            evidence |= {"first": list(first), "was": _shown(was), "is": _shown(now)}
        return ChangedInTransferError(word, sentence, evidence)


def _shown(value: float | int | bool | complex) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@contextmanager
def watched(model: torch.nn.Module, moves: Moves) -> Iterator[Moves]:
    """Check every move that accelerate and the loss make in the forward passes of a model."""
    import accelerate.hooks as module

    hook = module.AlignDevicesHook
    pre, post, send = hook.pre_forward, hook.post_forward, module.send_to_device
    names = {id(part): name for name, part in model.named_modules()}

    def before(self: Any, part: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved_args, moved_kwargs = pre(self, part, *args, **kwargs)
        where = names.get(id(part), "")
        # a table of embeddings takes its ids by position
        name = _IDS if isinstance(part, torch.nn.Embedding) else ""
        moves.look(name, args, moved_args, where=where)
        moves.look("", kwargs, moved_kwargs, where=where)
        return moved_args, moved_kwargs

    def after(self: Any, part: torch.nn.Module, output: Any) -> Any:
        moved = post(self, part, output)
        moves.look("output", output, moved, where=f"what {names.get(id(part)) or 'the model'} returns")
        return moved

    def by_host(tensor: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return send(send(tensor, "cpu", *args, **kwargs), device, *args, **kwargs)

    hook.pre_forward, hook.post_forward = before, after
    if moves.by_host:
        module.send_to_device = by_host
    try:
        with _watched_loss(model, moves):
            yield moves
    finally:
        hook.pre_forward, hook.post_forward, module.send_to_device = pre, post, send


@contextmanager
def _watched_loss(model: Any, moves: Moves) -> Iterator[None]:
    """Make the loss's own move of the labels, so that it can be checked; the loss then finds them on its device."""
    owner = base_of(model)
    if not isinstance(getattr(type(owner), "loss_function", None), property):  # not a model of transformers
        yield
        return
    real, kept = owner.loss_function, vars(owner).get("_loss_function")

    def loss(*args: Any, **kwargs: Any) -> Any:
        scores = kwargs.get("logits", args[0] if args else None)
        labels = kwargs.get(LABELS)
        if isinstance(labels, torch.Tensor) and isinstance(scores, torch.Tensor) and labels.device != scores.device:
            kwargs[LABELS] = moves.move(LABELS, labels, scores.device)
        elif len(args) > 1 and all(isinstance(a, torch.Tensor) for a in args[:2]) and args[1].device != args[0].device:
            args = (args[0], moves.move(LABELS, args[1], args[0].device), *args[2:])
        return real(*args, **kwargs)

    owner.loss_function = loss
    try:
        yield
    finally:
        if kept is None:
            vars(owner).pop("_loss_function", None)
        else:
            owner.loss_function = kept
