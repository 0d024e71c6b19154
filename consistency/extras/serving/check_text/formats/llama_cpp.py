"""What `/completion` of llama.cpp's server answers.

Fields as in `tools/server/server-task.cpp` and `tools/server/README.md` of ggml-org/llama.cpp (master, read in 2026):
`content`, `tokens` (by `return_tokens`), `completion_probabilities` (by `n_probs`), `generation_settings`, `prompt`,
which has its special tokens. Up to the end of 2024 `completion_probabilities` were `content` and `probs` without ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from consistency.errors import InputError
from consistency.extras.serving.check_text.formats.openai import (
    WrittenToken,
    listed_content,
    logprob_of,
    written_words,
)
from consistency.extras.serving.check_text.formats.rollout_format import (
    Record,
    RolloutFormat,
    log_probabilities,
    request_of,
    sampling_of,
    token_ids,
)
from consistency.extras.serving.check_text.written import Text

_FIELDS = ("completion_probabilities", "generation_settings", "tokens_predicted", "tokens_evaluated")


def _fits(record: Record) -> bool:
    return isinstance(record.get("content"), str) and any(key in record for key in _FIELDS)


def _texts(record: Record) -> Iterator[Text]:
    tokens = _listed(record.get("completion_probabilities"))
    if tokens and all(token.token_id is not None for token in tokens):
        ids = token_ids([token.token_id for token in tokens], "ids of completion_probabilities")
        logprobs = log_probabilities([token.logprob for token in tokens], len(ids), "completion_probabilities")
        written: dict[str, Any] = {"text": ids, "logprobs": logprobs}
    elif record.get("tokens"):
        written = {"text": token_ids(record["tokens"], "tokens")}
    else:
        written = written_words(tokens, lambda answer: answer["content"], record)
    prompt, is_rendered = _prompt(record)
    yield Text(
        prompt=prompt,
        prompt_is_rendered=is_rendered,
        sampling=sampling_of(record.get("generation_settings")),
        **written,
    )


def _listed(probabilities: Any) -> list[WrittenToken]:
    if probabilities is None:
        return []
    if not isinstance(probabilities, list):
        raise InputError("completion_probabilities is no list")
    is_of_2024 = any(isinstance(entry, dict) and "probs" in entry for entry in probabilities)
    if not is_of_2024:
        return listed_content(probabilities)
    tokens = []
    for entry in probabilities:
        if not isinstance(entry, dict) or not isinstance(entry.get("probs"), list):
            raise InputError("completion_probabilities have an entry without probs", wanted="content and probs")
        words = str(entry.get("content", ""))
        of_chosen = [one for one in entry["probs"] if isinstance(one, dict) and one.get("tok_str") == words]
        logprob = logprob_of(of_chosen[0]) if of_chosen else float("nan")
        tokens.append(WrittenToken(None, words.encode(errors="replace"), logprob))
    return tokens


def _prompt(record: Record) -> tuple[str | list[Any], bool]:
    """Return the prompt, as token ids where the request has them, and whether it has its special tokens."""
    asked = request_of(record).get("prompt")
    if isinstance(asked, list):
        return token_ids(asked, "prompt"), False
    if isinstance(record.get("prompt"), str):
        # `stop_type` came when the prompt became what the server read; before, it was what was asked
        return record["prompt"], "stop_type" in record
    if isinstance(asked, str):
        return asked, False
    raise InputError("the answer does not say what it was asked", wanted="prompt, or the request beside the answer")


FORMAT = RolloutFormat(name="llama.cpp", fits=_fits, texts=_texts)
