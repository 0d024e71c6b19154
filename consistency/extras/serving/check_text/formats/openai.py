"""Answers of `/v1/completions` and `/v1/chat/completions`, by OpenAI and by every engine that answers as it does.

OpenAI's fields as in `openai/types/completion_choice.py` and `openai/types/chat/` of openai 3.57. What others add:

* vLLM (`vllm/entrypoints/openai/*/protocol.py`, main, read in 2026): by `return_token_ids` the `token_ids` of a choice,
  and `prompt_token_ids` of a completion's choice or of a chat's answer; tokens written `token_id:5` by
  `return_tokens_as_token_ids`; `prompt_text`.
* SGLang (`sglang/srt/entrypoints/openai/protocol.py`, 0.5.23): `token_ids`, `response_token_ids` and
  `prompt_token_ids` of a choice; `sglext` with `input_ids` and `output_ids`; `metadata.weight_version`.
* llama.cpp (`tools/server/server-task.cpp`): `id` beside each token's log probability.
* Ollama (`openai/openai.go`, 0.33): log probabilities of a chat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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
from consistency.extras.serving.check_text.pieces import REPLACEMENT
from consistency.extras.serving.check_text.written import Text

_ID = "token_id:"
"""What vLLM writes before a token's id in the place of its words."""


class WrittenToken(NamedTuple):
    """A token of a list of log probabilities.

    Attributes
    ----------
    token_id : object
        Its id; None where only its words are given.
    piece : bytes
        Its words.
    logprob : object
        Its log probability; None where none is given.
    """

    token_id: Any
    piece: bytes
    logprob: Any


def _fits(record: Record) -> bool:
    return isinstance(record.get("choices"), list)


def _texts(record: Record) -> Iterator[Text]:
    if str(record.get("object", "")).endswith("chunk"):
        raise InputError("it is a piece of a stream", wanted="the whole answer, without stream")
    request = request_of(record)
    metadata = record.get("metadata")
    step = as_step(metadata.get("weight_version")) if isinstance(metadata, dict) else ""
    for place, choice in enumerate(record["choices"]):
        if not isinstance(choice, dict):
            raise InputError("a choice is no JSON object")
        tokens = _listed(choice.get("logprobs"))
        ids = _ids(record, choice, place)
        if ids is None and tokens and all(token.token_id is not None for token in tokens):
            ids = token_ids([token.token_id for token in tokens], "ids of logprobs")
        written = _written_ids(ids, tokens) if ids is not None else written_words(tokens, _words, choice)
        prompt, is_rendered = _prompt(record, request, choice, place)
        yield Text(
            prompt=prompt,
            prompt_is_rendered=is_rendered,
            step="" if step == "default" else step,
            sampling=sampling_of(request),
            doubt=_doubt(request, prompt),
            **written,
        )


def _doubt(request: Record, prompt: str | list[Any]) -> str:
    is_messages = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if is_messages and request.get("tools"):
        return "the request names tools, which the chat template is not given here"
    return ""


def _ids(record: Record, choice: Record, place: int) -> list[int] | None:
    """Return the ids that an engine gives beside the words."""
    for key in ("token_ids", "response_token_ids"):
        if choice.get(key) is not None:
            return token_ids(choice[key], key)
    extension = record.get("sglext")
    if isinstance(extension, dict) and isinstance(extension.get("output_ids"), list):
        samples = extension["output_ids"]
        return token_ids(samples[place] if place < len(samples) else None, "sglext.output_ids")
    return None


def _written_ids(ids: list[int], tokens: list[WrittenToken]) -> dict[str, Any]:
    """Return the fields of a text of known ids; with `echo` the prompt's log probabilities come first."""
    if not tokens:
        return {"text": ids}
    values = [token.logprob for token in tokens]
    if len(values) > len(ids) and values[0] is None:
        values = values[len(values) - len(ids) :]
    return {"text": ids, "logprobs": log_probabilities(values, len(ids), "logprobs")}


def written_words(tokens: list[WrittenToken], words: Any, choice: Record) -> dict[str, Any]:
    """Return the fields of a text of which no ids are known.

    Parameters
    ----------
    words : function
        Return the words of `choice`, where it has no log probabilities.
    """
    # the end of a text has no words, and a tokenizer may have several
    while tokens and not tokens[-1].piece:
        tokens = tokens[:-1]
    if not tokens:
        return {"text": words(choice)}
    values = [token.logprob for token in tokens]
    if values[0] is None:
        raise InputError(
            "the prompt stands before the text", wanted="the answer without echo, or with return_token_ids"
        )
    pieces = [token.piece for token in tokens]
    text = b"".join(pieces)
    return {
        "text": _whole_words(choice, pieces) if REPLACEMENT in text else text.decode(errors="replace"),
        "pieces": pieces,
        "logprobs": log_probabilities(values, len(pieces), "logprobs"),
    }


def _whole_words(choice: Record, pieces: list[bytes]) -> str:
    """Return the words of a text whose tokens are parts of letters: as the answer has them, and the end token."""
    message = choice.get("message")
    source = message if isinstance(message, dict) else choice
    last = pieces[-1].decode(errors="replace")
    for key in ("text", "content", "response"):
        words = source.get(key)
        if not isinstance(words, str):
            continue
        has_end = words.endswith(last) or REPLACEMENT in pieces[-1]
        return words if has_end else words + last
    return b"".join(pieces).decode(errors="replace")


def _listed(logprobs: Any) -> list[WrittenToken]:
    """Return the tokens of a choice's log probabilities; none where it has none."""
    if not isinstance(logprobs, dict):
        return []
    if isinstance(logprobs.get("content"), list):
        return listed_content(logprobs["content"])
    words, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(words, list) or not isinstance(values, list) or len(words) != len(values):
        raise InputError("logprobs have not one for each token", wanted="tokens and token_logprobs, or content")
    return [_written_token(str(token), None, value) for token, value in zip(words, values, strict=True)]


def listed_content(content: list[Any]) -> list[WrittenToken]:
    """Return the tokens of a list of `{"token", "bytes", "logprob"}`; llama.cpp's have an `id`, and may have a `prob`.

    Raises
    ------
    InputError
        An entry is none of these.
    """
    tokens = []
    for entry in content:
        if not isinstance(entry, dict) or "token" not in entry:
            raise InputError("logprobs have an entry without token", wanted="token, logprob and bytes")
        token = _written_token(str(entry["token"]), entry.get("bytes"), logprob_of(entry))
        if "id" in entry:
            token = token._replace(token_id=entry["id"])
        tokens.append(token)
    return tokens


def logprob_of(entry: Record) -> Any:
    """Return the log probability of an entry that may have a probability in its place."""
    probability = entry.get("prob")
    if "logprob" in entry or not isinstance(probability, int | float):
        return entry.get("logprob")
    return math.log(probability) if probability > 0 else -math.inf


def _written_token(words: str, content: Any, logprob: Any) -> WrittenToken:
    number = words.removeprefix(_ID)
    if number != words and number.isdecimal():
        return WrittenToken(int(number), b"", logprob)
    is_bytes = isinstance(content, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in content)
    piece = bytes(content) if is_bytes and content else words.encode(errors="replace")
    return WrittenToken(None, piece, logprob)


def _words(choice: Record) -> str:
    """Return the words of a choice, if they are all that was written."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    message = choice.get("message")
    if not isinstance(message, dict):
        raise InputError("a choice has neither text nor message", got=", ".join(map(str, choice)))
    hidden = [key for key in ("tool_calls", "reasoning", "reasoning_content", "thinking") if message.get(key)]
    if hidden or not isinstance(message.get("content"), str):
        raise InputError(
            "the words are not all that the model wrote",
            got=f"a message with {', '.join(hidden) or 'no content'}",
            wanted="token ids (return_token_ids), or logprobs",
        )
    return str(message["content"])


def _prompt(record: Record, request: Record, choice: Record, place: int) -> tuple[str | list[Any], bool]:
    """Return the prompt of a choice, and whether it is one in words with its special tokens."""
    for source in (choice, record):
        if source.get("prompt_token_ids") is not None:
            return token_ids(source["prompt_token_ids"], "prompt_token_ids"), False
    extension = record.get("sglext")
    if isinstance(extension, dict) and extension.get("input_ids") is not None:
        return token_ids(extension["input_ids"], "sglext.input_ids"), False
    if isinstance(record.get("prompt_text"), str):
        return record["prompt_text"], True
    if isinstance(request.get("messages"), list):
        return request["messages"], False
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        # several prompts: the choices of the first come first
        samples = max(len(record["choices"]) // len(prompt), 1)
        prompt = prompt[min(place // samples, len(prompt) - 1)]
    if isinstance(prompt, str):
        return prompt, False
    if prompt is not None:
        return token_ids(prompt, "prompt"), False
    raise InputError(
        "the answer does not say what it was asked",
        wanted="return_token_ids in the request (vLLM), or its prompt or messages beside the answer",
    )


FORMAT = RolloutFormat(name="OpenAI's API", fits=_fits, texts=_texts)
