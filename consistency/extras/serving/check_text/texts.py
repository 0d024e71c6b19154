"""The texts of a file, as token ids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from consistency.errors import InputError, first_line
from consistency.extras.serving.check_text.files import read_records
from consistency.extras.serving.check_text.formats.registry import texts_of
from consistency.extras.serving.check_text.pieces import REPLACEMENT, ids_of_pieces
from consistency.extras.serving.check_text.sampling import NO_PENALTIES, Sampling
from consistency.extras.serving.check_text.written import Text

__all__ = ["Text", "Tokens", "encoded", "other_tokens", "read_texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text as token ids.

    Attributes
    ----------
    is_exact : bool
        Whether these are the writer's own ids. Else a tokenizer has divided the text, maybe otherwise than the writer.
    logprobs : list of float, or None
        One for each of `ids`, NaN where none was given or the token is not judged.
    judged : list of bool, or None
        Whether the model wrote each of `ids`; None: it wrote all.
    logprob_rounding : float
        Largest error of each log probability that comes from how many digits the file has.
    trainer_logprobs : list of float, or None
        The same as `logprobs`, as the trainer computed them.
    penalties : Sampling
        The penalties by which its tokens were chosen, as far as they are stated.
    """

    prompt: list[int]
    ids: list[int]
    is_exact: bool
    logprobs: list[float] | None = None
    judged: list[bool] | None = None
    logprob_rounding: float = 0.0
    trainer_logprobs: list[float] | None = None
    penalties: Sampling = NO_PENALTIES

    @property
    def judged_places(self) -> list[int]:
        """Places of the tokens that are judged, from 0 on."""
        if self.judged is None:
            return list(range(len(self.ids)))
        return [place for place, is_judged in enumerate(self.judged) if is_judged]

    @property
    def judged_logprobs(self) -> torch.Tensor | None:
        """Log probabilities of the tokens that are judged, `(tokens,)` float64; None where the text has none."""
        return self._judged(self.logprobs)

    @property
    def judged_trainer_logprobs(self) -> torch.Tensor | None:
        """The trainer's log probabilities of the tokens that are judged, `(tokens,)` float64; None for none."""
        return self._judged(self.trainer_logprobs)

    def _judged(self, logprobs: list[float] | None) -> torch.Tensor | None:
        if logprobs is None:
            return None
        values = torch.tensor([logprobs[place] for place in self.judged_places], dtype=torch.float64)
        return None if bool(values.isnan().all()) else values


def read_texts(path: Path) -> list[Text]:
    """Read the texts of a file that an engine, a trainer or a user wrote; samples without a token are left out.

    Raises
    ------
    InputError
        The file cannot be read or has no text, or a record is not one: it says which.
    """
    texts: list[Text] = []
    for place, record in read_records(path):
        try:
            texts += texts_of(record, place)
        except InputError as error:
            error.where = str(path)
            raise
    if not texts:
        raise InputError("the file has no text", where=path, wanted=_FORM)
    return texts


_FORM = '{"prompt": "…", "text": "…"} a line; both may be token ids, and the prompt messages'


def encoded(text: Text, tokenizer: Any, name: str) -> Tokens:
    """Return a text as token ids; `name` names it in errors.

    Raises
    ------
    InputError
        It has no token, needs a tokenizer that is not there, or has another number of log probabilities, or of marks
        of what is judged, than tokens.
    """
    if tokenizer is None and not (_are_ids(text.prompt) and _are_ids(text.text)):
        raise InputError("the base has no tokenizer", where=name, wanted="prompt and text as token ids")
    prompt, ids, ids_of_writer = _divided(text, tokenizer, name)
    if ids_of_writer is not None:
        ids = ids_of_writer
    if not prompt or not ids:
        raise InputError("a text needs a token, and one before it", where=name, got=f"{len(prompt)} and {len(ids)}")
    _check_lengths(text, len(ids), name)
    return Tokens(
        prompt=prompt,
        ids=ids,
        is_exact=_are_ids(text.text) or ids_of_writer is not None,
        logprobs=_judged_alone(text),
        judged=text.judged,
        logprob_rounding=text.logprob_rounding,
        trainer_logprobs=text.trainer_logprobs,
    )


def _divided(text: Text, tokenizer: Any, name: str) -> tuple[list[int], list[int], list[int] | None]:
    """Return the ids of the prompt, of the text, and of the writer's own pieces; None where it gave none that tell."""
    try:
        prompt, ids = _prompt_and_text_ids(text, tokenizer)
        ids_of_writer = None if text.pieces is None else ids_of_pieces(text.pieces, tokenizer, ids)
    except InputError:
        raise
    except Exception as error:  # the code and the files of any kind of tokenizer, and a chat template's
        raise InputError("its tokenizer does not take it", where=name, got=first_line(error)) from error
    are_pieces_lost = text.pieces is not None and any(REPLACEMENT in piece for piece in text.pieces)
    if ids_of_writer is None and are_pieces_lost:
        raise InputError(
            "the words of a token are lost: it is a part of a letter",
            where=name,
            got=f"{REPLACEMENT.decode()} in its place",
            wanted="text as token ids, or the bytes of each token",
        )
    return prompt, ids, ids_of_writer


def _check_lengths(text: Text, count: int, name: str) -> None:
    """Raise InputError unless whatever is given for each token is given for as many tokens as there are."""
    for what, values in (
        ("a log probability", text.logprobs),
        ("a log probability of the trainer", text.trainer_logprobs),
        ("a mark whether it is judged", text.judged),
    ):
        if values is not None and len(values) != count:
            raise InputError(
                f"each token has {what}",
                where=name,
                got=f"{len(values)} of them",
                wanted=f"{count}, with text as token ids",
            )
    if text.judged is not None and not any(text.judged):
        raise InputError("a text needs a token that the model wrote", where=name, got="judged is false of all")


def _judged_alone(text: Text) -> list[float] | None:
    """Return the log probabilities, NaN for tokens that are not judged; None where there are none."""
    if text.logprobs is None or text.judged is None:
        return text.logprobs
    pairs = zip(text.logprobs, text.judged, strict=True)
    return [value if is_judged else math.nan for value, is_judged in pairs]


def _are_ids(content: str | Sequence[Any]) -> bool:
    if isinstance(content, str):
        return False
    return all(isinstance(token, int) and token >= 0 for token in content)


def _prompt_and_text_ids(text: Text, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and of the text after it."""
    prompt, adds_special = text.prompt, not text.prompt_is_rendered
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
    if tokens.is_exact or tokens.logprobs is not None or tokens.judged is not None:
        return
    wanted = tokenizer.decode(tokens.ids)
    first_ids = [*tokens.ids[:place], largest]
    first_words = tokenizer.decode(first_ids)
    if not wanted.startswith(first_words):
        return
    ids = [*first_ids, *_encode(tokenizer, wanted[len(first_words) :], adds_special=False)]
    if tokenizer.decode(ids) == wanted:
        yield replace(tokens, ids=ids)
