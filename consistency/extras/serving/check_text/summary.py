"""Figures of the log probabilities of all texts, beside those of two healthy passes. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

_TELLS_NOTHING = 1.0
"""Threshold from which on it rules nothing out: a factor of e at every token."""


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the differences of log probabilities.

    Attributes
    ----------
    tokens : int
        Tokens whose log probability was compared.
    mean, mean_abs, deviation : float
        Mean of the differences, of their magnitudes, and their standard deviation.
    kl : float
        Mean of `exp(-d) - 1 + d`.
    largest_ratio : float
        The largest of `exp(d)` and `exp(-d)`.
    clipped : float
        Fraction of tokens whose ratio is beyond 0.8 to 1.2.
    """

    tokens: int
    mean: float
    mean_abs: float
    deviation: float
    kl: float
    largest_ratio: float
    clipped: float

    def words(self) -> str:
        """Return the figures in words."""
        return (
            f"mean |difference| {self.mean_abs:.2g}, mean {self.mean:+.1g}, KL {self.kl:.1g}, largest ratio "
            f"{self.largest_ratio:.3g}, beyond 0.8 to 1.2 {self.clipped:.2%}"
        )


class LogprobSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The log probabilities of all texts beside those of two healthy passes.

    Attributes
    ----------
    found : Differences
        Of the log probabilities that came with the texts, from one pass of the model here.
    healthy : Differences
        Of two healthy passes of this model in this dtype, over a sample of the texts.
    threshold, mean_threshold : float
        Largest mean of the magnitudes, and largest magnitude of the mean, that rounding explains.
    way : str
        How log probabilities were taken that are off as a whole, and by no token alone; empty where it is not known.
    histogram : tuple of int
        Tokens by the magnitude of their difference: below the first of `edges`, between the first and the second, …,
        and from the last one on.
    healthy_histogram : tuple of int
        The same of the healthy passes.
    edges : tuple of float
        Magnitudes between the bars, twice as large each.
    """

    found: Differences
    healthy: Differences
    threshold: float
    mean_threshold: float
    way: str = ""
    histogram: tuple[int, ...] = ()
    healthy_histogram: tuple[int, ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def is_beyond(self) -> bool:
        """Report whether the differences as a whole are more than rounding explains; of NaN it is."""
        return not (self.found.mean_abs <= self.threshold and abs(self.found.mean) <= self.mean_threshold)

    def lines(self, dtype: str) -> Iterator[str]:
        """Yield the figures in words, one line for the texts and one for healthy passes."""
        yield f"  these texts: {self.found.words()}"
        yield f"  two healthy passes in {dtype}: {self.healthy.words()}"
        thresholds = {"mean |difference|": self.threshold, "mean": self.mean_threshold}
        parts = [f"{name} {value:.2g}" for name, value in thresholds.items() if value <= _TELLS_NOTHING]
        untold = [name for name, value in thresholds.items() if not value <= _TELLS_NOTHING]
        if untold:
            parts.append(f"too few texts for one of the {' and the '.join(untold)}")
        yield f"  thresholds for this model in {dtype} and these texts: {', '.join(parts)}"
