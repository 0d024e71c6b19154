"""Try what could explain outputs that are outside their rule, and name it where exactly one thing does.

An explanation is a pass of the model in float64 with a mistake in it. It holds if the engine's outputs are within the
rule of *that* pass, by the tolerance that they exceed beside the right one. Nothing is concluded from a resemblance.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.capture.names import ADAPTER_OFF
from consistency.capture.wording import some
from consistency.extras.serving.causes import CAUSE, PLACES, ROWS, SEVERAL, Cause
from consistency.extras.serving.engine_outputs.layer_search import by_block, by_kind, by_name, named, search
from consistency.extras.serving.engine_outputs.passes import (
    Change,
    Passes,
    Rounded,
    plain,
    saved_modules,
    scalable,
    scaled,
    scalings_of,
    tied,
    without,
)
from consistency.extras.serving.engine_outputs.rotary_positions import other_rotary_positions, rounded_frequencies
from consistency.extras.serving.engine_outputs.rounded_weights import FORMATS, rounded, rounded_layers
from consistency.numerics.rules import UNIT_ROUNDOFF, RoundingError, error_factor
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import MergeRefusedError, adapted_layers, has_quantized_weight, weight_of
from consistency.worker.model.running import base_of, matrix_elements

MOST_WORK = 1 << 35
"""Elements of the model's matrices times passes of a search: some 7 ns each for one sequence on one core, 4 minutes."""

_MOST_MERGED = 1 << 30
"""Elements of the model's matrices up to which merges are tried: they hold a second copy of the converted weights."""

_LARGEST_LAYER = 1 << 26
"""Elements of the largest layer that is merged to explain outputs: five arrays of it in float64 take 2.5 GiB."""

_ANOTHER_BASE = "weights in few bits and other rotary positions"
"""Said of changes of the base that were not tried, in a line of a finding."""

_NARROWER_MERGES = "merges in a narrower dtype"
"""Said of merges that were not tried, in a line of a finding."""

_NAMES = {
    "one": Cause.SCALING_ONE,
    "twice": Cause.TWICE,
    "rslora ignored": Cause.RSLORA_IGNORED,
    "rslora assumed": Cause.RSLORA_ASSUMED,
    "patterns ignored": Cause.PATTERNS_IGNORED,
}
_MERGED = {torch.bfloat16: Cause.MERGED_BFLOAT16, torch.float16: Cause.MERGED_FLOAT16}


Compute = Callable[[], torch.Tensor]
"""Computes float64 logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The outputs of an engine in one mode that are outside their rule.

    Attributes
    ----------
    wanted : torch.Tensor
        The engine's values in the rows that are outside, float64.
    view : callable
        Bring float64 logits of these rows into the form of the engine's values.
    ratio : callable
        Return the largest error of the engine's values from others over the bound, which a second argument adds to.
    rounding : RoundingError
        The rounding error that the bound is made from.
    passes, first : Passes
        Passes over these rows, and over the first of them alone.
    first_view, first_ratio, first_wanted
        `view`, `ratio` and `wanted` of that first row alone.
    on, off : torch.Tensor or None
        Float64 logits of these rows with and without the adapter; `off` is None where PEFT cannot disable it.
    """

    mode: str
    wanted: torch.Tensor
    view: Callable[[torch.Tensor], torch.Tensor]
    ratio: Callable[[torch.Tensor, float], float]
    rounding: RoundingError
    passes: Passes
    first: Passes
    first_view: Callable[[torch.Tensor], torch.Tensor]
    first_ratio: Callable[[torch.Tensor], float]
    first_wanted: torch.Tensor
    on: torch.Tensor
    off: torch.Tensor | None

    def ratio_of_logits(self, logits: torch.Tensor) -> float:
        """Return the largest error of the engine's values from float64 logits of these rows, over the bound."""
        return self.ratio(self.view(logits), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The mistakes that explain an engine's outputs.

    Attributes
    ----------
    fits : dict
        For each mistake, the names of the layers that it is about, empty where it is about all, and the ratio of error
        and bound with it. Several where they come to the same outputs.
    not_tried : tuple of str
        Mistakes that this model is too large or too different for.
    rows : tuple of int
        The rows that are outside; empty where all are.
    """

    fits: dict[Cause, tuple[str, float]] = field(default_factory=dict)
    not_tried: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def evidence(self) -> dict[str, Any]:
        """Return the answer as evidence of a row."""
        evidence: dict[str, Any] = {}
        if len(self.fits) == 1:
            ((cause, (layers, ratio)),) = self.fits.items()
            evidence |= {CAUSE: cause.value, "cause_bound_ratio": ratio}
            if layers:
                evidence[PLACES] = layers
        elif self.fits:
            evidence[SEVERAL] = [cause.value for cause in self.fits]
        if self.not_tried:
            evidence["not_tried"] = list(self.not_tried)
        if self.rows:
            evidence[ROWS] = list(self.rows)
        return evidence


def explain(question: Question) -> Answer:
    """Return what explains outputs that are outside their rule."""
    if not bool(torch.isfinite(question.wanted).all()):
        return Answer()  # no finite outputs are near
    if question.mode == ADAPTER_OFF:
        ratio = question.ratio_of_logits(question.on)
        return Answer(fits={Cause.LEFT_ON: ("", ratio)}) if ratio <= 1 else _explain_base_alone(question)
    fits: dict[Cause, tuple[str, float]] = {}
    not_tried = []
    off = question.off
    for cause, layers, compute in mistakes(question.passes, None if off is None else lambda: off):
        ratio = question.ratio_of_logits(compute())
        if ratio <= 1:
            fits[cause] = layers, ratio
    merges_that_fit, merges_not_tried = _explain_by_merges(question)
    fits |= merges_that_fit
    if merges_not_tried:
        not_tried.append(merges_not_tried)
    if not fits:
        fits, are_tried = _explain_by_another_base(question, nullcontext, question.on)
        if not are_tried:
            not_tried.append(_ANOTHER_BASE)
    if not fits:
        # some layers alone, only where no mistake with the whole adapter fits: a search takes many passes
        fits, is_searched = _explain_by_layers(question)
        if not is_searched:
            not_tried.append("layers without the adapter")
    return Answer(fits=fits, not_tried=tuple(not_tried))


def _explain_base_alone(question: Question) -> Answer:
    """Return what explains outputs of the base alone."""
    if question.off is None:
        return Answer()
    fits, are_tried = _explain_by_another_base(question, question.passes.model.disable_adapter, question.off)
    return Answer(fits=fits, not_tried=() if are_tried else (_ANOTHER_BASE,))


def _explain_by_another_base(
    question: Question, also: Callable[[], Change], right: torch.Tensor
) -> tuple[dict[Cause, tuple[str, float]], bool]:
    """Return the change of the base that explains the outputs best, and whether such changes were tried.

    Parameters
    ----------
    also : callable
        What is changed beside the base.
    right : torch.Tensor
        Float64 logits of the model as it is. A base that is hardly nearer than these explains nothing.
    """
    changes = list(_changes_of_the_base(question.passes.model))
    if len(changes) * matrix_elements(question.passes.model) > MOST_WORK:
        return {}, False

    @contextmanager
    def changed(change: Callable[[], Change]) -> Iterator[None]:
        with also(), change():
            yield

    found: dict[Cause, tuple[str, float]] = {}
    least = min(1.0, question.ratio_of_logits(right) / 2)
    for cause, about, change in changes:
        logits = question.passes.of(f"{question.mode}, {cause.value} {about}", functools.partial(changed, change))
        ratio = question.ratio_of_logits(logits)
        if ratio <= least:
            found, least = {cause: (about, ratio)}, ratio
    return found, True


def _changes_of_the_base(model: torch.nn.Module) -> Iterator[tuple[Cause, str, Callable[[], Change]]]:
    """Yield what an engine may have of the base that is not the base's, in words and as a change of the model."""
    for about, change in other_rotary_positions(base_of(model)):
        yield Cause.ROTARY, about, change
    for about, change in rounded_frequencies(base_of(model)):
        yield Cause.FREQUENCIES, about, change
    for weights in FORMATS if rounded_layers(model) else ():
        yield Cause.WEIGHTS, weights.name, functools.partial(rounded, model, weights)


def _explain_by_layers(question: Question) -> tuple[dict[Cause, tuple[str, float]], bool]:
    """Return what explains the outputs by some layers alone, and whether the search was small enough to be made.

    Blocks are tried first, as they are the fewest groups, then kinds of layers, then layers one by one.
    """
    model = question.passes.model
    layers = list(adapted_layers(model))
    for group in (by_block, by_kind, by_name):
        groups = group(layers)
        if len(groups) * matrix_elements(model) > MOST_WORK:
            return {}, False
        names, ratio = _without(question, groups)
        if ratio <= 1:
            return {Cause.LAYERS: (names, ratio)}, True
    layers_with_scaling = scalable(model)
    kinds = by_kind([(name, layer) for name, layer in layers if layer in layers_with_scaling])
    return _repeated(question, kinds), True


def mistakes(passes: Passes, off: Compute | None) -> Iterator[tuple[Cause, str, Compute]]:
    """Yield mistakes with the adapter as a whole: the cause, the layers that it is about, and what computes the logits.

    The layers are empty where it is about all of them. Each pass is in float64, and computed when it is asked for.

    Parameters
    ----------
    off : callable, optional
        Computes the logits without the adapter; None where PEFT cannot disable it.
    """
    model = passes.model
    if off is not None:
        yield Cause.IGNORED, "", off
    layers = scalable(model)
    if layers:
        for name, scalings in scalings_of(layers, model.peft_config[ADAPTER_NAME]).items():
            change = functools.partial(scaled, scalings, layers)
            yield _NAMES[name], "", functools.partial(passes.of, f"scaling, {name}", change)
    variants = [layer for layer in layers if ADAPTER_NAME in getattr(layer, "lora_variant", {})]
    if variants:
        yield Cause.DORA, "", functools.partial(passes.of, "plain", functools.partial(plain, variants))
    saved = saved_modules(model)
    if saved:
        change = functools.partial(without, [module for _, module in saved])
        names = some([_short(name) for name, _ in saved])
        yield Cause.SAVED_MODULES, names, functools.partial(passes.of, "saved modules", change)
    head_and_embeddings = _head_and_embeddings(base_of(model))
    if head_and_embeddings:
        change = functools.partial(tied, *head_and_embeddings)
        yield Cause.HEAD_TIED, "", functools.partial(passes.of, "the head tied", change)


def _head_and_embeddings(base: Any) -> tuple[Any, ...]:
    """Return the head and the embeddings of a model that has both, of one shape; else an empty tuple."""
    with suppress(AttributeError, NotImplementedError):  # of a model without them
        head, embeddings = base.get_output_embeddings(), base.get_input_embeddings()
        if head.weight.shape == embeddings.weight.shape:
            return head, embeddings
    return ()


def _explain_by_merges(question: Question) -> tuple[dict[Cause, tuple[str, float]], str]:
    """Return the merges in narrower dtypes that explain the outputs, and which merges are not tried, if any.

    None is named where PEFT refuses one of them: that it alone explains the outputs would not be known.
    """
    fits: dict[Cause, tuple[str, float]] = {}
    try:
        for cause, ways in merges(question.passes.model).items():
            ratio = min(_ratio_of_merge(question, way) for way in ways)
            if ratio <= 1:
                fits[cause] = "", ratio
    except MergeRefusedError:
        return {}, _NARROWER_MERGES
    return fits, no_merges(question.passes.model)


def no_merges(model: torch.nn.Module) -> str:
    """Return which merges are not tried; empty where all are."""
    layers = [layer for _, layer in adapted_layers(model)]
    if any(map(has_quantized_weight, layers)):
        return "merges into quantized weights"
    largest = max((weight_of(layer).numel() for layer in layers), default=0)
    if matrix_elements(model) > _MOST_MERGED or largest > _LARGEST_LAYER:
        return _NARROWER_MERGES
    return ""


def merges(model: torch.nn.Module) -> dict[Cause, list[Rounded]]:
    """Return the ways in which an engine may have merged the adapter in a dtype that is not wider than the model's.

    There are none for a quantized or a large model.
    """
    if no_merges(model):
        return {}
    dtypes = set[torch.dtype]()
    for _, layer in adapted_layers(model):
        dtypes |= {p.dtype for p in layer.get_base_layer().parameters()}
    widest = min((_unit_roundoff(dtype) for dtype in dtypes if dtype.is_floating_point), default=0.0)
    ways = {}
    for dtype, cause in _MERGED.items():
        if _unit_roundoff(dtype) < widest:
            continue
        ways[cause] = [Rounded(dtype=dtype), Rounded(dtype=dtype, delta_first=True)]
        if dtype not in dtypes:  # else the rest of the model has the dtype already
            ways[cause] += [
                Rounded(dtype=dtype, whole=True),
                Rounded(dtype=dtype, whole=True, base_first=True),
                Rounded(dtype=dtype, whole=True, base_first=True, delta_first=True),
            ]
    return ways


def _unit_roundoff(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF[str(dtype).removeprefix("torch.")]


def _ratio_of_merge(question: Question, way: Rounded) -> float:
    """Return the ratio of error and bound, where the bound has what the order of float32 sums may do to a merge."""
    merged = question.view(question.passes.merged(way))
    ratio = question.ratio(merged, 0.0)
    # a merge that is hardly nearer than the right outputs explains nothing, whatever the order of the sums
    if ratio <= 1 or not ratio < question.ratio_of_logits(question.on) / 2:
        return ratio
    shaken = question.view(question.passes.merged(replace(way, shaken=True)))
    moved = float((merged - shaken).abs().max())
    addition = error_factor(question.rounding.samples, question.rounding.drawn) * moved
    # a bound so wide that the right outputs would be explained too explains nothing
    if question.ratio(question.view(question.on), addition) <= 1:
        return ratio
    return question.ratio(merged, addition)


def _without(question: Question, groups: dict[str, list[Any]]) -> tuple[str, float]:
    """Search for groups of layers without adapter, and return their names with the ratio; infinite where none fit.

    The search is by the first row, and the answer is proved by all rows.
    """
    if len(groups) < 2:
        return "", float("inf")

    def change(names: frozenset[str]) -> Any:
        layers = [groups[name] for name in groups if name in names]
        return without(list(itertools.chain.from_iterable(layers)))

    def outputs(names: frozenset[str]) -> torch.Tensor:
        title = f"without {', '.join(sorted(names)) or 'nothing'}"
        return question.first_view(question.first.of(title, lambda: change(names)))

    left_out = search(question.first_wanted, groups, outputs, lambda values, _: question.first_ratio(values) <= 1)
    if left_out is None or len(left_out) == len(groups):  # all of them: the adapter is ignored, which was tried
        return "", float("inf")
    logits = question.passes.of(f"without {', '.join(sorted(left_out))}", lambda: change(left_out))
    return named([name for name in groups if name in left_out]), question.ratio_of_logits(logits)


def _repeated(question: Question, kinds: dict[str, list[Any]]) -> dict[Cause, tuple[str, float]]:
    """Return the kind of layers that adds its delta several times, as where each rank adds the whole of it."""
    for name, times in itertools.product(kinds, (2, 4, 8)):
        layers = kinds[name]
        scalings = {number: times * float(layer.scaling[ADAPTER_NAME]) for number, layer in enumerate(layers)}
        logits = question.passes.of(f"{name}, {times} times", functools.partial(scaled, scalings, layers))
        ratio = question.ratio_of_logits(logits)
        if ratio <= 1:
            return {Cause.KIND: (f"{name} ({times} times)", ratio)}
    return {}


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.")
