r"""The text that a device writes by itself, and whether rounding explains where it parts from another's.

The worker that makes the reference writes a continuation of each prompt, one at a time, and computes its exact logits.
Every worker writes its own: a token is right if its exact logit is as large as the largest, but for what rounding may
do to the two. So two healthy devices may write different texts, and how soon is in the figures too: with a gap g
between the two largest logits and a standard deviation s of what rounding does to that gap, one device takes the second
with probability :math:`p = \Phi(-g/s)`, and two part with :math:`2 p (1 - p)`, if their errors have nothing in common.
Two ways of computing share most operations bit for bit, though, as long as no sum is rounded the other way: of a small
model in a half type most gaps are the same to the last bit. So the share of gaps that differ between a step with a
cache and a pass over the whole text, on the worker that makes the reference, is a factor of that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.capture.wording import counted
from consistency.case.budget.costs import LEAST_PASSES
from consistency.case.case import Case
from consistency.case.recognition import has_tokenizer
from consistency.devices.backends import CPU
from consistency.extras.serving.generation.spec import GENERATION, OTHER_TOKEN
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error_spread import Spread
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rules import ratio
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.judging.block_rule import draw, limits_of, named_factors, spread_in
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference, Tables, publish, wait_for
from consistency.worker.model.inputs import tokenizer_of
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import activations, device_of, model_code
from consistency.worker.model.ways import LOGITS, Choose, Sequences, generated
from consistency.worker.protocol import GENERATION_FILE
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

TEXT = "text"
_PATH, _GAP, _UNLIKE = "path", "gap", "unlike"
_DOES_NOT = "the model does not generate: "

_NEAR = 3.0
"""Standard deviations of a gap up to which two tokens are nearly tied: a device takes the second in one of 740."""

_MOST_TOKENS = 1e6
"""Tokens of a text up to which a parting is foretold."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def record_text(context: Context, sequences: Sequences) -> None:
    """Record for each prompt whether the text that this device writes is right, and how soon two devices' texts part.

    A text has as many tokens as a sequence.

    Raises
    ------
    Skip
        The model does not generate on this device.
    """
    reference = _make_or_wait_for_reference(context, sequences)
    if isinstance(reference, str):
        context.record.fact(GENERATION, WHOLE_MODEL, TEXT, status="blocked", reason=reference)
        return
    failure = reference.tables.failures.get(TEXT)
    if failure:
        context.record.fact(GENERATION, WHOLE_MODEL, TEXT, status="skipped", reason=failure)
        return
    path, exact, unlike = (reference.known(name) for name in (_PATH, LOGITS, _UNLIKE))
    products = cpu_error.products_on(context.model, context.device)
    dtype = next(p.dtype for p in context.model.parameters() if p.dtype in UNIT_ROUNDOFF)
    logit_spread, gap_spread = spread_in(reference, products, LOGITS), spread_in(reference, products, _GAP)
    assert logit_spread is not None
    assert gap_spread is not None
    pairs = _two_largest(exact)
    gaps = _gaps(exact, pairs)
    limits = _Limits(
        exact=exact,
        logit_limits=logit_spread.allowed(exact, dtype),
        pairs=pairs.reshape(*exact.shape[:2], 2),
        # gaps are differences that are taken in float32: see `_make`
        gap_limits=gap_spread.allowed(gaps, torch.float32).reshape(exact.shape[:2]),
    )
    with model_code(context.model, _DOES_NOT):
        written = _written(context.model, sequences)
    # a token is right by its exact logit, so the text of this device need not be the reference's
    for number in range(len(written)):
        _record_prompt(context, number, written[number], path[number], limits)
    deviation = (gap_spread.rows * gap_spread.columns).sqrt()[:, 0]
    _record_partings(context, gaps[:, 0], deviation, dtype, unlike=float(unlike))


def _make_or_wait_for_reference(context: Context, sequences: Sequences) -> Reference | str:
    """Return the reference, made by this worker where the job says so; a message where the worker that makes it ended.

    It is made on the CPU, so a worker of another device loads the model there once more.
    """
    if not context.job.makes_reference:
        return wait_for(context.scratch, context.events, GENERATION_FILE)
    if context.device.type == CPU:
        return _make(context, context.model, sequences)
    with context.events.on_cpu():
        return _make(context, load_model(context.job.case, CPU), sequences)


def _written(model: Any, sequences: Sequences, see: Choose | None = None) -> torch.Tensor:
    """Write the continuation of each prompt by itself, and return their ids, `(prompts, tokens)`, on the CPU.

    The planted fault `another_token` replaces the result of this function.
    """
    count, length = sequences.ids.shape
    with half_kernels.computing(half_kernels.replacement(model, count * sequences.prompt)):
        texts = []
        for number in range(count):
            sequence = sequences.part(slice(number, number + 1))
            prompt = sequence.ids[:, : sequence.prompt].to(device_of(model))
            texts.append(generated(model, sequence.inputs(prompt), length, choosing=see).to(CPU))
        return torch.cat(texts)


def _make(context: Context, model: Any, sequences: Sequences) -> Reference | str:
    """Write the continuations, and publish them with their exact logits and the errors that rounding makes in these."""
    tensors: dict[str, torch.Tensor] = {}
    limits, failure = {}, {}
    scores_by_step: list[torch.Tensor] = []

    def see(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores_by_step.append(scores.to(CPU))
        return scores

    try:
        with model_code(model, _DOES_NOT):
            path = _written(model, sequences, see)
            whole = torch.cat([sequences.ids[:, : sequences.prompt], path[:, :-1]], 1)

            def logits(_: str = "") -> torch.Tensor:
                every_logit = activations(model, sequences.inputs(whole))[LOGITS]
                return every_logit[:, -path.shape[1] :].contiguous()  # an adapter may put tokens of its own before all

            with exact_layers(model), Float64Mode():
                exact = logits().to(torch.float64)
            with half_kernels.computing(half_kernels.replacement(model, whole.numel())):
                drawn, plain = draw(context, model, logits, LEAST_PASSES), logits()
            pairs = _two_largest(exact)
            unlike = share_unlike(plain, torch.cat(scores_by_step).reshape(plain.shape).to(plain.dtype), pairs)
            spreads = {}
            for products, noisy_logits in drawn.items():
                noisy_gaps = [_gaps(noisy, pairs).to(torch.float32) for noisy in noisy_logits]
                spreads[products] = {
                    LOGITS: Spread.of(noisy_logits, exact),
                    _GAP: Spread.of(noisy_gaps, _gaps(exact, pairs)),
                }
            tensors = {_PATH: path, LOGITS: exact, _UNLIKE: torch.tensor(unlike), **named_factors(spreads)}
            limits = limits_of(spreads)
    except Skip as why:  # code that insists on its own dtype, too
        failure = {TEXT: str(why)}
    tables = Tables(failures=failure, names=tuple(tensors), limits=limits)
    publish(context.scratch, tensors or {"": torch.zeros(1)}, tables, GENERATION_FILE)
    return Reference(path=context.scratch / GENERATION_FILE, tables=tables, in_memory=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Exact logits, and the error that rounding may make in the gap between two of them.

    Attributes
    ----------
    exact, logit_limits : torch.Tensor
        `(prompts, steps, vocabulary)`: the logits, and the error that each may have.
    pairs, gap_limits : torch.Tensor
        `(prompts, steps, 2)` and `(prompts, steps)`: the ids of the two largest logits, and the error that their gap
        may have.
    """

    exact: torch.Tensor
    logit_limits: torch.Tensor
    pairs: torch.Tensor
    gap_limits: torch.Tensor

    def gap_and_limit(self, prompt: int, step: int, token: int, other: int) -> tuple[float, float]:
        """Return by how much the exact logit of a token is above that of another, and the error that this may have."""
        gap = float(self.exact[prompt, step, token] - self.exact[prompt, step, other])
        # the errors of two logits cancel in part, which was measured for the two largest alone
        if {token, other} == {*self.pairs[prompt, step].tolist()}:
            return gap, float(self.gap_limits[prompt, step])
        return gap, float(self.logit_limits[prompt, step, token] + self.logit_limits[prompt, step, other])


def _record_prompt(context: Context, number: int, written: torch.Tensor, path: torch.Tensor, limits: _Limits) -> None:
    """Judge the tokens of one prompt, up to the first that differs from the reference's.

    Parameters
    ----------
    written, path : torch.Tensor
        `(tokens,)`: the ids that this device writes, and those of the reference. After the first that differs the exact
        logits are those of another text.
    """
    partings = (written != path).nonzero()
    judged = int(partings[0]) + 1 if len(partings) else len(written)
    best = limits.pairs[number, :judged, 0]
    ratios = _ratios(number, written[:judged], best, limits)
    near = []
    for step, pair in enumerate(limits.pairs[number].tolist()):
        near.append(1 / max(1.0, ratio(*limits.gap_and_limit(number, step, *pair))))
    worst = max(range(judged), key=ratios.__getitem__)
    is_wrong = ratios[worst] > 1
    step = worst if is_wrong else judged - 1
    status: RecordStatus = "equal"
    reason, evidence = None, dict[str, Any]()
    if is_wrong or len(partings):
        status = "outside" if is_wrong else "within"
        other = int(best[step]) if is_wrong else int(path[step])
        gap, limit = limits.gap_and_limit(number, step, other, int(written[step]))
        tokens = _words(context, int(written[step]), other)
        verdict = "which rounding does not explain" if is_wrong else "both are right"
        reason = (
            f"{tokens[0]} for {tokens[1]} at token {step + 1}: "
            f"their exact logits are {abs(gap):.2g} apart, and rounding "
            f"may move them by {limit:.2g}: {verdict}"
        )
        evidence = {"token": step, "id": int(written[step]), "other_id": other, "gap": abs(gap), "allowed": limit}
    context.record.fact(
        GENERATION,
        f"prompt {number}",
        TEXT,
        status=status,
        word=OTHER_TOKEN if is_wrong else None,
        ratio=max(ratios),
        reason=reason,
        evidence={"tokens": len(written), "written": _pieces(context, written.tolist()), "near": near, **evidence},
    )


def _ratios(prompt: int, written: torch.Tensor, best: torch.Tensor, limits: _Limits) -> list[float]:
    """Return for each step how far the written token is below the best one, over what rounding may do to that gap."""
    ratios = []
    for step, (token, best_token) in enumerate(zip(written.tolist(), best.tolist(), strict=True)):
        if token == best_token:
            ratios.append(0.0)
        else:
            ratios.append(ratio(*limits.gap_and_limit(prompt, step, best_token, token)))
    return ratios


def _gaps(logits: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the gap between two logits of each step, `(steps, 1)`."""
    two_logits = logits.reshape(-1, logits.shape[-1]).to(torch.float64).gather(1, pairs)
    return two_logits[:, :1] - two_logits[:, 1:]


def _two_largest(exact: torch.Tensor) -> torch.Tensor:
    """Return the ids of the two largest logits of each step, `(steps, 2)`."""
    return exact.reshape(-1, exact.shape[-1]).topk(2, dim=-1).indices


def _record_partings(
    context: Context, gap: torch.Tensor, deviation: torch.Tensor, dtype: torch.dtype, *, unlike: float
) -> None:
    """Record in how many steps two tokens are nearly tied, and after how many two healthy devices have parted.

    In dtypes that were not computed in, no gap is taken to have the same bits. Of float32 nothing follows for half
    types: sums in it are rounded at each step, and theirs are not.
    """
    tied = int((gap <= _NEAR * deviation).sum())
    tokens = {name_of(dtype): tokens_to_part(gap, deviation, unlike)}
    other_dtypes = () if dtype == torch.float32 else _DTYPES
    for other in other_dtypes:
        if other != dtype:
            scaled_deviation = deviation * UNIT_ROUNDOFF[other] / UNIT_ROUNDOFF[dtype]
            tokens[name_of(other)] = tokens_to_part(gap, scaled_deviation, 1)
    in_dtype, *in_others = (f"{_count_words(count)} in {name}" for name, count in tokens.items())
    reason = f"{tied} of {len(gap)} tokens are nearly tied: two healthy devices write the same text for {in_dtype}"
    if in_others:
        reason += f"; in others at the earliest after {', '.join(in_others)}"
    context.record.fact(
        GENERATION,
        WHOLE_MODEL,
        TEXT,
        status="within",
        reason=reason,
        evidence={
            "nearly_tied": tied,
            "steps": len(gap),
            "unlike": unlike,
            "tokens": {name: count for name, count in tokens.items() if count},
        },
    )


def tokens_to_part(gap: torch.Tensor, deviation: torch.Tensor, unlike: float) -> float | None:
    """Return after how many tokens a parting is likelier than not, None if after more than a million.

    Parameters
    ----------
    gap, deviation : torch.Tensor
        `(steps,)`: the gap of the two largest logits, and the standard deviation of what rounding does to it.
    unlike : float
        The fraction of gaps that have other bits on the second device.
    """
    hazard = unlike * float(chance_to_part(gap, deviation).mean())
    if not hazard > math.log(2) / _MOST_TOKENS:
        return None
    return math.log(2) / -math.log1p(-hazard)


def chance_to_part(gap: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Return the chance that one device takes the second token and the other does not, for each step.

    Their errors are taken to have nothing in common.
    """
    second: torch.Tensor = torch.special.ndtr(-gap / deviation.clamp_min(1e-300))
    return 2 * second * (1 - second)


def share_unlike(one: torch.Tensor, other: torch.Tensor, pairs: torch.Tensor) -> float:
    """Return the fraction of gaps that have other bits in two ways of computing.

    One is added to both counts, so that the fraction is above 0 where no gap differs.
    """
    differ = _gaps(one, pairs) != _gaps(other, pairs)
    return (int(differ.sum()) + 1) / (len(differ) + 1)


def _count_words(tokens: float | None) -> str:
    if tokens is None:
        return "more than a million tokens"
    return f"some {counted(max(1, round(tokens)), 'token')}"


def _words(context: Context, *ids: int) -> list[str]:
    """Return tokens as text, where the base has a tokenizer, and by their ids."""
    tokenizer = _tokenizer_of(context.job.case)
    if tokenizer is None:
        return [f"id {token}" for token in ids]
    return [f"{tokenizer.decode([token])!r} (id {token})" for token in ids]


def _pieces(context: Context, ids: Sequence[int]) -> list[str]:
    """Return the parts of a text, or the ids of its tokens where the base has no tokenizer."""
    tokenizer = _tokenizer_of(context.job.case)
    if tokenizer is None:
        return [f" {token}" for token in ids]
    return [tokenizer.decode([token]) for token in ids]


def _tokenizer_of(case: Case) -> Any:
    """Return the tokenizer of the base; None where it has none, or none that can be loaded."""
    if case.factory is not None or not has_tokenizer(Path(case.base)):
        return None
    return _load_tokenizer(case.base)


@functools.lru_cache(maxsize=2)
def _load_tokenizer(folder: str) -> Any:
    try:
        return tokenizer_of(folder)
    except Exception:  # the code and the files of any kind of tokenizer: ids alone then
        return None
