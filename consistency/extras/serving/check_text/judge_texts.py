"""Check whether a model could have written texts, and whether their log probabilities are the model's.

A writer that always takes the most likely token takes another one only where rounding has put it above. So the gap of
each token to the largest logit is computed in float64, and what rounding may do to that gap by passes with random
rounding errors in the dtype that the writer is said to have used. Of a sampled text, whose tokens are not the most
likely ones, log probabilities tell that the model computed it. They are judged by themselves, token by token in the
same way, and as a whole beside two healthy passes: whether the tokens are possible and whether the log probabilities
are the model's are two statements.

A text that is wrong is held against what could have written it: log probabilities that a sampler has processed, another
adapter, the mistakes that an engine makes with one, other prompts, other positions. Each is named where it explains
every wrong text that it is tried on.

Of many texts a sample is judged in float64, and the others by one pass in the dtype; where that is not near enough, in
float64 too (`screening.py`).
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from consistency.case.case import Case
from consistency.case.recognition import has_tokenizer
from consistency.errors import InputError, first_line
from consistency.extras.serving.check_text.arithmetic import EngineArithmetic
from consistency.extras.serving.check_text.explaining import with_causes, with_what_is_not_told
from consistency.extras.serving.check_text.judged_text import Step
from consistency.extras.serving.check_text.judging import Judging, Run, dtype_of
from consistency.extras.serving.check_text.log_probabilities import (
    processing_of_sample,
    with_processing,
    with_summary,
    with_surprise,
)
from consistency.extras.serving.check_text.options import NOTHING_STATED, TextOptions, stated_arithmetic
from consistency.extras.serving.check_text.report import TextReport
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.texts import Text, encoded
from consistency.worker.model.inputs import tokenizer_of
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import model_code
from consistency.worker.recorder import Skip


def check_text(
    case: Case, texts: Sequence[Text], *, options: TextOptions = NOTHING_STATED, step: Step | None = None
) -> TextReport:
    """Check whether the model of a case could have written texts, and whether their log probabilities are its own.

    Several adapters of the case are each tried, and the one that wrote a text is named.

    Parameters
    ----------
    texts : sequence of Text
        Each written greedily; or sampled, with log probabilities or with `options.sampling`.
    options : TextOptions
        How they were written.
    step : callable
        Called with the name of the next step.

    Raises
    ------
    InputError
        A text cannot be used, or the model does not run.
    """
    announce = step or _nothing
    with _quietly():
        announce("load")
        model = load_model(case, "cpu")
        tokenizer = None
        if case.factory is None and has_tokenizer(Path(case.base)):
            tokenizer = tokenizer_of(case.base)
        others = _load_others(model, case)
        first = case.adapters[0].name if case.adapters else ""
        run = Run(model=model, tokenizer=tokenizer, options=options, step=announce, first=first, others=others)
        return _checked(run, texts, case.base)


def check_rollouts(
    model_or_case: Any,
    texts: Sequence[Text],
    *,
    tokenizer: Any = None,
    options: TextOptions = NOTHING_STATED,
    step: Step | None = None,
) -> TextReport:
    """Check the log probabilities of rollouts against a model that is loaded, as a trainer has it, or against a case.

    The model is left as it is: a copy on the CPU is judged, in the dtype that its parameters have. A call takes memory
    for the copy and up to 1 GB of logits, and about three passes over a hundred texts on the CPU's cores.

    Parameters
    ----------
    model_or_case : torch.nn.Module or Case
        A model of transformers, or PEFT's with its active adapter; or a case, as `check_text` takes it.
    texts : sequence of Text
        Prompt and text as token ids, or in words with a tokenizer; log probabilities as the engine gave them.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        For texts in words, and to show tokens in words.

    Raises
    ------
    InputError
        A text cannot be used, the model does not run, or its parameters are split over several processes.
    """
    if isinstance(model_or_case, Case):
        return check_text(model_or_case, texts, options=options, step=step)
    with _quietly():
        model = _copy_on_cpu(model_or_case)
        run = Run(model=model, tokenizer=tokenizer, options=options, step=step or _nothing)
        return _checked(run, texts, type(model_or_case).__name__)


def _nothing(_: str) -> None:
    return None


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence what libraries say about themselves."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load_others(model: Any, case: Case) -> list[str]:
    """Load the other adapters of a case into its model, and return their names."""
    names = []
    for adapter in case.adapters[1:]:
        try:
            model.load_adapter(adapter.path, adapter_name=adapter.name)
        except Exception as error:  # PEFT's, and of the files
            reason = first_line(error)
            raise InputError(
                "PEFT cannot load this adapter beside the first", where=adapter.path, got=reason
            ) from error
        names.append(adapter.name)
    model.eval()
    return names


def _copy_on_cpu(model: Any) -> Any:
    """Return a copy of a model on the CPU, in evaluation mode; the model itself is left where and as it is."""
    inner = getattr(model, "module", model)  # of DistributedDataParallel
    copies: dict[int, Any] = {}
    for tensor in (*inner.parameters(), *inner.buffers()):
        if type(tensor).__name__ == "DTensor" or hasattr(tensor, "placements"):
            raise InputError(
                "the model's parameters are split over several processes", got="a DTensor", wanted="whole tensors"
            )
        copied = tensor.detach().to("cpu", copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        copies[id(tensor)] = torch.nn.Parameter(copied, requires_grad=False) if is_parameter else copied
    return copy.deepcopy(inner, copies).eval()


def _checked(run: Run, texts: Sequence[Text], where: str) -> TextReport:
    tokens_of_texts = []
    for number, text in enumerate(texts, 1):
        tokens = encoded(text, run.tokenizer, text.name or f"text {number}")
        sampling = text.sampling or run.options.sampling or Sampling()
        tokens_of_texts.append(replace(tokens, penalties=sampling.penalties))
    try:
        with model_code(run.model):
            arithmetic = stated_arithmetic(run.options, dtype_of(run.model))
            judging = Judging(run=run, texts=texts, tokens=tokens_of_texts, arithmetic=arithmetic)
            judging.judge_sample()
            judging.processing = processing_of_sample(judging)
            judging.judge_rest()
            return _report(judging)
    except Skip as why:
        raise InputError("the model does not run on these texts", where=where, got=str(why)) from why


def _report(judging: Judging) -> TextReport:
    """Return the results of all texts, what explains those that are wrong, and what they do not tell."""
    report = TextReport(dtype=dtype_of(judging.run.model), texts=judging.results())
    report = with_processing(judging, report)
    report = with_summary(judging, report)
    report = with_surprise(judging, report)
    report = with_causes(judging, report, functools.partial(_report_in, judging))
    return with_what_is_not_told(judging, report)


def _report_in(judging: Judging, arithmetic: EngineArithmetic) -> TextReport | None:
    """Return the report of all texts as judged by an arithmetic; None where they lean to a mistake nonetheless."""
    by_arithmetic = Judging(
        run=judging.run,
        texts=judging.texts,
        tokens=list(judging.tokens),
        plain={number: plain for number, plain in judging.plain.items() if number not in judging.writers},
        arithmetic=arithmetic,
        is_found=True,
    )
    by_arithmetic.judge()
    report = _report(by_arithmetic)
    if report.leaning:
        return None
    return msgspec.structs.replace(report, cache=arithmetic.kv_dtype, computed_in=arithmetic.computes_in)
