"""Operation counts of a stage, in the units that `speed` measures, and their estimated time.

The constants were measured where those of `costs` were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from consistency.case.budget.speed import Speed

READ_BYTES = 2.0e10
"""Bytes per second that `Speed.read_bytes` gave there: `Work.memory_s` is scaled by it."""

WEIGHT_S = {"half": 0.32e-9, "float32": 0.74e-9, "float64": 1.6e-9}
"""Per element of a weight and product: reading it, for float64 widening it; 32 and 128 rows times 5632 x 2048."""

FLOP_SHARES = {"half": 0.9, "float32": 1.1, "float64": 1.2}
"""Of a product's operations per second to those of NumPy's small matrices, from the same products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Products with weights: elements of the weights, each counted as often as it is read, and operations."""

    weights: float = 0.0
    flop: float = 0.0

    def times(self, count: float) -> Products:
        return Products(weights=count * self.weights, flop=count * self.flop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a stage does.

    Attributes
    ----------
    fixed_s : float
        Seconds that no processor shortens.
    memory_s : float
        Seconds of moving bytes, on one core that reads `READ_BYTES` per second.
    native, float64 : Products
        In the model's dtype and in float64.
    """

    fixed_s: float = 0.0
    memory_s: float = 0.0
    native: Products = Products()
    float64: Products = Products()

    def seconds(self, speed: Speed, *, dtype: str, threads: int) -> float:
        """Return the time on this host's processor, whose threads share every part but the fixed one."""
        half = dtype in ("bfloat16", "float16") and speed.half_flop is not None
        native, rate = ("half", speed.half_flop or 0.0) if half else ("float32", speed.float32_flop)
        memory_s = self.memory_s + self.native.weights * WEIGHT_S[native] + self.float64.weights * WEIGHT_S["float64"]
        compute_s = self.native.flop / (FLOP_SHARES[native] * rate)
        compute_s += self.float64.flop / (FLOP_SHARES["float64"] * speed.float64_flop)
        return self.fixed_s + (memory_s * READ_BYTES / speed.read_bytes + compute_s) / max(1, threads)


def slower(speed: Speed, variant: str | None) -> Speed:
    """Return the speed of a kernel variant: AVX2 has vectors of half the width; SSE of a quarter, without FMA."""
    factor = {None: 1.0, "avx2": 0.5, "baseline": 0.125}.get(variant, 1.0)
    if factor == 1.0:
        return speed
    narrower = {name: factor * getattr(speed, name) for name in ("float64_flop", "float32_flop")}
    return replace(speed, **narrower, half_flop=None)
