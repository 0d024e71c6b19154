"""Measure the memory that merging one layer allocates, and its limit.

PEFT's merge of a plain LoRA has two parts. The first computes the delta, `(B @ A) * scaling`: at its peak the product
and the scaled product coexist, two copies, however the second part is written. The second adds it:
`weight.data += delta` needs nothing besides the delta, while `weight.data = weight.data + delta` makes a new weight
besides the old one and the delta (huggingface/peft#1939, #1944). In the overall peak such a third copy hides behind the
first part's two, so the parts are measured separately, split by a mark that is set when `get_delta_weight` returns.

The limit of the second part is not derived from a table of dtypes and kernels, because an in-place sum of two dtypes
makes temporaries on some devices: the frugal merge is run on the same weight and delta, and measured in the same way. A
copy is one weight or more, so half a weight of slack is more than an allocator's rounding; two bias sizes are added for
what a merge does to the bias. Memory kept after the merge is compared with the frugal merge too: a new weight shows
there even where temporaries are larger (a bfloat16 weight and a float32 delta on the CPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from consistency.numerics.rules import ratio
from consistency.worker.memory.peak import Mark, PeakMeter, Peaks
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import restored, weight_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePeak:
    """Bytes that a merge of one layer allocated: `before_mark` in computing the delta, `after_mark` in adding it.

    Attributes
    ----------
    seen : Peaks
        The bytes measured.
    allowed : Peaks or None
        The limits; None where none is derived for this method's merge.
    """

    seen: Peaks
    allowed: Peaks | None

    @property
    def share(self) -> float | None:
        """The larger ratio of measured to allowed bytes: of adding the delta, and of what stays allocated after it."""
        if self.allowed is None:
            return None
        adding = ratio(self.seen.after_mark, self.allowed.after_mark)
        return max(adding, ratio(max(0, self.seen.kept), self.allowed.kept))


def measure_merge(layer: Any, meter: PeakMeter, *, safe: bool) -> MergePeak:
    """Merge one layer twice and measure the second time: the first fills workspaces and caches that stay.

    The layer is left as it was, to the bit.
    """

    def merge(mark: Mark) -> None:
        with _marking_delta(layer, mark):
            layer.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])

    for _ in range(2):
        with restored(layer):
            seen = meter.measure(merge)
    allowed = _allowed(layer, meter, safe=safe) if is_plain(layer) else None
    return MergePeak(seen=seen, allowed=allowed)


def is_plain(layer: Any) -> bool:
    """Report whether a layer's merge only adds a computed delta: LoRA without DoRA and other variants."""
    from peft.tuners.lora import layer as lora

    # subclasses in other modules of PEFT merge in ways of their own
    is_of_lora = type(layer).__module__ == lora.__name__
    is_known = isinstance(layer, (lora.Linear, lora.Embedding, lora._ConvNd))
    return is_of_lora and is_known and not getattr(layer, "lora_variant", None)


@contextmanager
def _marking_delta(layer: Any, mark: Mark) -> Iterator[None]:
    """Set the mark whenever the layer has computed its delta."""
    real = getattr(layer, "get_delta_weight", None)
    if real is None:
        yield
        return

    def get_delta_weight(*args: Any, **kwargs: Any) -> Any:
        delta = real(*args, **kwargs)
        mark()
        return delta

    with mock.patch.object(layer, "get_delta_weight", get_delta_weight):
        yield


def _allowed(layer: Any, meter: PeakMeter, *, safe: bool) -> Peaks:
    """Return the limits of a plain LoRA's merge: the peaks of a frugal merge, with slack."""
    weight = weight_of(layer)
    bias = getattr(layer.get_base_layer(), "bias", None)
    bias_bytes = 0 if bias is None else bias.nbytes
    slack = weight.nbytes // 2 + 2 * bias_bytes
    frugal = []
    for cast in (False, True):  # PEFT casts the delta before some additions, and leaves it to the sum in others
        with restored(layer):
            frugal.append(meter.measure(partial(_frugal_merge, layer, safe=safe, cast=cast)))
    return Peaks(
        before_mark=max(peaks.before_mark for peaks in frugal),
        after_mark=max(peaks.after_mark for peaks in frugal) + slack,
        kept=max(0, *(peaks.kept for peaks in frugal)) + slack,
    )


def _frugal_merge(layer: Any, mark: Mark, *, safe: bool, cast: bool) -> None:
    """Merge as `peft.tuners.lora.layer` does where it is frugal: one delta, and for a safe merge one new weight."""
    weight = weight_of(layer)
    merged = weight.clone() if safe else weight
    delta = layer.get_delta_weight(ADAPTER_NAME)
    mark()
    merged += delta.to(merged.dtype) if cast else delta
    if safe:
        bool(torch.isfinite(merged).all())
        layer.get_base_layer().weight.data = merged
