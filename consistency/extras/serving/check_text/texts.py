"""The texts of a file, as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from consistency.errors import InputError, first_line


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a JSONL file.

    Attributes
    ----------
    prompt : str, list of int, or list of dict
        Text, token ids, or messages for the tokenizer's chat template.
    text : str or list of int
        What was written after it: always the most likely token, or sampled, which only log probabilities can tell.
    logprobs : list of float, or None
        The natural log probability of each token of `text`; the model's own are of all tokens without temperature.
    """

    prompt: str | list[Any]
    text: str | list[int]
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text as ids: `is_exact` where these are the writer's own, and not its text's."""

    prompt: list[int]
    ids: list[int]
    is_exact: bool
    logprobs: list[float] | None = None


def read_texts(path: Path) -> list[Text]:
    """Read a file of a text per line.

    Raises
    ------
    InputError
        The file cannot be read, has none, or a line is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("the texts cannot be read", where=path, got=first_line(error)) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=Text))
        except msgspec.DecodeError as error:
            raise InputError(f"line {number} is no text", where=path, got=first_line(error), wanted=_FORM) from error
    if not found:
        raise InputError("the file has no text", where=path, wanted=_FORM)
    return found


_FORM = '{"prompt": "…", "text": "…"} a line; both may be token ids, and the prompt messages'


def encoded(text: Text, tokenizer: Any, name: str) -> Tokens:
    """Return a text as ids; `name` says which one it is.

    Raises
    ------
    InputError
        It has no token, needs a tokenizer that is not there, or has another number of log probabilities.
    """
    if tokenizer is None and not (_are_ids(text.prompt) and _are_ids(text.text)):
        raise InputError("the base has no tokenizer", where=name, wanted="prompt and text as token ids")
    try:
        prompt, ids = _ids(text, tokenizer)
    except InputError:
        raise
    except Exception as error:  # the code and the files of any kind of tokenizer, and a chat template's
        raise InputError("its tokenizer does not take it", where=name, got=first_line(error)) from error
    if not prompt or not ids:
        raise InputError("a text needs a token, and one before it", where=name, got=f"{len(prompt)} and {len(ids)}")
    if text.logprobs is not None and len(text.logprobs) != len(ids):
        raise InputError(
            "each token has a log probability",
            where=name,
            got=f"{len(text.logprobs)} of them",
            wanted=f"{len(ids)}, with text as token ids",
        )
    return Tokens(prompt=prompt, ids=ids, is_exact=_are_ids(text.text), logprobs=text.logprobs)


def _are_ids(given: str | Sequence[Any]) -> bool:
    return not isinstance(given, str) and all(isinstance(one, int) and one >= 0 for one in given)


def _ids(text: Text, tokenizer: Any) -> tuple[list[int], list[int]]:
    prompt, special = text.prompt, True
    if not isinstance(prompt, str) and not _are_ids(prompt):
        prompt, special = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True), False
    before = _encode(tokenizer, prompt, special=special) if isinstance(prompt, str) else list(prompt)
    if not isinstance(text.text, str):
        return before, list(text.text)
    if isinstance(prompt, str):  # a space at the border belongs to the first token, and some tokenizers add one
        whole = _encode(tokenizer, prompt + text.text, special=special)
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
    return before, _encode(tokenizer, text.text, special=False)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    end = tokenizer.eos_token_id if special else None
    return ids[:-1] if ids and ids[-1] == end else ids


def other_tokens(tokens: Tokens, place: int, largest: int, tokenizer: Any) -> Iterator[Tokens]:
    """Yield the same text in other tokens, the largest at this place: a model need not write as a tokenizer divides."""
    if tokens.is_exact or tokens.logprobs is not None:
        return
    wanted, begun = tokenizer.decode(tokens.ids), [*tokens.ids[:place], largest]
    if not wanted.startswith(written := tokenizer.decode(begun)):
        return
    ids = [*begun, *_encode(tokenizer, wanted[len(written) :], special=False)]
    if tokenizer.decode(ids) == wanted:
        yield Tokens(prompt=tokens.prompt, ids=ids, is_exact=False)
