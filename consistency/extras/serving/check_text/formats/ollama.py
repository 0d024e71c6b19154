"""What `/api/generate` and `/api/chat` of Ollama answer, not as a stream.

Fields as in `api/types.go` of ollama/ollama (0.33): `response` or `message`, `done`, and `logprobs`, each with `token`,
`bytes` and `logprob`. It gives no token ids, and does not repeat the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from consistency.errors import InputError
from consistency.extras.serving.check_text.formats.openai import listed_content, written_words
from consistency.extras.serving.check_text.formats.rollout_format import (
    Record,
    RolloutFormat,
    request_of,
    sampling_of,
)
from consistency.extras.serving.check_text.written import Text

_TEMPLATE = "Ollama's template of the prompt may be another than the tokenizer's"


def _fits(record: Record) -> bool:
    return isinstance(record.get("done"), bool) and ("response" in record or "message" in record)


def _texts(record: Record) -> Iterator[Text]:
    if not record["done"]:
        raise InputError("it is a piece of a stream", wanted='the whole answer, with "stream": false')
    request = request_of(record)
    logprobs = record.get("logprobs")
    tokens = listed_content(logprobs) if isinstance(logprobs, list) else []
    prompt, doubt = _prompt(request)
    yield Text(
        prompt=prompt,
        sampling=sampling_of(request.get("options")),
        doubt=doubt,
        **written_words(tokens, _words, record),
    )


def _words(record: Record) -> str:
    message = record.get("message")
    answer = message if isinstance(message, dict) else record
    words = answer.get("content") if answer is message else answer.get("response")
    hidden = [key for key in ("thinking", "tool_calls") if answer.get(key)]
    if hidden or not isinstance(words, str):
        raise InputError(
            "the words are not all that the model wrote",
            got=f"an answer with {', '.join(hidden) or 'no words'}",
            wanted="logprobs in the request",
        )
    return words


def _prompt(request: Record) -> tuple[str | list[Any], str]:
    """Return the prompt, and the doubt that a template which is not known here leaves."""
    if isinstance(request.get("messages"), list):
        return request["messages"], _TEMPLATE
    prompt = request.get("prompt")
    if not isinstance(prompt, str):
        raise InputError("the answer does not say what it was asked", wanted="prompt or messages beside the answer")
    if request.get("raw"):
        return prompt, ""
    system = request.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return [*messages, {"role": "user", "content": prompt}], _TEMPLATE


FORMAT = RolloutFormat(name="Ollama", fits=_fits, texts=_texts)
