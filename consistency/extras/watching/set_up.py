"""Check 7: mistakes of set-up that look like numbers, from the first step on.

What is asked of the first steps: whether the ranks see the same batch, whether a trained parameter is in the optimizer,
gets a gradient and changes, whether micro-batches are weighed by their tokens, whether an adapter that is resumed was
loaded again, and whether a tensor keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from consistency.capture.names import split_name
from consistency.capture.wording import counted, layers_text
from consistency.errors import first_line
from consistency.extras.watching.agreement import has_digest, local_part_of
from consistency.extras.watching.kinds import NOT_RELOADED, NOT_TRAINED, SAME_BATCH, UNEQUAL_WEIGHTS
from consistency.extras.watching.micro_batch import MicroBatch, WatchedModel, buffers_kept
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of

_IGNORED_LABEL = -100
"""Label that transformers' losses leave out."""

_MOST_WEIGHED = 4096
"""Elements of a gradient by which the weight of a micro-batch is told."""

_WEIGHT_DIFFERENCE = 0.01
"""Relative difference of two weights from which a step's weights are told apart: rounding makes 10⁻⁵ and less."""


def check_batches(recent: Sequence[str], talk: RankTalk, *, shares_batches: bool) -> CheckOutcome:
    """Compare the batches of all ranks, in several steps: one batch may be the same by chance.

    Parameters
    ----------
    recent : sequence of str
        Digest of this rank's batch in the last few steps.
    """
    outcome = CheckOutcome(check="ranks see other batches")
    if talk.world == 1 or shares_batches:
        outcome.not_checked = "one rank" if talk.world == 1 else "ranks that hold parts of one model share a batch"
        return outcome
    by_rank = [tuple(digests) for digests in talk.gather(list(recent))]
    outcome.figures["steps"] = len(recent)
    if len(set(recent)) < 2:
        outcome.not_checked = "fewer than two different batches were seen"
        return outcome
    alike = [rank for rank, digests in enumerate(by_rank) if by_rank.count(digests) > 1]
    if alike and talk.rank == 0:
        outcome.discoveries.append(
            Discovery(
                kind=SAME_BATCH,
                message=f"{rank_names(alike)} got the same batch in each of the last {len(recent)} steps: the work of "
                f"{len(alike)} is that of {len({by_rank[rank] for rank in alike})}",
                ranks=tuple(alike),
                next="give the loader a DistributedSampler, or let accelerate prepare it; shuffle with a seed that all "
                "ranks share, and take every world-th sample",
            )
        )
    return outcome


@dataclass(slots=True)
class Trained:
    """The trainable parameters: their bits at the start of the training, and which of them have had a gradient."""

    start: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    first_gradient: dict[str, int] = field(default_factory=dict)
    """Number of the first step in which a parameter had a gradient that is not zero, and a learning rate above zero."""
    reached: set[str] = field(default_factory=set)
    """Parameters that had a gradient, be it zero."""
    steps: int = 0

    def begin(self, watched: WatchedModel) -> None:
        """Note bits and dtypes."""
        self.start = {
            name: digest(tensor.detach()).value
            for name, tensor in _local(watched.trainable()).items()
            if has_digest(tensor)
        }
        self.dtypes = {name: tensor.dtype for name, tensor in watched.parameters().items()}

    def note_step(self, watched: WatchedModel, optimizer: torch.optim.Optimizer) -> None:
        """Note which parameters have a gradient that is not zero and a rate above zero, before a step."""
        self.steps += 1
        rates = {id(p): group.get("lr", 1.0) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in watched.trainable().items():
            if parameter.grad is not None:
                self.reached.add(name)
            if name in self.first_gradient or parameter.grad is None or not float(rates.get(id(parameter), 0.0)):
                continue
            if bool(_dense(local_part_of(parameter.grad)[0]).any()):
                self.first_gradient[name] = self.steps

    def check(self, watched: WatchedModel, optimizer: torch.optim.Optimizer, talk: RankTalk) -> CheckOutcome:
        """Name parameters that the optimizer has not, that got no gradient, or that did not change."""
        outcome = CheckOutcome(check="what is trained changes")
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trainable = watched.trainable()
        outcome.figures["trained"] = len(trainable)
        absent = [name for name, parameter in trainable.items() if id(parameter) not in held]
        without = [name for name in trainable if name not in self.reached and name not in absent]
        # a rank may hold no part of a tensor that is split
        by_rank = talk.gather(without)
        without = [name for name in without if all(name in names for names in by_rank)]
        still = [
            name
            for name, parameter in _local(trainable).items()
            # the gradient of this step has not been used yet: it may be the first, as of a LoRA that began at zero
            if name in self.start
            and self.first_gradient.get(name, self.steps) < self.steps
            and self.start.get(name) == digest(parameter.detach()).value
        ]
        if talk.rank:
            return outcome
        if absent and not watched.is_split:
            outcome.discoveries.append(_untrained(absent, "no parameter of the optimizer", _NOT_HELD))
        # all without one are a step that computed none, such as a skipped one
        if without and len(without) < len(trainable) and self.steps > 1:
            outcome.discoveries.append(_untrained(without, "without a gradient", _NO_GRADIENT))
        if still and self.steps > 1:
            outcome.discoveries.append(
                _untrained(still, f"unchanged after {self.steps - 1} steps, with gradients", _UNCHANGED)
            )
        return outcome

    def check_dtypes(self, watched: WatchedModel, talk: RankTalk) -> CheckOutcome:
        """Name parameters whose dtype is another than at the start."""
        outcome = CheckOutcome(check="dtypes stay")
        changed = [
            (name, self.dtypes[name], parameter.dtype)
            for name, parameter in watched.parameters().items()
            if name in self.dtypes and parameter.dtype != self.dtypes[name]
        ]
        if changed:
            name, before, now = changed[0]
            outcome.discoveries.append(
                Discovery(
                    kind=words.DTYPE,
                    message=f"{counted(len(changed), 'parameter')} changed dtype on {rank_names([talk.rank])}: {name} "
                    f"from {name_of(before)} to {name_of(now)}",
                    ranks=(talk.rank,),
                    tensors=tuple(split_name(name) for name, _, _ in changed),
                    next="look for .to(), .half() or .bfloat16() on the model after the optimizer was made",
                )
            )
        return outcome


_NOT_HELD = "make the optimizer after the adapter is added, and give it all parameters that require a gradient"
_NO_GRADIENT = "freeze them, or find out why the loss does not depend on them; a reentrant checkpoint needs "
_NO_GRADIENT += "model.enable_input_require_grads()"
_UNCHANGED = "the updates are smaller than half a unit of the dtype: train in float32, or raise the learning rate"


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient, which an embedding may give as a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _untrained(names: Sequence[str], why: str, todo: str) -> Discovery:
    places = [split_name(name) for name in names]
    layers = layers_text([layer for layer, _ in places])
    return Discovery(
        kind=NOT_TRAINED,
        severity="warning",
        message=f"{counted(len(names), 'parameter')} to be trained, {names[0]} first ({layers}): {why}",
        tensors=tuple(places),
        next=todo,
    )


def _local(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: local_part_of(tensor)[0] for name, tensor in tensors.items()}


def check_reloaded(watched: WatchedModel, folder: Path | None, talk: RankTalk) -> CheckOutcome:
    """Compare the adapter of a checkpoint, from which a training goes on, with the adapter in the model."""
    outcome = CheckOutcome(check="the adapter was loaded again")
    if folder is None:
        outcome.not_checked = "the training does not go on from a checkpoint"
        return outcome
    file = folder / "adapter_model.safetensors"
    if watched.is_split or not file.is_file():
        outcome.not_checked = "the model is split over the ranks" if watched.is_split else f"no {file}"
        return outcome
    try:
        differing, compared = _differing_from_file(watched.model, file)
    except Exception as error:  # a file of another method, or a damaged one
        outcome.not_checked = f"the adapter cannot be compared: {first_line(error)}"
        return outcome
    outcome.figures["tensors"] = compared
    if differing:
        differing = [watched.own_name(name) for name in differing]
        places = tuple(split_name(name) for name in differing)
        outcome.discoveries.append(
            Discovery(
                kind=NOT_RELOADED,
                message=f"{len(differing)} of {counted(compared, 'tensor')} of the adapter in {folder} are not in the "
                f"model of {rank_names([talk.rank])} that goes on from it: {differing[0]} first",
                ranks=(talk.rank,),
                tensors=places,
                next="load it by PeftModel.from_pretrained(base, checkpoint, is_trainable=True), or by "
                "trainer.train(resume_from_checkpoint=checkpoint)",
            )
        )
    return outcome


def _differing_from_file(model: Any, file: Path) -> tuple[list[str], int]:
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    held = get_peft_model_state_dict(model)
    differing = []
    with safe_open(str(file), framework="pt") as stored:
        names = list(stored.keys())
        for name in names:
            tensor = held.get(name)
            if tensor is None:
                differing.append(name)
                continue
            # a model may hold the adapter in another dtype, which the file is cast to
            wanted = stored.get_tensor(name).to(tensor.dtype)
            if digest(tensor.detach().cpu()).value != digest(wanted).value:
                differing.append(name)
    return differing, len(names)


def check_weights(watched: WatchedModel, batches: Sequence[MicroBatch], parts: Sequence[torch.Tensor]) -> CheckOutcome:
    """Tell how a step weighs its micro-batches: by their tokens, or all alike.

    Parameters
    ----------
    parts : sequence of torch.Tensor
        What each micro-batch gave the gradient of one tensor, in float64.
    """
    outcome = CheckOutcome(check="micro-batches are weighed by tokens")
    tokens = [_label_tokens(batch) for batch in batches]
    outcome.not_checked = _why_not_weighed(watched, tokens, parts)
    if outcome.not_checked:
        return outcome
    try:
        means = [_mean_gradient(watched, batch, len(part)) for batch, part in zip(batches, parts, strict=True)]
    except Exception as error:  # model code may raise anything, and the training is to go on
        outcome.not_checked = f"the mean loss cannot be computed: {first_line(error)}"
        return outcome
    weights = [_fitted(part, mean) for part, mean in zip(parts, means, strict=True)]
    if any(weight is None for weight in weights):
        outcome.not_checked = "the gradient is not that of a mean over tokens"
        return outcome
    known = [float(weight) for weight in weights if weight is not None]
    per_token = [weight / count for weight, count in zip(known, tokens, strict=True) if count]
    outcome.figures |= {"tokens": tokens, "weights": known}
    if _spread(per_token) > _WEIGHT_DIFFERENCE and _spread(known) < _WEIGHT_DIFFERENCE:
        sizes = ", ".join(map(str, tokens))
        outcome.discoveries.append(
            Discovery(
                kind=UNEQUAL_WEIGHTS,
                message=f"micro-batches of {sizes} label tokens weigh the same in a step: a token of the shortest "
                f"counts {max(tokens) / min(tokens):.3g} times one of the longest, unlike in one large batch",
                next="divide the sum of losses by the label tokens of all micro-batches (transformers' Trainer does "
                "with a model that takes num_items_in_batch)",
                severity="warning",
            )
        )
    return outcome


def _why_not_weighed(watched: WatchedModel, tokens: Sequence[int], parts: Sequence[torch.Tensor]) -> str:
    if len(tokens) < 2:
        return "one micro-batch a step"
    if watched.is_split:
        return "the model is split over the ranks"
    if not all(tokens) or len(parts) != len(tokens):
        return "the batches have no labels that count"
    if _spread(tokens) <= _WEIGHT_DIFFERENCE:
        return "the micro-batches have equally many label tokens"
    return ""


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(abs(max(values)), 1e-300)


def _label_tokens(batch: MicroBatch) -> int:
    """Return how many labels of a batch count in a causal model's loss; 0 where it has none."""
    labels = batch.kwargs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return 0
    return int((labels[:, 1:] != _IGNORED_LABEL).sum())


def _mean_gradient(watched: WatchedModel, batch: MicroBatch, elements: int) -> torch.Tensor:
    """Return the gradient of the mean loss of a micro-batch, in the tensor by which weights are told."""
    kwargs = {name: value for name, value in batch.kwargs.items() if name != "num_items_in_batch"}
    alone = MicroBatch(args=batch.args, kwargs=kwargs, generators=batch.generators, autocast=batch.autocast)
    parameter = weighed_parameter(watched)
    assert parameter is not None
    with buffers_kept(watched.model), alone.conditions(watched.device):
        loss = watched.model(*alone.args, **alone.kwargs).loss
        (gradient,) = torch.autograd.grad(loss, [parameter])
    return first_elements(gradient)[:elements]


def weighed_parameter(watched: WatchedModel) -> torch.nn.Parameter | None:
    """Return the parameter by whose gradient weights are told: the last trained one, whose gradient is not zero."""
    trainable = list(watched.trainable().values())
    return trainable[-1] if trainable else None


def first_elements(gradient: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a gradient in float64, on the CPU."""
    return gradient.detach().to_dense().reshape(-1)[:_MOST_WEIGHED].to("cpu", torch.float64)


def _fitted(part: torch.Tensor, mean: torch.Tensor) -> float | None:
    """Return the number by which a gradient is multiplied; None where it is not a multiple of it."""
    square = float(mean @ mean)
    if not square:
        return None
    weight = float(part @ mean) / square
    is_multiple = float((part - weight * mean).norm()) < _WEIGHT_DIFFERENCE * float(part.norm())
    return weight if is_multiple else None
