"""The form that a file of this folder has, and how the fields of a record are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from consistency.errors import InputError
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.written import Text

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFormat:
    """What a tool writes; a file of this folder has one as `FORMAT`.

    Attributes
    ----------
    name : str
        Name of the tool.
    fits : function
        Report by the names of its fields whether a record is of this tool; only one format may fit a record.
    texts : function
        Yield the texts of a record that fits; a record with several samples has several. A text of which the model
        wrote no token may be among them.
    keeps_empty : bool
        A text without a token is a mistake of the user, and no rollout that was given up.
    """

    name: str
    fits: Callable[[Record], bool]
    texts: Callable[[Record], Iterator[Text]]
    keeps_empty: bool = False


_MOST_IDS = 1 << 31
"""No vocabulary has as many tokens."""


def token_ids(values: Any, key: str) -> list[int]:
    """Return a field of token ids.

    Raises
    ------
    InputError
        It is no list, or has what is no token id.
    """
    if not isinstance(values, list):
        raise InputError(f"{key} is no list of token ids", got=_shown(values))
    for place, value in enumerate(values, 1):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_IDS:
            raise InputError(f"{key} has what is no token id", got=f"{_shown(value)} at place {place}")
    return values


def log_probabilities(values: Any, count: int, key: str) -> list[float] | None:
    """Return a field of log probabilities, NaN where one is None; None where the field is.

    Raises
    ------
    InputError
        It is no list of numbers, or there are not as many as tokens.
    """
    if values is None:
        return None
    if not isinstance(values, list):
        raise InputError(f"{key} is no list of numbers", got=_shown(values))
    _check_count(values, count, key)
    return [_log_probability(value, key, place) for place, value in enumerate(values, 1)]


def _log_probability(value: Any, key: str, place: int) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{key} has what is no number", got=f"{_shown(value)} at place {place}")
    return float(value)


def marks(values: Any, count: int, key: str) -> list[bool]:
    """Return a mask of tokens, of 0 and 1 or false and true; all True where the field is None.

    Raises
    ------
    InputError
        It is no list of these, or there are not as many as tokens.
    """
    if values is None:
        return [True] * count
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        raise InputError(f"{key} is no list of 0 and 1", got=_shown(values))
    _check_count(values, count, key)
    return [bool(value) for value in values]


def _check_count(values: Sequence[Any], count: int, key: str) -> None:
    if len(values) != count:
        raise InputError(f"{key} has not one for each token", got=f"{len(values)} of them", wanted=f"{count}")


def rows_of(record: Record, keys: Sequence[str], batched: str) -> Iterator[Record]:
    """Yield a record for each sample of one whose fields `keys` hold a batch; a record of one sample as it is.

    Parameters
    ----------
    batched : str
        The field by which a batch is told: a list of lists in one.
    """
    samples = record[batched]
    is_batch = isinstance(samples, list) and bool(samples) and all(isinstance(sample, list) for sample in samples)
    if not is_batch:
        yield record
        return
    columns = {key: record[key] for key in keys if isinstance(record.get(key), list)}
    for key, column in columns.items():
        if len(column) != len(samples):
            raise InputError(f"{key} has not one for each sample", got=f"{len(column)}", wanted=f"{len(samples)}")
    for place in range(len(samples)):
        yield {**record, **{key: column[place] for key, column in columns.items()}}


def rollout(
    ids: Sequence[int],
    wrote: Sequence[bool],
    logprobs: Sequence[float] | None,
    *,
    trainer_logprobs: Sequence[float] | None = None,
    step: str = "",
    sampling: Sampling | None = None,
    logprob_rounding: float = 0.0,
) -> Text:
    """Return the text of a conversation as one row of tokens: it begins with the first token that the model wrote.

    What follows its last one is left out. Log probabilities of tokens that it did not write are NaN.

    Parameters
    ----------
    ids, wrote, logprobs, trainer_logprobs : sequence
        One for each token of prompt and text: the id, whether the model wrote it, and its log probabilities.
    """
    places = [place for place, is_of_model in enumerate(wrote) if is_of_model]
    if not places:
        return Text(prompt=list(ids), text=[])
    start, end = places[0], places[-1] + 1
    judged = list(wrote[start:end])

    def of_model(values: Sequence[float] | None) -> list[float] | None:
        if values is None:
            return None
        return [
            value if is_of_model else math.nan for value, is_of_model in zip(values[start:end], judged, strict=True)
        ]

    return Text(
        prompt=list(ids[:start]),
        text=list(ids[start:end]),
        judged=None if all(judged) else judged,
        logprobs=of_model(logprobs),
        trainer_logprobs=of_model(trainer_logprobs),
        step=step,
        sampling=sampling,
        logprob_rounding=logprob_rounding,
    )


def after_prompt(prompt: Sequence[int], logprobs: Sequence[float] | None) -> list[float] | None:
    """Return log probabilities of a text as of prompt and text, NaN of the prompt."""
    return None if logprobs is None else [*[math.nan] * len(prompt), *logprobs]


def unmasked(values: Any, mask: Sequence[bool]) -> list[Any]:
    """Return the values that a mask marks, which leaves padding out."""
    return [value for value, is_kept in zip(values, mask, strict=True) if is_kept]


def request_of(record: Record) -> Record:
    """Return the request that a record answers: what is in `request`, else the record, where users add it."""
    request = record.get("request")
    return request if isinstance(request, Mapping) else record


_ALL_TOKENS = 1 << 30
"""The top-k that SGLang writes for all tokens (`sampling_params.py`, `TOP_K_ALL`)."""


_NAMES_OF_SETTINGS = {
    **{name: name for name in Sampling.__struct_fields__},
    # llama.cpp
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
}
"""The names that engines give the settings of a sampler."""


def sampling_of(settings: Any) -> Sampling | None:
    """Return how tokens were drawn, of settings by the names that engines give them; None where none is there."""
    if not isinstance(settings, Mapping):
        return None
    numbers: dict[str, float] = {}
    for name, setting in _NAMES_OF_SETTINGS.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[setting] = value
    if not numbers:
        return None
    top_k = int(numbers.get("top_k", 0))
    if top_k < 0 or top_k >= _ALL_TOKENS:
        top_k = 0
    sampling = Sampling(
        temperature=max(float(numbers.get("temperature", 1.0)), 0.0),
        top_k=top_k,
        top_p=float(numbers.get("top_p", 1.0)),
        min_p=float(numbers.get("min_p", 0.0)),
    )
    return _with_penalties(sampling, numbers)


def _with_penalties(sampling: Sampling, numbers: Mapping[str, float]) -> Sampling:
    """Return a sampler with its penalties; llama.cpp takes none with 0 to look back to, and -1 is all that it has."""
    last = numbers.get("penalty_last_n")
    if last == 0:
        return sampling
    penalized = replace(
        sampling,
        repetition_penalty=float(numbers.get("repetition_penalty", 1.0)) or 1.0,
        presence_penalty=float(numbers.get("presence_penalty", 0.0)),
        frequency_penalty=float(numbers.get("frequency_penalty", 0.0)),
        penalized_padding=bool(numbers.get("penalized_padding", 0.0)),
    )
    if last is None or not penalized.penalizes:
        return penalized
    return replace(penalized, penalty_last_n=_ALL_TOKENS if last < 0 else int(last))


def as_step(value: Any) -> str:
    """Return a step or a version of the weights as text; of several, each once; empty where there is none."""
    values = value if isinstance(value, list) else [value]
    steps = [str(one) for one in values if one is not None and one != ""]
    return ", ".join(dict.fromkeys(steps))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
