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
    """Number of tensors that were moved and checked."""
    devices: set[str] = field(default_factory=set)
    """Devices that they were moved to."""

    def move(self, name: str, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Move an input to a device, and check it there."""
        staged = tensor.to("cpu") if self.by_host else tensor
        moved = staged.to(device)
        self.look(name, tensor, moved, where="")
        return moved

    def look(self, name: str, before: Any, after: Any, *, where: str) -> None:
        """Compare tensors before and after a move, also inside containers.

        An input of the model is compared with its copy on the CPU.

        Parameters
        ----------
        where : str
            The module inside the model that the tensors were moved for, empty for the model itself.

        Raises
        ------
        ChangedInTransferError
            A tensor differs. All inputs of one mapping that differ are named in it.
        """
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            if before is not after:  # the same object: nothing moved
                self._compare(name, before, after, where)
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            self._look_in_mapping(before, after, where)
        elif isinstance(before, (tuple, list)) and isinstance(after, (tuple, list)):
            for item_before, item_after in zip(before, after, strict=False):
                self.look(name, item_before, item_after, where=where)

    def _look_in_mapping(self, before: Mapping[Any, Any], after: Mapping[Any, Any], where: str) -> None:
        changes = []
        for key in before:
            if key not in after:
                continue
            try:
                self.look(str(key), before[key], after[key], where=where)
            except ChangedInTransferError as change:
                changes.append((str(key), change))
        if not changes:
            return
        (_, first), *others = changes
        if others:
            names = [name for name, _ in others]
            first.sentence += f"; so have {', '.join(names)}"
            first.evidence["also"] = names
        raise first

    def _compare(self, name: str, before: torch.Tensor, after: torch.Tensor, where: str) -> None:
        """Count a move, and raise ChangedInTransferError if it changed the tensor.

        A tensor that is cast or reshaped on the way cannot be compared.
        """
        self.count += 1
        self.devices.add(str(after.device))
        if before.shape != after.shape or before.dtype != after.dtype or not before.numel():
            return
        if before.is_floating_point():
            if digest(before).value != digest(after).value:
                raise self._changed(CHANGED_ON_THE_WAY, name or "hidden states", before, after, where)
            return
        # inside the model a name may mean something else: a decoder calls its own ids `input_ids`
        model_input = None if where else self.given.get(name)
        sent = before
        if model_input is not None and (model_input.shape, model_input.dtype) == (before.shape, before.dtype):
            sent = model_input
        if not torch.equal(sent.to("cpu"), after.to("cpu")):
            word_of_name = {LABELS: LABELS_CHANGED, **dict.fromkeys((*TOKEN_IDS, _IDS), words.IDS_CHANGED)}
            word = word_of_name.get(name, CHANGED_ON_THE_WAY)
            raise self._changed(word, name or "integers", sent, after, where)

    def _changed(
        self, word: Word, name: str, before: torch.Tensor, after: torch.Tensor, where: str
    ) -> ChangedInTransferError:
        """Return the error about a tensor that changed, with its first wrong element."""
        sent, arrived = before.detach().to("cpu"), after.detach().to("cpu")
        differs = sent != arrived
        if sent.is_floating_point():
            differs &= ~(sent.isnan() & arrived.isnan())
        noun = {LABELS_CHANGED: "labels", words.IDS_CHANGED: "ids"}.get(word, name)
        staged = " through the host" if self.by_host else ""
        into = f", into {where}" if where else ""
        sentence = f"{noun} changed during transfer to device {after.device}{staged}{into}"
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
            was, now = sent[first].item(), arrived[first].item()
            was_text, now_text = _shown(was, now)
            sentence += f": {name}{list(first)} was {was_text}, is {now_text}"
            sentence += f"; {evidence['wrong']} of {sent.numel()} elements"
            evidence |= {"first": list(first), "was": was_text, "is": now_text}
        return ChangedInTransferError(word, sentence, evidence)


def _shown(was: float | int | bool | complex, now: float | int | bool | complex) -> tuple[str, str]:
    """Return two values that differ, with as many digits as tell them apart."""
    if not isinstance(was, float) or not isinstance(now, float):
        return str(was), str(now)
    short = f"{was:.6g}", f"{now:.6g}"
    return short if len(set(short)) > 1 else (repr(was), repr(now))


@contextmanager
def watched(model: torch.nn.Module, moves: Moves) -> Iterator[Moves]:
    """Check every move that accelerate and the loss make in the forward passes of a model."""
    import accelerate.hooks as module

    hook = module.AlignDevicesHook
    real_pre, real_post, real_send = hook.pre_forward, hook.post_forward, module.send_to_device
    names = {id(submodule): name for name, submodule in model.named_modules()}

    def pre_forward(self: Any, submodule: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved_args, moved_kwargs = real_pre(self, submodule, *args, **kwargs)
        where = names.get(id(submodule), "")
        # a table of embeddings takes its ids by position
        name = _IDS if isinstance(submodule, torch.nn.Embedding) else ""
        moves.look(name, args, moved_args, where=where)
        moves.look("", kwargs, moved_kwargs, where=where)
        return moved_args, moved_kwargs

    def post_forward(self: Any, submodule: torch.nn.Module, output: Any) -> Any:
        moved = real_post(self, submodule, output)
        moves.look("output", output, moved, where=f"what {names.get(id(submodule)) or 'the model'} returns")
        return moved

    def send_by_host(tensor: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return real_send(real_send(tensor, "cpu", *args, **kwargs), device, *args, **kwargs)

    hook.pre_forward, hook.post_forward = pre_forward, post_forward
    if moves.by_host:
        module.send_to_device = send_by_host
    try:
        with _watched_loss(model, moves):
            yield moves
    finally:
        hook.pre_forward, hook.post_forward, module.send_to_device = real_pre, real_post, real_send


def _are_on_two_devices(labels: Any, scores: Any) -> bool:
    are_tensors = isinstance(labels, torch.Tensor) and isinstance(scores, torch.Tensor)
    return are_tensors and labels.device != scores.device


@contextmanager
def _watched_loss(model: Any, moves: Moves) -> Iterator[None]:
    """Make the loss's own move of the labels, so that it can be checked; the loss then finds them on its device."""
    owner = base_of(model)
    if not isinstance(getattr(type(owner), "loss_function", None), property):  # not a model of transformers
        yield
        return
    real, kept = owner.loss_function, vars(owner).get("_loss_function")

    def loss(*args: Any, **kwargs: Any) -> Any:
        scores: Any = kwargs.get("logits", args[0] if args else None)
        labels: Any = kwargs.get(LABELS)
        if _are_on_two_devices(labels, scores):
            kwargs[LABELS] = moves.move(LABELS, labels, scores.device)
        elif len(args) > 1 and _are_on_two_devices(args[1], args[0]):  # logits and labels by position
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
