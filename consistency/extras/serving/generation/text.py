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
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from consistency.capture.names import WHOLE_MODEL
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

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def record_text(context: Context, sequences: Sequences) -> None:
    """Record of each prompt whether the text that this device writes is right, and of all how soon two part.

    A text has as many tokens as a sequence.

    Raises
    ------
    Skip
        The model does not generate on this device.
    """
    answer: Reference | str
    if context.job.makes_reference:
        on_cpu = context.device.type == CPU
        with nullcontext() if on_cpu else context.events.on_cpu():
            model = context.model if on_cpu else load_model(context.job.case, CPU)
            answer = _make(context, model, sequences)
    else:
        answer = wait_for(context.scratch, context.events, GENERATION_FILE)
    failure = answer if isinstance(answer, str) else answer.tables.failures.get(TEXT)
    if isinstance(answer, str) or failure:
        is_lost = isinstance(answer, str)
        context.record.fact(GENERATION, WHOLE_MODEL, TEXT, status="blocked" if is_lost else "skipped", reason=failure)
        return
    path, exact, unlike = (answer.known(name) for name in (_PATH, LOGITS, _UNLIKE))
    products = cpu_error.products_on(context.model, context.device)
    dtype = next(p.dtype for p in context.model.parameters() if p.dtype in UNIT_ROUNDOFF)
    spread, of_gap = spread_in(answer, products, LOGITS), spread_in(answer, products, _GAP)
    assert spread is not None
    assert of_gap is not None
    pairs = _two_largest(exact)
    gaps = _gaps(exact, pairs)
    limits = _Limits(
        exact=exact,
        each=spread.allowed(exact, dtype),
        pairs=pairs.reshape(*exact.shape[:2], 2),
        of_pair=of_gap.allowed(gaps, torch.float32).reshape(exact.shape[:2]),
    )
    with model_code(context.model, _DOES_NOT):
        own = _written(context.model, sequences)
    for number in range(len(own)):
        _record_prompt(context, number, own[number], path[number], limits)
    deviation = (of_gap.rows * of_gap.columns).sqrt()[:, 0]
    _record_partings(context, gaps[:, 0], deviation, dtype, unlike=float(unlike))


def _written(model: Any, sequences: Sequences, see: Choose | None = None) -> torch.Tensor:
    """Return the continuation of each prompt by itself, `(prompts, tokens)`, on the CPU: where faults are planted."""
    count, length = sequences.ids.shape
    with half_kernels.computing(half_kernels.replacement(model, count * sequences.prompt)):
        texts = []
        for number in range(count):
            one = sequences.part(slice(number, number + 1))
            prompt = one.ids[:, : one.prompt].to(device_of(model))
            texts.append(generated(model, one.inputs(prompt), length, choosing=see).to(CPU))
        return torch.cat(texts)


def _make(context: Context, model: Any, sequences: Sequences) -> Reference | str:
    """Write the continuations, and compute their exact logits and what rounding makes in these."""
    tensors: dict[str, torch.Tensor] = {}
    limits, failure = {}, {}
    steps: list[torch.Tensor] = []

    def see(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append(scores.to(CPU))
        return scores

    try:
        with model_code(model, _DOES_NOT):
            path = _written(model, sequences, see)
            whole = torch.cat([sequences.ids[:, : sequences.prompt], path[:, :-1]], 1)

            def logits(_: str = "") -> torch.Tensor:
                found = activations(model, sequences.inputs(whole))[LOGITS]
                return found[:, -path.shape[1] :].contiguous()  # an adapter may put tokens of its own before all

            with exact_layers(model), Float64Mode():
                exact = logits().to(torch.float64)
            with half_kernels.computing(half_kernels.replacement(model, whole.numel())):
                drawn, plain = draw(context, model, logits, LEAST_PASSES), logits()
            pairs = _two_largest(exact)
            unlike = share_unlike(plain, torch.cat(steps).reshape(plain.shape).to(plain.dtype), pairs)
            found = {
                title: {
                    LOGITS: Spread.of(passes, exact),
                    _GAP: Spread.of([_gaps(one, pairs).to(torch.float32) for one in passes], _gaps(exact, pairs)),
                }
                for title, passes in drawn.items()
            }
            tensors = {_PATH: path, LOGITS: exact, _UNLIKE: torch.tensor(unlike), **named_factors(found)}
            limits = limits_of(found)
    except Skip as why:  # code that insists on its own dtype, too
        failure = {TEXT: str(why)}
    tables = Tables(failures=failure, names=tuple(tensors), limits=limits)
    publish(context.scratch, tensors or {"": torch.zeros(1)}, tables, GENERATION_FILE)
    return Reference(path=context.scratch / GENERATION_FILE, tables=tables, made=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What rounding may do to the gap between two logits.

    Attributes
    ----------
    exact, each : torch.Tensor
        `(prompts, steps, words)`: the logits, and the error that each may have.
    pairs, of_pair : torch.Tensor
        `(prompts, steps, 2)` and `(prompts, steps)`: the two largest, and the error that their gap may have.
    """

    exact: torch.Tensor
    each: torch.Tensor
    pairs: torch.Tensor
    of_pair: torch.Tensor

    def of(self, prompt: int, step: int, one: int, other: int) -> tuple[float, float]:
        """Return by how much the exact logit of one token is above that of another, and what rounding may do to it."""
        gap = float(self.exact[prompt, step, one] - self.exact[prompt, step, other])
        if {one, other} == {*self.pairs[prompt, step].tolist()}:
            return gap, float(self.of_pair[prompt, step])
        return gap, float(self.each[prompt, step, one] + self.each[prompt, step, other])


def _record_prompt(context: Context, number: int, own: torch.Tensor, path: torch.Tensor, limits: _Limits) -> None:
    """Judge the tokens of one prompt, up to the first that is not that of the reference."""
    parted = (own != path).nonzero()
    known = int(parted[0]) + 1 if len(parted) else len(own)
    best = limits.pairs[number, :known, 0]
    shares = [
        ratio(*limits.of(number, step, int(best[step]), int(own[step]))) if best[step] != own[step] else 0.0
        for step in range(known)
    ]
    pairs = enumerate(limits.pairs[number].tolist())
    near = [1 / max(1.0, ratio(*limits.of(number, at, *pair))) for at, pair in pairs]
    worst = max(range(known), key=shares.__getitem__)
    is_wrong = shares[worst] > 1
    step = worst if is_wrong else known - 1
    reason, evidence = None, dict[str, Any]()
    if is_wrong or len(parted):
        other = int(best[step]) if is_wrong else int(path[step])
        gap, limit = limits.of(number, step, other, int(own[step]))
        tokens = _words(context, int(own[step]), other)
        verdict = "which rounding does not explain" if is_wrong else "both are right"
        reason = (
            f"{tokens[0]} for {tokens[1]} at token {step + 1}: "
            f"their exact logits are {abs(gap):.2g} apart, and rounding "
            f"may move them by {limit:.2g}: {verdict}"
        )
        evidence = {"token": step, "id": int(own[step]), "other_id": other, "gap": abs(gap), "allowed": limit}
    context.record.fact(
        GENERATION,
        f"prompt {number}",
        TEXT,
        status="outside" if is_wrong else "within" if reason else "equal",
        word=OTHER_TOKEN if is_wrong else None,
        share=max(shares),
        reason=reason,
        evidence={"tokens": len(own), "written": _pieces(context, own.tolist()), "near": near, **evidence},
    )


def _gaps(logits: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the gap between two logits of each step, `(steps, 1)`."""
    found = logits.reshape(-1, logits.shape[-1]).to(torch.float64).gather(1, pairs)
    return found[:, :1] - found[:, 1:]


def _two_largest(exact: torch.Tensor) -> torch.Tensor:
    """Return which are the two largest logits of each step, `(steps, 2)`."""
    return exact.reshape(-1, exact.shape[-1]).topk(2, dim=-1).indices


def _record_partings(
    context: Context, gap: torch.Tensor, deviation: torch.Tensor, dtype: torch.dtype, *, unlike: float
) -> None:
    """Record in how many steps two tokens are nearly tied, and after how many two healthy devices have parted.

    In dtypes that were not computed in, no gap is taken to have the same bits. Of float32 nothing follows for half
    types: sums in it are rounded at each step, and theirs are not.
    """
    tied = int((gap <= _NEAR * deviation).sum())
    others = () if dtype == torch.float32 else _DTYPES
    of = {other: deviation * UNIT_ROUNDOFF[other] / UNIT_ROUNDOFF[dtype] for other in (dtype, *others)}
    tokens = {name_of(one): tokens_to_part(gap, own, unlike if one == dtype else 1) for one, own in of.items()}
    own, *rest = (f"{_some(count)} in {name}" for name, count in tokens.items())
    context.record.fact(
        GENERATION,
        WHOLE_MODEL,
        TEXT,
        status="within",
        reason=f"{tied} of {len(gap)} tokens are nearly tied: two healthy devices write the same text for {own}"
        + (f"; in others at the earliest after {', '.join(rest)}" if rest else ""),
        evidence={
            "nearly_tied": tied,
            "steps": len(gap),
            "unlike": unlike,
            "tokens": {n: c for n, c in tokens.items() if c},
        },
    )


def tokens_to_part(gap: torch.Tensor, deviation: torch.Tensor, unlike: float) -> float | None:
    """Return after how many tokens a parting is likelier than not, None if after more than a million."""
    hazard = unlike * float(chance_to_part(gap, deviation).mean())
    return math.log(2) / -math.log1p(-hazard) if hazard > math.log(2) / 1e6 else None


def chance_to_part(gap: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Return with which chance one device takes the second token and the other does not, by step.

    Their errors have nothing in common.
    """
    second: torch.Tensor = torch.special.ndtr(-gap / deviation.clamp_min(1e-300))
    return 2 * second * (1 - second)


def share_unlike(one: torch.Tensor, other: torch.Tensor, pairs: torch.Tensor) -> float:
    """Return of how many gaps two ways of computing have other bits, of one more than there are if of none."""
    differ = _gaps(one, pairs) != _gaps(other, pairs)
    return (int(differ.sum()) + 1) / (len(differ) + 1)


def _some(tokens: float | None) -> str:
    return "more than a million tokens" if tokens is None else f"some {counted(max(1, round(tokens)), 'token')}"


def _words(context: Context, *ids: int) -> list[str]:
    """Return tokens as text, where the base has a tokenizer, and by their ids."""
    read = _reader(context.job.case)
    return [f"id {one}" if read is None else f"{read.decode([one])!r} (id {one})" for one in ids]


def _pieces(context: Context, ids: Sequence[int]) -> list[str]:
    """Return the parts of a text, or the ids of its tokens where the base has no tokenizer."""
    read = _reader(context.job.case)
    return [f" {one}" if read is None else read.decode([one]) for one in ids]


def _reader(case: Case) -> Any:
    return None if case.factory is not None or not has_tokenizer(Path(case.base)) else _tokenizer(case.base)


@functools.lru_cache(maxsize=2)
def _tokenizer(folder: str) -> Any:
    try:
        return tokenizer_of(folder)
    except Exception:  # the code and the files of any kind of tokenizer: ids alone then
        return None
