"""What `LLM.generate` of vLLM returns, dumped: `RequestOutput` with a `CompletionOutput` for each sample.

Fields as in `vllm/outputs.py` and `vllm/logprobs.py` of vllm-project/vllm (main, read in 2026). Its server answers as
OpenAI's does (`openai.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from consistency.errors import InputError
from consistency.extras.serving.check_text.formats.rollout_format import (
    Record,
    RolloutFormat,
    log_probabilities,
    sampling_of,
    token_ids,
)
from consistency.extras.serving.check_text.written import Text


def _fits(record: Record) -> bool:
    return isinstance(record.get("outputs"), list) and "prompt_token_ids" in record


def _texts(record: Record) -> Iterator[Text]:
    # the prompt of an encoder and decoder is what its encoder reads
    key = "prompt_token_ids" if record.get("encoder_prompt_token_ids") is None else "encoder_prompt_token_ids"
    prompt = token_ids(record[key], key)
    sampling = sampling_of(record.get("sampling_params"))
    for output in record["outputs"]:
        if not isinstance(output, Mapping) or "token_ids" not in output:
            raise InputError("an output has no token_ids", wanted="CompletionOutput: index, text, token_ids, logprobs")
        ids = token_ids(output["token_ids"], "token_ids")
        logprobs = _of_chosen(output.get("logprobs"), ids)
        yield Text(prompt=prompt, text=ids, logprobs=logprobs, sampling=sampling)


def _of_chosen(logprobs: Any, ids: Sequence[int]) -> list[float] | None:
    """Return the log probability of each token, of a list that has those of the most likely ones beside it."""
    if isinstance(logprobs, Mapping):
        logprobs = _unflattened(logprobs)
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        return log_probabilities(logprobs, len(ids), "logprobs")
    chosen = []
    for place, (of_place, token) in enumerate(zip(logprobs, ids, strict=True), 1):
        if not isinstance(of_place, Mapping):  # numbers, of the chosen tokens alone
            chosen.append(of_place)
            continue
        entry = of_place.get(str(token), of_place.get(token))
        if entry is None:
            raise InputError("logprobs have not the token that was chosen", got=f"none of id {token} at place {place}")
        chosen.append(entry.get("logprob") if isinstance(entry, Mapping) else entry)
    return log_probabilities(chosen, len(ids), "logprobs")


def _unflattened(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the columns of `FlatLogprobs` (`SamplingParams(flat_logprobs=True)`) as a mapping for each place."""
    columns: list[list[Any]] = []
    for key in ("start_indices", "end_indices", "token_ids", "logprobs"):
        column = flat.get(key)
        if not isinstance(column, list):
            raise InputError("logprobs are neither a list nor FlatLogprobs", got=", ".join(map(str, flat)))
        columns.append(column)
    starts, ends, ids, values = columns
    if (
        len(starts) != len(ends)
        or len(ids) != len(values)
        or not all(isinstance(place, int) for place in starts + ends)
    ):
        raise InputError("FlatLogprobs has columns of other lengths", got=", ".join(str(len(one)) for one in columns))
    of_places = []
    for start, end in zip(starts, ends, strict=True):
        of_places.append(dict(zip(map(str, ids[start:end]), values[start:end], strict=True)))
    return of_places


FORMAT = RolloutFormat(name="vLLM", fits=_fits, texts=_texts)
