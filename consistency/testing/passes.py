"""The passes with noise of a function, and the judgement of its results by them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from consistency.numerics.decision import Decision, gaps
from consistency.numerics.decisions import TO_INTEGER
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error_spread import Spread
from consistency.numerics.rounding_noise import NORM_GRADIENTS
from consistency.testing.calls import Computed, FunctionCall, Noise
from consistency.testing.options import Allow
from consistency.testing.result import ResultError, Spreads, allowance, judged
from consistency.worker.cpu_error import by_formula, with_noise
from consistency.worker.precision import products_of

PASSES = 8
"""Passes with noise: as many as the tool computes for gradients, and enough for a tensor of one row."""

_MOST_TIMES = 4
"""Up to so many times the passes are computed where few elements leave a result inconclusive: of one row the limit is
19 times the largest figure of 8 passes, 4.2 times that of 32."""


def noise_of(allow: Allow, device: torch.device, *, sums_in_half: bool) -> Noise:
    """Return a function from a seed to the context of a pass with noise, whose errors are those of such a device.

    Parameters
    ----------
    sums_in_half : bool
        Whether the gradients of a norm's parameters may be added up in a half type.
    """
    products = products_of(device) if allow.products is None else allow.products
    # the pools of a usual call's seeds are kept for the next call
    half_sums = NORM_GRADIENTS if sums_in_half else {}

    def noise(seed: int, *, together: bool = False) -> AbstractContextManager[None]:
        is_kept = seed < PASSES
        return with_noise(
            products, seed, toward_zero=allow.toward_zero, is_kept=is_kept, half_sums=half_sums, together=together
        )

    return noise


def _may_differ(
    decision: Decision, operands: list[torch.Tensor], got: torch.Tensor, truth: torch.Tensor
) -> torch.Tensor:
    """Return the elements of a result, of its shape and bool, in which rounding may make a decision go another way.

    These are elements whose margin in the exact pass is no larger than the error that the operand may have. There are
    none if the decision did not make this result.

    Parameters
    ----------
    decision : Decision
        From the exact pass; its operand has the exact values.
    operands : list of torch.Tensor
        Its operand in each pass with noise.
    got, truth : torch.Tensor
        The discrete result of the function, and the exact one.
    """
    nowhere = torch.zeros_like(truth, dtype=torch.bool)
    chosen, operand = decision.decided, decision.operand.to(torch.float64)
    if chosen.numel() != truth.numel() or operands[0].dtype not in UNIT_ROUNDOFF:
        return nowhere
    if not torch.equal(chosen.reshape(truth.shape).to(truth.dtype), truth):
        return nowhere  # the decision is another one, whose outcome is not this result
    if not all(bool(tensor.isfinite().all()) for tensor in (operand, *operands)):
        return nowhere
    allowed = allowance(operands, operand).allowed(operand, operands[0].dtype)
    if decision.dim is None:
        # a margin lies between `scores` values of the operand, each of which may be off by `allowed`
        is_close = decision.margins(operand) <= decision.scores * allowed
        if decision.name == TO_INTEGER:
            # a number that an earlier rounding made whole is at the edge of a cast, and yet the cast decides nothing
            is_close &= ~torch.stack([tensor == tensor.round() for tensor in (operand, *operands)]).all(0)
        return is_close.reshape(truth.shape)
    # a selection: the exact scores of both elements have to be as close as their errors together may be
    other = got.reshape(chosen.shape).long().clamp(0, operand.shape[decision.dim] - 1)
    together = allowed.gather(decision.dim, chosen) + allowed.gather(decision.dim, other)
    is_close = gaps(operand, decision.dim, chosen, other) <= together
    return (is_close & (other == got.reshape(chosen.shape))).reshape(truth.shape)


def _is_right_choice(own: Decision, exact: Decision, operands: list[torch.Tensor]) -> bool:
    """Report whether a function decides as the exact pass does, but for what rounding may decide either way.

    Parameters
    ----------
    operands : list of torch.Tensor
        The operand of the decision in each pass with noise.
    """
    if own.name != exact.name or own.decided.shape != exact.decided.shape:
        return False
    differs = own.decided != exact.decided
    if not bool(differs.any()):
        return True
    return not bool((differs & ~_may_differ(exact, operands, own.decided, exact.decided)).any())


class NoisyPasses:
    """The passes with noise of a function, and the judgement of results by them.

    Parameters
    ----------
    call : FunctionCall
        The function with its inputs.
    noise : callable
        Returns the context of a pass with noise, by its seed.
    least : int
        Number of passes; there are up to `_MOST_TIMES` as many while a result is inconclusive.
    exact : dict
        The results in float64.
    any_dtype : bool
        Whether a result may have another dtype than the reference's.
    replayed : sequence of Decision
        Decisions whose outcomes the passes have.
    has_outcomes_of_function : bool
        Whether these are the outcomes of the function under test; else they are those of the exact pass.
    """

    def __init__(
        self,
        call: FunctionCall,
        noise: Noise,
        least: int,
        exact: Computed,
        *,
        any_dtype: bool,
        replayed: Sequence[Decision] = (),
        has_outcomes_of_function: bool = False,
    ) -> None:
        self.has_outcomes_of_function = has_outcomes_of_function
        self._replayed = replayed
        self._call = call
        self._noise = noise
        self._least = least
        self._exact = exact
        self._any_dtype = any_dtype
        self._drawn: list[Computed] = []
        self._spreads: Spreads = {}

    @property
    def count(self) -> int:
        """Return the number of passes so far."""
        return len(self._drawn)

    def judge(self, actual: Computed) -> list[ResultError]:
        """Judge the results that the function and its reference both have."""
        results: dict[str, ResultError] = {}
        while not self._drawn or (
            self.count < _MOST_TIMES * self._least and any(map(_is_inconclusive, results.values()))
        ):
            self._draw()
            for name in self._exact:
                is_open = name not in results or _is_inconclusive(results[name])
                if name in actual and is_open:
                    results[name] = self.judge_one(name, actual[name])
        return [*results.values()]

    def replaying(self, target: torch.device) -> NoisyPasses | None:
        """Return passes that decide as the function does where rounding may decide either way; None if nothing decides.

        A router in a half type sends a token to another expert in some passes, and limits become as wide as its values.
        Where it is not known how the function decides, or it decides otherwise than rounding may, the passes decide as
        the exact one.
        """
        with by_formula():
            decisions = self._call.decisions(self._least, self._noise, gradient=True)
        if not decisions:
            return None
        exact_decisions = [decision for decision, _ in decisions]
        own_decisions = self._call.decisions_on(target)
        is_known = len(own_decisions) == len(decisions) and all(
            _is_right_choice(own, decision, operands)
            for own, (decision, operands) in zip(own_decisions, decisions, strict=True)
        )
        replayed = own_decisions if is_known else exact_decisions
        return NoisyPasses(
            self._call,
            self._noise,
            self._least,
            self._call.exact(replayed),
            any_dtype=self._any_dtype,
            replayed=replayed,
            has_outcomes_of_function=is_known,
        )

    def judge_one(self, name: str, actual: Any) -> ResultError:
        """Judge one result by the passes so far."""
        noisy = [computed[name] for computed in self._drawn]
        others = {other: value for other, value in self._exact.items() if other != name and _is_plain(value)}
        return judged(
            name,
            actual,
            self._exact[name],
            noisy,
            self._undecided,
            any_dtype=self._any_dtype,
            others=others,
            spreads=self._spreads,
        )

    def spread(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, Spread]:
        """Return a result in float64, and the spread of rounding errors by which it was judged.

        Parameters
        ----------
        name : str
            A result of finite real numbers.
        dtype : torch.dtype
            The dtype of the function's own result.
        """
        exact = self._exact[name].to(torch.float64)
        by_passes = {
            passes: spread for (key, of, passes), spread in self._spreads.items() if (key, of) == (name, dtype)
        }
        if by_passes:
            return exact, by_passes[max(by_passes)]
        return exact, allowance([computed[name].to(dtype) for computed in self._drawn], exact)

    def _draw(self) -> None:
        """Compute the first passes, or as many again as there are."""
        with by_formula():
            seeds = range(self.count, self.count + max(self._least, self.count))
            self._drawn += self._call.with_noise(seeds, self._noise, self._replayed)

    def _undecided(self, got: torch.Tensor, truth: torch.Tensor, noisy: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return where another value of a discrete result is right too."""
        may_differ = torch.stack([tensor != truth for tensor in noisy]).any(0)
        for decision, operands in self._call.decisions(self._least, self._noise):
            may_differ |= _may_differ(decision, operands, got, truth)
        return may_differ


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def _is_inconclusive(result: ResultError) -> bool:
    return result.status == "inconclusive"
