"""What `/generate` of SGLang answers, and `Engine.generate` returns.

Fields as in `sglang/srt/managers/tokenizer_manager.py` of sglang 0.5.23: `text`, `output_ids`, `prompt_token_ids` (by
`return_prompt_token_ids`) and `meta_info`, whose `output_token_logprobs` are `[log probability, id, words or null]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from consistency.errors import InputError
from consistency.extras.serving.check_text.formats.rollout_format import (
    Record,
    RolloutFormat,
    as_step,
    log_probabilities,
    request_of,
    sampling_of,
    token_ids,
)
from consistency.extras.serving.check_text.written import Text


def _fits(record: Record) -> bool:
    return isinstance(record.get("meta_info"), dict) and ("text" in record or "output_ids" in record)


def _texts(record: Record) -> Iterator[Text]:
    meta, request = record["meta_info"], request_of(record)
    triples = _triples(meta.get("output_token_logprobs"), "output_token_logprobs")
    text: str | list[int] = record.get("text", "")
    logprobs = None
    if "output_ids" in record:
        text = token_ids(record["output_ids"], "output_ids")
    elif triples is not None:
        text = token_ids([triple[1] for triple in triples], "ids of output_token_logprobs")
    if triples is not None:
        logprobs = log_probabilities([triple[0] for triple in triples], len(text), "output_token_logprobs")
    step = as_step(meta.get("weight_version"))
    if isinstance(meta.get("weight_versions"), list):
        step = as_step([span.get("version") for span in meta["weight_versions"] if isinstance(span, dict)])
    yield Text(
        prompt=_prompt(record, request, meta),
        text=text,
        logprobs=logprobs,
        step="" if step == "default" else step,  # SGLang's name of weights that were never updated
        sampling=sampling_of(request.get("sampling_params")),
    )


def _prompt(record: Record, request: Record, meta: dict[str, Any]) -> str | list[int]:
    if "prompt_token_ids" in record:
        return token_ids(record["prompt_token_ids"], "prompt_token_ids")
    for source in (record, request):
        if "input_ids" in source:
            return token_ids(source["input_ids"], "input_ids")
    triples = _triples(meta.get("input_token_logprobs"), "input_token_logprobs")
    # with logprob_start_len they begin later in the prompt
    if triples and len(triples) == meta.get("prompt_tokens"):
        return token_ids([triple[1] for triple in triples], "ids of input_token_logprobs")
    words = request.get("text") if request is not record else record.get("prompt")
    if not isinstance(words, str):
        raise InputError(
            "the answer does not say what it was asked",
            wanted="return_prompt_token_ids in the request, or its input_ids beside the answer",
        )
    return words


def _triples(values: Any, key: str) -> list[list[Any]] | None:
    if values is None:
        return None
    if not isinstance(values, list) or any(not isinstance(value, list) or len(value) < 2 for value in values):
        raise InputError(f"{key} are no list of [log probability, id, words]")
    return values


FORMAT = RolloutFormat(name="SGLang", fits=_fits, texts=_texts)
