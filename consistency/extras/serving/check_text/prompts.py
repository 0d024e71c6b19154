"""Prompts that an engine may have been given in place of the one that a text names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text, Tokens
from consistency.worker.model.running import base_of

Prompt = tuple[TextCause, str, list[int]]
"""What is wrong with a prompt, in which way, and its token ids."""

_LEAST_CUT = 4
"""Tokens that a prompt is cut to, at least."""

_PADDING = ("pad_token_id", "eos_token_id")
"""Tokens that prompts are filled up with."""

_MOST_PADDING = 8
"""Tokens of padding that are tried, at most: each number takes a pass."""


def other_prompts(text: Text, tokens: Tokens, tokenizer: Any, model: Any) -> Iterator[Prompt]:
    """Yield prompts that an engine may have been given, each once, without the one that the text has."""
    seen = {tuple(tokens.prompt)}
    for cause, about, ids in _all(text, tokens, tokenizer, model):
        if ids and tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield cause, about, ids


def _all(text: Text, tokens: Tokens, tokenizer: Any, model: Any) -> Iterator[Prompt]:
    prompt = tokens.prompt
    yield from _with_other_begin(prompt, tokenizer, model)
    if tokenizer is not None:
        yield from _with_other_spaces(prompt, tokenizer)
        yield from _by_other_templates(text, prompt, tokenizer)
    yield from _cut(prompt)
    yield from _padded(prompt, tokenizer, model)


def _with_other_begin(prompt: list[int], tokenizer: Any, model: Any) -> Iterator[Prompt]:
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is None:
        begin = getattr(getattr(base_of(model), "config", None), "bos_token_id", None)
    if not isinstance(begin, int):
        return
    if prompt[0] != begin:
        yield TextCause.BEGIN_ADDED, "", [begin, *prompt]
        return
    yield TextCause.BEGIN_TWICE, "", [begin, *prompt]
    without = prompt[1:]
    while without and without[0] == begin:  # twice already
        without = without[1:]
    yield TextCause.BEGIN_MISSING, "", without


def _with_other_spaces(prompt: list[int], tokenizer: Any) -> Iterator[Prompt]:
    """Yield the prompt with and without the space at its end, and without its last character: each as it is encoded."""
    with suppress(Exception):  # tokenizers of any kind
        special = set(getattr(tokenizer, "all_special_ids", []))
        begin = prompt[:1] if prompt[0] in special else []
        words_without_begin = tokenizer.decode(prompt[len(begin) :], clean_up_tokenization_spaces=False)
        for cause, about, changed in (
            (TextCause.PROMPT_SPACE, "without the space at its end", words_without_begin.rstrip(" ")),
            (TextCause.PROMPT_SPACE, "without the white space at its end", words_without_begin.rstrip()),
            (TextCause.PROMPT_SPACE, "with a space after it", words_without_begin + " "),
            (TextCause.PROMPT_SPACE, "without the white space around it", words_without_begin.strip()),
            (TextCause.PROMPT_CUT, "without its last character", words_without_begin[:-1]),
        ):
            if changed != words_without_begin:
                ids = tokenizer(changed, add_special_tokens=False)["input_ids"]
                yield cause, about, [*begin, *ids]


def _by_other_templates(text: Text, prompt: list[int], tokenizer: Any) -> Iterator[Prompt]:
    """Yield the prompt by the chat template in other ways, or without it."""
    messages = text.prompt if _are_messages(text.prompt) else None
    if messages is not None:
        yield from _of_messages(messages, tokenizer)
        return
    if getattr(tokenizer, "chat_template", None) is None:
        return
    with suppress(Exception):
        words = text.prompt if isinstance(text.prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
        messages = [{"role": "user", "content": words}]
        yield TextCause.PROMPT_TEMPLATE, "in the chat template, as a user's message", _rendered(messages, tokenizer)


def _of_messages(messages: Any, tokenizer: Any) -> Iterator[Prompt]:
    begin = tokenizer.bos_token_id
    with suppress(Exception):
        rendered = _rendered(messages, tokenizer)
        if isinstance(begin, int):
            yield TextCause.BEGIN_TWICE, "", [begin, *rendered]
    with suppress(Exception):
        about = "the chat template without its generation prompt"
        yield TextCause.PROMPT_TEMPLATE, about, _rendered(messages, tokenizer, add_generation_prompt=False)
    with suppress(Exception):
        words = "\n".join(str(message["content"]) for message in messages)
        about = "the messages without the chat template"
        yield TextCause.PROMPT_TEMPLATE, about, list(tokenizer(words)["input_ids"])
    without_system = [message for message in messages if message.get("role") != "system"]
    if len(without_system) < len(messages):
        with suppress(Exception):
            yield TextCause.PROMPT_TEMPLATE, "without the system message", _rendered(without_system, tokenizer)
    for system in _SYSTEM_MESSAGES:
        with suppress(Exception):
            changed = [{"role": "system", "content": system}, *without_system]
            yield TextCause.PROMPT_TEMPLATE, f"with the system message {system!r}", _rendered(changed, tokenizer)


_SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a helpful assistant", "")
"""System messages that engines and templates add by themselves."""


def _rendered(messages: Any, tokenizer: Any, *, add_generation_prompt: bool = True) -> list[int]:
    words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(words, add_special_tokens=False)["input_ids"])


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _padded(prompt: list[int], tokenizer: Any, model: Any) -> Iterator[Prompt]:
    """Yield the prompt after tokens of padding, which stand before it in a batch of prompts of unequal lengths."""
    generation = getattr(base_of(model), "generation_config", None)
    has_encoder = getattr(getattr(base_of(model), "config", None), "is_encoder_decoder", False)
    # where both are one token, no mask can be made from the ids: so prompts are passed without one
    tokens = [getattr(holder, name, None) for holder in (tokenizer, generation) for name in _PADDING]
    if has_encoder:
        return
    for padding in dict.fromkeys(token for token in tokens if isinstance(token, int)):
        for count in range(1, _MOST_PADDING + 1):
            yield TextCause.PROMPT_PADDED, f"{count} tokens" if count > 1 else "one token", [padding] * count + prompt


def _cut(prompt: list[int]) -> Iterator[Prompt]:
    """Yield the last tokens of the prompt, and the first: as many as a limit may leave, and without one at the end."""
    count = _LEAST_CUT
    lengths = []
    while count < len(prompt):
        lengths.append(count)
        count *= 2
    for count in reversed(lengths):
        yield TextCause.PROMPT_CUT, f"its last {count} tokens", prompt[-count:]
    for count in reversed(lengths):
        yield TextCause.PROMPT_CUT, f"its first {count} tokens", prompt[:count]
    if len(prompt) > 1:
        yield TextCause.PROMPT_CUT, "without its last token", prompt[:-1]
        yield TextCause.PROMPT_CUT, "without its first token", prompt[1:]
