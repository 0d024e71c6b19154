"""The texts of a file, as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from consistency.errors import InputError, first_line
from consistency.extras.serving.check_text.sampling import Sampling


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
    name: str = ""
    sampling: Sampling | None = None
    judged: list[bool] | None = None
    doubt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text as token ids.

    Attributes
    ----------
    is_exact : bool
        Whether these are the writer's own ids. Else a tokenizer has divided the text, maybe otherwise than the writer.
    """

    prompt: list[int]
    ids: list[int]
    is_exact: bool
    logprobs: list[float] | None = None
    judged: list[bool] | None = None

    @property
    def judged_places(self) -> list[int]:
        """Places of the tokens that are judged, from 0 on."""
        if self.judged is None:
            return list(range(len(self.ids)))
        return [place for place, is_judged in enumerate(self.judged) if is_judged]

    @property
    def judged_logprobs(self) -> torch.Tensor | None:
        """Log probabilities of the tokens that are judged, `(tokens,)` float64; None where the text has none."""
        if self.logprobs is None:
            return None
        values = torch.tensor([self.logprobs[place] for place in self.judged_places], dtype=torch.float64)
        return None if bool(values.isnan().all()) else values


def read_texts(path: Path) -> list[Text]:
    """Read a JSONL file with a text in each line; empty lines are left out.

    Raises
    ------
    InputError
        The file cannot be read or has no text, or a line is not one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("the texts cannot be read", where=path, got=first_line(error)) from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            texts.append(msgspec.json.decode(line, type=Text))
        except msgspec.DecodeError as error:
            raise InputError(f"line {number} is no text", where=path, got=first_line(error), wanted=_FORM) from error
    if not texts:
        raise InputError("the file has no text", where=path, wanted=_FORM)
    return texts


_FORM = '{"prompt": "…", "text": "…"} a line; both may be token ids, and the prompt messages'


def encoded(text: Text, tokenizer: Any, name: str) -> Tokens:
    """Return a text as token ids; `name` names it in errors.

    Raises
    ------
    InputError
        It has no token, needs a tokenizer that is not there, or has another number of log probabilities than tokens.
    """
    if tokenizer is None and not (_are_ids(text.prompt) and _are_ids(text.text)):
        raise InputError("the base has no tokenizer", where=name, wanted="prompt and text as token ids")
    try:
        prompt, ids = _prompt_and_text_ids(text, tokenizer)
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


def _are_ids(content: str | Sequence[Any]) -> bool:
    if isinstance(content, str):
        return False
    return all(isinstance(token, int) and token >= 0 for token in content)


def _prompt_and_text_ids(text: Text, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and of the text after it."""
    prompt, adds_special = text.prompt, True
    if not isinstance(prompt, str) and not _are_ids(prompt):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        adds_special = False  # a chat template writes the special tokens itself
    prompt_ids = _encode(tokenizer, prompt, adds_special=adds_special) if isinstance(prompt, str) else list(prompt)
    if not isinstance(text.text, str):
        return prompt_ids, list(text.text)
    if isinstance(prompt, str):  # a space at the border belongs to the first token, and some tokenizers add one
        whole = _encode(tokenizer, prompt + text.text, adds_special=adds_special)
        if whole[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, whole[len(prompt_ids) :]
    return prompt_ids, _encode(tokenizer, text.text, adds_special=False)


def _encode(tokenizer: Any, text: str, *, adds_special: bool) -> list[int]:
    """Return the ids of a text, without the end that some tokenizers put after it."""
    ids = list(tokenizer(text, add_special_tokens=adds_special)["input_ids"])
    if adds_special and ids and ids[-1] == tokenizer.eos_token_id:
        return ids[:-1]
    return ids


def other_tokens(tokens: Tokens, place: int, largest: int, tokenizer: Any) -> Iterator[Tokens]:
    """Yield the same text in other tokens, if there is one that has the largest token at this place.

    A model need not write the tokens that a tokenizer divides its text into.
    """
    if tokens.is_exact or tokens.logprobs is not None:
        return
    wanted = tokenizer.decode(tokens.ids)
    first_ids = [*tokens.ids[:place], largest]
    first_words = tokenizer.decode(first_ids)
    if not wanted.startswith(first_words):
        return
    ids = [*first_ids, *_encode(tokenizer, wanted[len(first_words) :], adds_special=False)]
    if tokenizer.decode(ids) == wanted:
        yield Tokens(prompt=tokens.prompt, ids=ids, is_exact=False)
