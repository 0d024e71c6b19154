"""Try what could explain outputs that are outside their rule, and name it where exactly one thing does.

An explanation is a pass of the model in float64 with a mistake in it. It holds if the engine's outputs are within the
rule of *that* pass, by the tolerance that they exceed beside the right one. Nothing is concluded from a resemblance.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.capture.names import ADAPTER_OFF
from consistency.capture.wording import some
from consistency.extras.serving.causes import CAUSE, PLACES, ROWS, SEVERAL, Cause
from consistency.extras.serving.engine_outputs.layer_search import by_block, by_kind, by_name, named, search
from consistency.extras.serving.engine_outputs.passes import (
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
from consistency.numerics.rules import UNIT_ROUNDOFF, RoundingError, error_factor
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import MergeRefusedError, adapted_layers, has_quantized_weight, weight_of
from consistency.worker.model.running import base_of, matrix_elements

_MOST_WORK = 1 << 35
"""Elements of the model's matrices times passes of a search: some 7 ns each for one sequence on one core, 4 minutes."""

_MOST_MERGED = 1 << 30
"""Elements of the model's matrices up to which merges are tried, which hold a second copy of what they convert."""

_LARGEST_LAYER = 1 << 26
"""Elements of the largest layer that is merged for it: five arrays of it in float64 take 2.5 GiB."""

_NAMES = {
    "one": Cause.SCALING_ONE,
    "twice": Cause.TWICE,
    "rslora ignored": Cause.RSLORA_IGNORED,
    "rslora assumed": Cause.RSLORA_ASSUMED,
    "patterns ignored": Cause.PATTERNS_IGNORED,
}
_MERGED = {torch.bfloat16: Cause.MERGED_BFLOAT16, torch.float16: Cause.MERGED_FLOAT16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The outputs of an engine in one mode that are outside their rule.

    Attributes
    ----------
    wanted : torch.Tensor
        The engine's values in the rows that are outside, float64.
    seen : callable
        Bring float64 logits of these rows into the form of the engine's values.
    share : callable
        Return the largest error of the engine's values from others over what is allowed, which a second argument adds
        to.
    rounding : RoundingError
        Behind what is allowed.
    passes, first : Passes
        Of these rows, and of the first of them alone.
    first_places : slice
        The places of that row among those of `wanted`.
    on, off : torch.Tensor or None
        Float64 logits of these rows with and without the adapter; `off` is None where PEFT cannot disable it.
    """

    mode: str
    wanted: torch.Tensor
    seen: Callable[[torch.Tensor], torch.Tensor]
    share: Callable[[torch.Tensor, float], float]
    rounding: RoundingError
    passes: Passes
    first: Passes
    first_seen: Callable[[torch.Tensor], torch.Tensor]
    first_share: Callable[[torch.Tensor], float]
    first_wanted: torch.Tensor
    on: torch.Tensor
    off: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What explains the outputs; several, where no one alone does, and what was not tried; `rows` are those outside."""

    fits: dict[Cause, tuple[str, float]] = field(default_factory=dict)
    not_tried: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def evidence(self) -> dict[str, Any]:
        """Return the answer as evidence of a row."""
        found: dict[str, Any] = {"not_tried": list(self.not_tried)} if self.not_tried else {}
        found |= {ROWS: list(self.rows)} if self.rows else {}
        if len(self.fits) == 1:
            ((cause, (places, share)),) = self.fits.items()
            return {CAUSE: cause.value, "cause_bound_ratio": share, **({PLACES: places} if places else {}), **found}
        return {SEVERAL: [cause.value for cause in self.fits], **found} if self.fits else found


def explain(question: Question) -> Answer:
    """Return what explains outputs that are outside their rule."""
    if not bool(torch.isfinite(question.wanted).all()):
        return Answer()  # no finite outputs are near
    if question.mode == ADAPTER_OFF:
        left_on = question.share(question.seen(question.on), 0.0)
        return Answer(fits={Cause.LEFT_ON: ("", left_on)} if left_on <= 1 else {})
    model = question.passes.model
    size = matrix_elements(model)
    fits: dict[Cause, tuple[str, float]] = {}
    not_tried = []
    for cause, places, logits in mistakes(question.passes, question.off):
        if (share := question.share(question.seen(logits), 0.0)) <= 1:
            fits[cause] = places, share
    fits |= {cause: ("", share) for cause, share in _merged(question) if share <= 1}
    if why := _no_merges(model):
        not_tried.append(why)
    if not fits:
        for groups in (by_block, by_kind, by_name):
            found = groups(list(adapted_layers(model)))
            if len(found) * size > _MOST_WORK:
                not_tried.append("layers without the adapter")
                break
            places, share = _without(question, found)
            if share <= 1:
                fits[Cause.LAYERS] = places, share
                break
        else:
            fits |= _repeated(question, by_kind([one for one in adapted_layers(model) if one[1] in scalable(model)]))
    return Answer(fits=fits, not_tried=tuple(not_tried))


def mistakes(passes: Passes, off: torch.Tensor | None) -> Iterator[tuple[Cause, str, torch.Tensor]]:
    """Yield mistakes with the adapter as a whole: what, where, and the float64 logits with it."""
    model = passes.model
    if off is not None:
        yield Cause.IGNORED, "", off
    layers = scalable(model)
    for name, scalings in scalings_of(layers, model.peft_config[ADAPTER_NAME]).items() if layers else ():
        yield _NAMES[name], "", passes.of(f"scaling, {name}", functools.partial(scaled, scalings, layers))
    variants = [layer for layer in layers if ADAPTER_NAME in getattr(layer, "lora_variant", {})]
    if variants:
        yield Cause.DORA, "", passes.of("plain", lambda: plain(variants))
    saved = saved_modules(model)
    if saved:
        logits = passes.of("saved modules", lambda: without([module for _, module in saved]))
        yield Cause.SAVED_MODULES, some([_short(name) for name, _ in saved]), logits
    if ends := _head_and_embeddings(base_of(model)):
        yield Cause.HEAD_TIED, "", passes.of("the head tied", lambda: tied(*ends))


def _head_and_embeddings(base: Any) -> tuple[Any, ...]:
    """Return the two where a model has both, of one shape."""
    with suppress(AttributeError, NotImplementedError):  # of a model without them
        ends = base.get_output_embeddings(), base.get_input_embeddings()
        return ends if ends[0].weight.shape == ends[1].weight.shape else ()
    return ()


def _merged(question: Question) -> Iterator[tuple[Cause, float]]:
    """Yield merges in narrower dtypes, each with its smallest share of the bound."""
    with suppress(MergeRefusedError):
        for cause, ways in merges(question.passes.model).items():
            yield cause, min(_share_of_merge(question, way) for way in ways)


def _no_merges(model: torch.nn.Module) -> str:
    """Return which merges are not tried."""
    layers = [layer for _, layer in adapted_layers(model)]
    if any(map(has_quantized_weight, layers)):
        return "merges into quantized weights"
    largest = max((weight_of(layer).numel() for layer in layers), default=0)
    return "" if matrix_elements(model) <= _MOST_MERGED and largest <= _LARGEST_LAYER else "merges in a narrower dtype"


def merges(model: torch.nn.Module) -> dict[Cause, list[Rounded]]:
    """Return how an engine may have merged the adapter in a dtype that is not wider than the model's.

    None is returned of a quantized or a large model.
    """
    if _no_merges(model):
        return {}
    own = {p.dtype for _, layer in adapted_layers(model) for p in layer.get_base_layer().parameters()}
    widest = min((UNIT_ROUNDOFF[str(one).removeprefix("torch.")] for one in own if one.is_floating_point), default=0.0)
    found = {}
    for dtype, cause in _MERGED.items():
        if UNIT_ROUNDOFF[str(dtype).removeprefix("torch.")] < widest:
            continue
        found[cause] = [Rounded(dtype=dtype), Rounded(dtype=dtype, delta_first=True)]
        if dtype not in own:
            found[cause] += [
                Rounded(dtype=dtype, whole=True),
                Rounded(dtype=dtype, whole=True, base_first=True),
                Rounded(dtype=dtype, whole=True, base_first=True, delta_first=True),
            ]
    return found


def _share_of_merge(question: Question, way: Rounded) -> float:
    """Return the share of the bound, with what the order of float32 sums may do to a merge added to the bound."""
    merged = question.seen(question.passes.merged(way))
    share = question.share(merged, 0.0)
    if share <= 1 or not share < question.share(question.seen(question.on), 0.0) / 2:
        return share  # what is hardly nearer than the right outputs explains nothing, whatever the order of the sums
    shaken = Rounded(
        dtype=way.dtype, base_first=way.base_first, delta_first=way.delta_first, whole=way.whole, shaken=True
    )
    other = question.seen(question.passes.merged(shaken))
    more = error_factor(question.rounding.samples, question.rounding.drawn) * float((merged - other).abs().max())
    if question.share(question.seen(question.on), more) <= 1:  # so wide that the right outputs would be explained too
        return share
    return question.share(merged, more)


def _without(question: Question, groups: dict[str, list[Any]]) -> tuple[str, float]:
    """Search for groups of layers without adapter by the first row, and prove the answer by all; return its share."""
    if len(groups) < 2:
        return "", float("inf")

    def change(names: frozenset[str]) -> Any:
        return without([layer for name in groups if name in names for layer in groups[name]])

    def outputs(names: frozenset[str]) -> torch.Tensor:
        name = f"without {', '.join(sorted(names)) or 'nothing'}"
        return question.first_seen(question.first.of(name, lambda: change(names)))

    found = search(question.first_wanted, groups, outputs, lambda logits: question.first_share(logits) <= 1)
    if found is None or len(found) == len(groups):
        return "", float("inf")
    logits = question.passes.of(f"without {', '.join(sorted(found))}", lambda: change(found))
    return named([name for name in groups if name in found]), question.share(question.seen(logits), 0.0)


def _repeated(question: Question, kinds: dict[str, list[Any]]) -> dict[Cause, tuple[str, float]]:
    """Return which kind of layers adds its delta several times, as where each rank adds the whole of it."""
    for name, times in itertools.product(kinds, (2, 4, 8)):
        scalings = {place: times * float(layer.scaling[ADAPTER_NAME]) for place, layer in enumerate(kinds[name])}
        logits = question.passes.of(f"{name}, {times} times", functools.partial(scaled, scalings, kinds[name]))
        if (share := question.share(question.seen(logits), 0.0)) <= 1:
            return {Cause.KIND: (f"{name} ({times} times)", share)}
    return {}


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.")
