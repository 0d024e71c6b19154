"""Check whether a model could have written a text: each token's exact logit against the largest.

A writer that always takes the most likely token takes another one only where rounding has put it above. So the gap of
each token to the largest logit is computed in float64, and what rounding may do to that gap by passes with random
rounding errors in the dtype that the writer is said to have used. A text that is impossible is held against the
mistakes that an engine makes with an adapter: each is a pass in float64, and is named where it would have written every
such text.

Where log probabilities are given, they are judged by themselves: whether the tokens are possible and whether the log
probabilities are the model's are two statements. Of a sampled text, whose tokens are not the most likely ones, they are
what tells that the model computed it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from consistency.case.budget.costs import LEAST_PASSES, MOST_PASSES
from consistency.case.case import Case
from consistency.case.recognition import has_tokenizer
from consistency.devices.products import Products
from consistency.errors import InputError
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.logprobs import LogprobWay, ways_of
from consistency.extras.serving.check_text.report import LogprobGap, TextReport, TextResult, TokenGap, Verdict
from consistency.extras.serving.check_text.texts import Text, Tokens, encoded, other_tokens
from consistency.extras.serving.engine_outputs.explanations import merges, mistakes
from consistency.extras.serving.engine_outputs.passes import Passes
from consistency.extras.serving.inference.request import OUTPUT
from consistency.numerics.decision import CONTINUOUS, Decision
from consistency.numerics.dtype import name_of
from consistency.numerics.error_spread import Spread
from consistency.worker.cpu_error import with_noise
from consistency.worker.model import half_kernels
from consistency.worker.model.inputs import tokenizer_of
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import MergeRefusedError
from consistency.worker.model.running import Activations, activations, base_of, model_code
from consistency.worker.recorder import Skip

Step = Callable[[str], None]

_MOST_DIVISIONS = 16
"""Tries to divide one text otherwise into tokens."""

_MOST_EXPLAINED = 2
"""Impossible texts that a mistake is held against."""


def check_text(case: Case, texts: Sequence[Text], *, step: Step | None = None) -> TextReport:
    """Check whether the model of a case could have written texts.

    Parameters
    ----------
    texts : sequence of Text
        Each written greedily, without penalties or constraints; or sampled, with log probabilities.
    step : callable
        Is told what is done next.

    Raises
    ------
    InputError
        A text cannot be used, or the model does not run.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries about themselves
        return _checked(case, texts, step or (lambda _: None))


def _checked(case: Case, texts: Sequence[Text], step: Step) -> TextReport:
    step("load")
    model = load_model(case, "cpu")
    tokenizer = None
    if case.factory is None and has_tokenizer(Path(case.base)):
        tokenizer = tokenizer_of(case.base)
    every = [encoded(text, tokenizer, f"text {number}") for number, text in enumerate(texts, 1)]
    try:
        with model_code(model):
            return _judged(case, model, every, tokenizer, step)
    except Skip as why:
        raise InputError("the model does not run on these texts", where=case.base, got=str(why)) from why


def _judged(case: Case, model: Any, every: Sequence[Tokens], tokenizer: Any, step: Step) -> TextReport:
    found = [
        _Written.of(model, tokens, tokenizer, functools.partial(_told, step, f"text {number} of {len(every)}"))
        for number, tokens in enumerate(every, 1)
    ]
    results = [written.result for written in found]
    wrong = [written for written in found if written.result.is_unexplained][:_MOST_EXPLAINED]
    causes, logprob_causes, base_alone = tuple[str, ...](), tuple[str, ...](), False
    if case.adapter is not None and wrong:
        causes = tuple(cause.value for cause in _explained(wrong, _Written.fits))
        if causes:
            results = [_impossible(result) for result in results]
        elif all(written.tokens.logprobs is not None for written in wrong):
            logprob_causes = tuple(cause.value for cause in _explained(wrong, _Written.fits_logprobs))
            if logprob_causes:
                results = [_sampled(result) for result in results]
    elif case.adapter is not None:
        sampled = [written for written in found if written.result.verdict == "sampled"][:_MOST_EXPLAINED]
        # where a mistake makes every token the most likely one, the text was written so, and not drawn by chance
        causes = tuple(cause.value for cause in _explained(sampled, _Written.fits))
        if causes:
            results = [_impossible(result) for result in results]
        elif not any(result.has_other_logprobs for result in results):
            base_alone = all(
                written.can_do_without and written.would_be_written(written.without_adapter()) for written in found
            )
    return TextReport(
        dtype=_dtype(model), texts=tuple(results), causes=causes, logprob_causes=logprob_causes, base_alone=base_alone
    )


def _told(step: Step, where: str, what: str) -> None:
    step(f"{where}: {what}")


def _dtype(model: torch.nn.Module) -> str:
    return name_of(next(one.dtype for one in model.parameters() if one.is_floating_point()))


def _impossible(result: TextResult) -> TextResult:
    """Return a text that was undecided, or taken for sampled, and that a mistake explains."""
    if result.verdict not in ("undecided", "sampled"):
        return result
    return msgspec.structs.replace(result, verdict="impossible", reason="")


def _sampled(result: TextResult) -> TextResult:
    """Return a text of whose log probabilities a mistake is known: nothing is known against its tokens then."""
    if result.verdict not in ("impossible", "undecided"):
        return result
    return msgspec.structs.replace(result, verdict="sampled" if result.unlikely else "possible", reason="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A text and what judges it.

    Attributes
    ----------
    spread, of_logprobs : Spread
        What rounding makes in the gap and in the log probability of each token, `(tokens, 1)`.
    """

    tokens: Tokens
    passes: Passes
    spread: Spread
    of_logprobs: Spread
    result: TextResult

    @classmethod
    def of(cls, model: Any, tokens: Tokens, tokenizer: Any, step: Step) -> _Written:
        """Judge a text; where it is impossible, in other tokens too, if these are not the writer's own."""
        for _ in range(_MOST_DIVISIONS):
            found = cls._judged(model, tokens, tokenizer, step)
            worst = found.result.worst
            if worst is None or worst.gap <= worst.allowed:
                break
            other = next(other_tokens(tokens, worst.token - 1, worst.largest_id, tokenizer), None)
            if other is None:
                break
            tokens = other
        return found

    @classmethod
    def _judged(cls, model: Any, tokens: Tokens, tokenizer: Any, step: Step) -> _Written:
        inputs = _inputs(model, tokens)
        chosen = torch.tensor(tokens.ids)
        decisions: list[str] = []

        def note(decision: Decision) -> None:
            decisions.append(decision.name)

        step("float64")
        passes = Passes(model=model, inputs=inputs, watch=lambda: note, step=step)
        logits = _logits(passes.of("right", nullcontext), chosen)
        ends = _ends(model)
        past_end = sum(int(one) in ends for one in logits.argmax(-1)[~_are(chosen, ends)])
        without_ends = _without_ends(logits, chosen, ends)
        two = without_ends.topk(2, -1).indices
        largest = two[:, 0]
        other = torch.where(chosen == largest, two[:, 1], chosen)
        ways = ways_of(tokens.logprobs, logits, without_ends, chosen)

        def figures(one: torch.Tensor) -> torch.Tensor:
            """Return the gap of each token, and its log probability in each way, `(tokens, 1 + ways)`."""
            gap = one.gather(1, largest[:, None]) - one.gather(1, other[:, None])
            masked = _without_ends(one, chosen, ends)
            return torch.cat([gap, *(way.of(one, masked, chosen) for way in ways)], 1)

        exact, drawn = figures(logits), list[torch.Tensor]()
        del logits, without_ends
        decides = any(name not in CONTINUOUS for name in decisions)
        count = MOST_PASSES if decides else LEAST_PASSES
        for seed in range(count):
            step(f"with noise ({seed + 1} of {count})")
            kernels = half_kernels.replacement(model, len(tokens.prompt) + len(tokens.ids))
            with half_kernels.computing(kernels), with_noise(Products(), seed):
                drawn.append(figures(_logits(activations(model, inputs)[OUTPUT], chosen)))
        spread, *of_ways = (
            Spread.of([one[:, [at]].to(torch.float32) for one in drawn], exact[:, [at]].contiguous())
            for at in range(exact.shape[1])
        )
        of_logprobs = of_ways[0]
        free = Passes(model=model, inputs=inputs, watch=lambda: None, step=step)
        result = _result(
            tokens,
            exact[:, 0],
            spread.allowed(exact[:, [0]], torch.float32)[:, 0],
            largest,
            tokenizer,
            logprobs=_judged_logprobs(tokens, exact[:, 1:], ways, of_ways),
            past_end=past_end,
            decides=decides,
        )
        return cls(tokens=tokens, passes=free, spread=spread, of_logprobs=of_logprobs, result=result)

    @property
    def can_do_without(self) -> bool:
        """Report whether PEFT can disable the adapter."""
        return hasattr(self.passes.model, "disable_adapter")

    def without_adapter(self) -> torch.Tensor:
        """Return the float64 logits without the adapter."""
        return self.passes.of("without the adapter", self.passes.model.disable_adapter)

    def fits(self, logits: torch.Tensor) -> bool:
        """Report whether a model with these exact logits could have written the text, with its log probabilities."""
        chosen = torch.tensor(self.tokens.ids)
        own = _without_ends(_logits(logits, chosen), chosen, _ends(self.passes.model))
        gaps = own.amax(-1, keepdim=True) - own.gather(1, chosen[:, None])
        if not bool((gaps <= self.spread.allowed(gaps, torch.float32)).all()):
            return False
        return self.fits_logprobs(logits)

    def fits_logprobs(self, logits: torch.Tensor) -> bool:
        """Report whether the log probabilities, if any came with it, are those of a model with these exact logits."""
        if self.tokens.logprobs is None:
            return True
        chosen = torch.tensor(self.tokens.ids)
        exact = _logits(logits, chosen).log_softmax(-1).gather(1, chosen[:, None])
        return bool((_off(self.tokens.logprobs, exact) <= self.of_logprobs.allowed(exact, torch.float32)).all())

    def would_be_written(self, logits: torch.Tensor) -> bool:
        """Report whether a model with these exact logits could have written it as it was: greedily, or sampled."""
        return self.fits_logprobs(logits) if self.result.verdict == "sampled" else self.fits(logits)

    def mistakes(self, fits: _Fits) -> list[Cause]:
        """Return mistakes with the adapter as a whole whose exact logits fit this text."""
        off = self.without_adapter() if self.can_do_without else None
        return [cause for cause, _, logits in mistakes(self.passes, off) if fits(self, logits)]

    def merges(self, fits: _Fits) -> list[Cause]:
        """Return merges in narrower dtypes whose exact logits do."""
        ways, found = merges(self.passes.model), list[Cause]()
        with suppress(MergeRefusedError):
            found += [cause for cause in ways if any(fits(self, self.passes.merged(way)) for way in ways[cause])]
        return found


_Fits = Callable[[_Written, torch.Tensor], bool]


def _explained(wrong: Sequence[_Written], fits: _Fits) -> list[Cause]:
    """Return the mistakes that fit each of these texts: merges only where no other one does."""
    for kind in (_Written.mistakes, _Written.merges):
        causes: list[Cause] | None = None
        for one in wrong:
            if causes != []:
                of_text = kind(one, fits)
                causes = of_text if causes is None else [cause for cause in causes if cause in of_text]
        if causes:
            return causes
    return []


def _inputs(model: Any, tokens: Tokens) -> Activations:
    """Return what the model is given: the last rows of its logits have chosen the tokens."""
    config = getattr(base_of(model), "config", None)
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None)
        given, decoder = tokens.prompt, [0 if start is None else start, *tokens.ids[:-1]]
        more = {"decoder_input_ids": torch.tensor([decoder])}
    else:
        given, more = [*tokens.prompt, *tokens.ids[:-1]], {}
    ids = torch.tensor([given])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def _logits(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the logits of each token in float64, `(tokens, words)`."""
    own = logits[0, -len(chosen) :]
    if int(chosen.max()) >= own.shape[-1]:
        raise InputError("the text has a token that the model has no logit for", got=int(chosen.max()))
    return own.to(torch.float64)


def _ends(model: Any) -> tuple[int, ...]:
    """Return the ids that end a text."""
    base = base_of(model)
    for config in (getattr(base, "generation_config", None), getattr(base, "config", None)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _are(chosen: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    return torch.isin(chosen, torch.tensor(ends, dtype=chosen.dtype))


def _without_ends(logits: torch.Tensor, chosen: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
    """Rule out the end of the text where it was not chosen: writers may be told to go on."""
    logits = logits.clone()
    goes_on = ~_are(chosen, ends)
    for end in ends:
        logits[goes_on, end] = -math.inf
    return logits


def _off(given: Sequence[float], exact: torch.Tensor) -> torch.Tensor:
    """Return how far log probabilities are from exact ones, `(tokens, 1)`."""
    return (torch.tensor(given, dtype=torch.float64)[:, None] - exact).abs()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logprobs:
    """How the log probabilities that came with a text compare with those of the model.

    Attributes
    ----------
    share : float
        The largest error over what rounding may do; over 1 they are not the model's.
    worst : LogprobGap
        Where that is.
    way : str
        How else they were taken from the model's logits; empty if they are the model's, or if no way fits.
    """

    share: float
    worst: LogprobGap
    way: str = ""

    @property
    def are_of_model(self) -> bool:
        return self.share <= 1  # of NaN, no


def _judged_logprobs(
    tokens: Tokens, exact: torch.Tensor, ways: Sequence[LogprobWay], spreads: Sequence[Spread]
) -> _Logprobs | None:
    """Hold log probabilities against the exact ones of each way, `(tokens, ways)`: the first is the model's own."""
    if tokens.logprobs is None:
        return None
    allowed = torch.cat([one.allowed(exact[:, [at]], torch.float32) for at, one in enumerate(spreads)], 1)
    shares = _off(tokens.logprobs, exact) / allowed
    place = int(shares[:, 0].argmax())
    worst = LogprobGap(
        token=place + 1, given=tokens.logprobs[place], exact=float(exact[place, 0]), allowed=float(allowed[place, 0])
    )
    judged = _Logprobs(share=float(shares[:, 0].max()), worst=worst)
    if judged.are_of_model:
        return judged
    fitting = [way.name for way, share in zip(ways, shares.amax(0).tolist(), strict=True) if share <= 1]
    return replace(judged, way=fitting[0]) if fitting else judged


def _result(
    tokens: Tokens,
    gaps: torch.Tensor,
    allowed: torch.Tensor,
    largest: torch.Tensor,
    tokenizer: Any,
    *,
    logprobs: _Logprobs | None,
    past_end: int,
    decides: bool,
) -> TextResult:
    chosen = torch.tensor(tokens.ids)
    is_largest = chosen == largest
    over = (~is_largest & ~(gaps <= allowed)).nonzero()
    tied = ~is_largest & (gaps <= allowed)
    place = int(over[0]) if len(over) else int((gaps / allowed).where(tied, -1.0).argmax()) if tied.any() else None
    worst = None
    if place is not None:
        ids = int(chosen[place]), int(largest[place])
        words = ["" if tokenizer is None else tokenizer.decode([one]) for one in ids]
        worst = TokenGap(
            token=place + 1,
            id=ids[0],
            largest_id=ids[1],
            gap=float(gaps[place]),
            allowed=float(allowed[place]),
            text=words[0],
            largest_text=words[1],
        )
    verdict = _verdict(logprobs, is_greedy=not len(over), decides=decides)
    result = TextResult(
        tokens=len(tokens.ids),
        largest=int(is_largest.sum()),
        tied=int(tied.sum()),
        verdict=verdict,
        worst=worst,
        past_end=past_end,
        reason=_UNDECIDED if verdict == "undecided" else "",
    )
    if logprobs is None:
        return result
    return msgspec.structs.replace(
        result,
        logprobs=logprobs.share,
        logprobs_of=logprobs.way,
        worst_logprob=None if logprobs.are_of_model else logprobs.worst,
    )


_UNDECIDED = "a router or another selection may have chosen otherwise by rounding: not judged"


def _verdict(logprobs: _Logprobs | None, *, is_greedy: bool, decides: bool) -> Verdict:
    """Return what is said of the tokens of a text.

    Parameters
    ----------
    is_greedy : bool
        Each token is the most likely one, but for rounding.
    decides : bool
        The model makes decisions, which rounding may turn.
    """
    if logprobs is not None and (logprobs.are_of_model or logprobs.way):
        return "possible" if is_greedy else "sampled"
    if is_greedy and (logprobs is None or not decides):
        return "possible"
    return "undecided" if decides else "impossible"
