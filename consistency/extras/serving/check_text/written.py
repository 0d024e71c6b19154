"""A text that a model has written, as a file or a caller gives it."""

from __future__ import annotations

from typing import Any

import msgspec

from consistency.extras.serving.check_text.sampling import Sampling


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what was written after it.

    Attributes
    ----------
    prompt : str, list of int, or list of dict
        Text, token ids, or messages for the tokenizer's chat template.
    text : str or list of int
        What was written after it: always the most likely token, or sampled, which only log probabilities can tell.
    logprobs : list of float, or None
        The natural log probability of each token of `text`, NaN where none was given or the token is not judged; the
        model's own are of all tokens without temperature.
    name : str
        Where it stands in its file, such as `line 3, sample 2`.
    step : str
        Training step, or version of the weights, that wrote it; empty where the record does not say it.
    sampling : Sampling or None
        How its tokens were drawn, where the record says it.
    judged : list of bool, or None
        Whether the model wrote each token of `text`, False for what a tool or a user said between; None: it wrote all.
    pieces : list of bytes, or None
        The words of each token of `text`, where they were given and the token ids were not.
    prompt_is_rendered : bool
        A prompt in words holds its special tokens already, so the tokenizer is to add none.
    trainer_logprobs : list of float, or None
        The same as `logprobs`, as the trainer computed them, where the record has both.
    logprob_rounding : float
        Largest error of each log probability that comes from how many digits the file has.
    doubt : str
        Why the model may have seen or written other tokens than these; empty where nothing speaks for it.
    """

    prompt: str | list[Any]
    text: str | list[int]
    logprobs: list[float] | None = None
    name: str = ""
    step: str = ""
    sampling: Sampling | None = None
    judged: list[bool] | None = None
    pieces: list[bytes] | None = None
    prompt_is_rendered: bool = False
    trainer_logprobs: list[float] | None = None
    logprob_rounding: float = 0.0
    doubt: str = ""
