"""Name what a difference between a tensor and its reference looks like, with the evidence.

Rules are tried from the most to the least specific; `unknown` is an honest answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.numerics.digest import digest
from consistency.numerics.distance import Measure
from consistency.numerics.dtype import bit_patterns, real_view

FEW_ELEMENTS = 64
"""A memory or link fault flips single bits in a few words; more than this is another cause."""

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A word of the report's vocabulary and what it rests on."""

    word: str
    evidence: dict[str, Any] = field(default_factory=dict)


def diagnose_structure(actual: torch.Tensor, expected: torch.Tensor) -> Diagnosis | None:
    """Look at shape and dtype, before any value."""
    if actual.shape != expected.shape:
        return Diagnosis(word="shape", evidence={"got": list(actual.shape), "wanted": list(expected.shape)})
    if actual.dtype != expected.dtype:
        return Diagnosis(word="dtype", evidence={"got": str(actual.dtype), "wanted": str(expected.dtype)})
    return None


def diagnose_moved(
    actual: torch.Tensor, expected: torch.Tensor, found: Measure, *, others: Mapping[str, str] | None = None
) -> Diagnosis:
    """Name the difference of a tensor whose bytes were only moved.

    Parameters
    ----------
    actual, expected : torch.Tensor
        On the CPU, of equal shape and dtype. Where their bits are equal there is nothing to name: `unknown`.
    found : Measure
        Of the two.
    others : mapping of str to str, optional
        Name of every other tensor of the run by its digest, to recognise a swap.
    """
    a, e = real_view(actual), real_view(expected)
    x, y = bit_patterns(a), bit_patterns(e)
    differs = x != y
    if not bool(differs.any()):
        return Diagnosis(word="unknown")
    rules: tuple[Callable[[], Diagnosis | None], ...] = (
        lambda: _zeros(x, y),
        lambda: _swapped(actual, others or {}),
        lambda: _signed_zero(a, e, differs),
        lambda: _non_finite(a, e, differs),
        lambda: _permuted(actual, x, y),
        lambda: _rounded(a, e),
        lambda: _bit_flip(a, found),
        lambda: _wrong_scale(a, e),
        lambda: _block(differs, a.element_size()),
    )
    answers = (rule() for rule in rules)
    return next((answer for answer in answers if answer is not None), Diagnosis(word="unknown"))


def diagnose_computed(found: Measure) -> Diagnosis:
    """Name the difference of a computed tensor from its exact value."""
    if found.max_abs != found.max_abs or found.max_abs == float("inf"):
        return Diagnosis(word="non-finite", evidence={"at": list(found.worst_index or ())})
    if found.bound_ratio is not None and found.bound_ratio <= 1:
        return Diagnosis(word="accumulation-order")
    return Diagnosis(word="unknown")


def _zeros(x: torch.Tensor, y: torch.Tensor) -> Diagnosis | None:
    if bool(torch.any(x != 0)):
        return None
    return Diagnosis(word="zeros", evidence={"nonzero_in_reference": int(torch.count_nonzero(y))})


def _swapped(actual: torch.Tensor, others: Mapping[str, str]) -> Diagnosis | None:
    if not others:
        return None
    other = others.get(digest(actual).value)
    return None if other is None else Diagnosis(word="swapped", evidence={"holds": other})


def _signed_zero(a: torch.Tensor, e: torch.Tensor, differs: torch.Tensor) -> Diagnosis | None:
    if not a.dtype.is_floating_point or bool(torch.any(a[differs] != 0)) or bool(torch.any(e[differs] != 0)):
        return None
    return Diagnosis(word="signed-zero", evidence={"elements": int(torch.count_nonzero(differs))})


def _non_finite(a: torch.Tensor, e: torch.Tensor, differs: torch.Tensor) -> Diagnosis | None:
    if not a.dtype.is_floating_point:
        return None
    actual, expected = a[differs].to(torch.float64), e[differs].to(torch.float64)
    broken = ~torch.isfinite(actual) & torch.isfinite(expected)
    if not bool(broken.any()):
        return None
    one_bit = int(torch.count_nonzero(differs)) <= FEW_ELEMENTS and _flips_are_single(a, e, differs)
    if one_bit:
        return None  # a flipped exponent bit that lands on infinity is a flipped bit first
    evidence = {"nan": int(torch.isnan(actual).sum()), "inf": int(torch.isinf(actual).sum())}
    return Diagnosis(word="non-finite", evidence=evidence)


def _permuted(actual: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Diagnosis | None:
    if not torch.equal(torch.sort(x).values, torch.sort(y).values):
        return None
    evidence: dict[str, Any] = {"of": "elements"}
    if actual.dim() > 1:
        rows, wanted = x.view(actual.shape[0], -1), y.view(actual.shape[0], -1)
        moved = torch.nonzero(torch.any(rows != wanted, dim=1)).reshape(-1)
        if sorted(map(tuple, rows[moved].tolist())) == sorted(map(tuple, wanted[moved].tolist())):
            evidence = {"of": "rows", "rows": moved[:8].tolist(), "count": moved.numel()}
    return Diagnosis(word="permuted", evidence=evidence)


def _rounded(a: torch.Tensor, e: torch.Tensor) -> Diagnosis | None:
    if e.dtype not in (torch.float32, torch.float64):
        return None
    through: dict[tuple[str, str], Callable[[], torch.Tensor]] = {
        ("bf16", "nearest"): lambda: e.to(torch.bfloat16).to(e.dtype),
        ("fp16", "nearest"): lambda: e.to(torch.float16).to(e.dtype),
    }
    if e.dtype == torch.float32:
        bits = e.view(torch.int32)
        # of float32's 23 mantissa bits TF32 keeps 10 and drops 13, bfloat16 keeps 7 and drops 16
        through["tf32", "nearest"] = lambda: ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
        through["bf16", "truncated"] = lambda: (bits & ~0xFFFF).view(torch.float32)
        through["tf32", "truncated"] = lambda: (bits & ~0x1FFF).view(torch.float32)
    for (name, how), rounded in through.items():
        if torch.equal(rounded(), a):
            evidence: dict[str, Any] = {"rounding": how}
            # float16 has TF32's 10 mantissa bits: only numbers outside its exponent range tell the two apart
            if name == "fp16" and e.dtype == torch.float32 and torch.equal(through["tf32", "nearest"](), a):
                evidence["also"] = "rounded-to-tf32"
            return Diagnosis(word=f"rounded-to-{name}", evidence=evidence)
    return None


def _bit_flip(a: torch.Tensor, found: Measure) -> Diagnosis | None:
    if found.mismatched > FEW_ELEMENTS or sum(found.flipped_bits.values()) != found.mismatched:
        return None
    bits = sorted(found.flipped_bits)
    evidence: dict[str, Any] = {"bits": bits, "elements": found.mismatched, "index": list(found.worst_index or ())}
    if a.dtype.is_floating_point:
        evidence["fields"] = sorted({bit_field(a.dtype, b) for b in bits})
    return Diagnosis(word="bit-flip", evidence=evidence)


def bit_field(dtype: torch.dtype, bit: int) -> str:
    """Say whether a bit of a float is its `sign`, `exponent` or `mantissa`; 0 is the least significant."""
    width = torch.finfo(dtype).bits
    mantissa = round(-torch.log2(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64)).item())
    return "sign" if bit == width - 1 else "exponent" if bit >= mantissa else "mantissa"


def _flips_are_single(a: torch.Tensor, e: torch.Tensor, differs: torch.Tensor) -> bool:
    width = (1 << (8 * a.element_size())) - 1
    flips = torch.bitwise_xor(bit_patterns(a)[differs], bit_patterns(e)[differs]).tolist()
    return all((f & width).bit_count() == 1 for f in flips)


def _wrong_scale(a: torch.Tensor, e: torch.Tensor) -> Diagnosis | None:
    if not a.dtype.is_floating_point or a.element_size() == 1:
        return None
    x, y = a.to(torch.float64), e.to(torch.float64)
    used = (y != 0) & torch.isfinite(x) & torch.isfinite(y)
    if int(torch.count_nonzero(used)) < 2 or bool(torch.any(x[y == 0] != 0)):
        return None
    ratios = x[used] / y[used]
    ratio = float(torch.median(ratios))
    # a scaled copy is rounded once: each ratio is off by at most the unit roundoff, eps / 2, twice with a subnormal;
    # a ratio that is no further from 1 than that is noise in the last place, not a scale
    slack = 2 * torch.finfo(a.dtype).eps
    if not math.isfinite(ratio) or abs(ratio - 1) <= slack or bool(((ratios - ratio).abs() > slack * abs(ratio)).any()):
        return None
    return Diagnosis(word="wrong-scale", evidence={"ratio": ratio})


def _block(differs: torch.Tensor, size: int) -> Diagnosis | None:
    places = torch.nonzero(differs).reshape(-1)
    first, last = int(places[0]), int(places[-1])
    length = last - first + 1
    # random data of the same exponent range agrees in some elements by chance, seldom in one of ten
    if length < 2 or length == differs.numel() or places.numel() < 0.9 * length:
        return None
    offset, stop = first * size, (last + 1) * size
    return Diagnosis(
        word="block",
        evidence={
            "offset_bytes": offset,
            "length_bytes": stop - offset,
            "page_aligned": offset % PAGE_BYTES == 0 and (stop % PAGE_BYTES == 0 or stop == differs.numel() * size),
        },
    )
