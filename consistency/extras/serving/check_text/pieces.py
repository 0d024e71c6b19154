"""The ids of tokens that are known by their words."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
"""What engines write for a token that is a part of a letter, where they give words and no bytes."""


def ids_of_pieces(pieces: Sequence[bytes], tokenizer: Any, guess: Sequence[int]) -> list[int] | None:
    """Return the id of each piece, or None if one is unknown or could be of several tokens.

    Parameters
    ----------
    guess : sequence of int
        Tokens that the tokenizer divides the text into: they decide between tokens of the same words, and which part of
        a letter a token is.
    """
    ids_by_bytes = _ids_by_bytes(tokenizer)
    # a tokenizer's end token may have been taken off the guess
    is_guess_alike = 0 <= len(pieces) - len(guess) <= 1
    ids = []
    for place, piece in enumerate(pieces):
        own = ids_by_bytes.get(piece, [])
        # decoding a first token by itself may have taken its space away
        candidates = [*own, *ids_by_bytes.get(b" " + piece, [])]
        is_part_of_letter = REPLACEMENT in piece
        if is_guess_alike and place < len(guess) and (is_part_of_letter or guess[place] in candidates):
            ids.append(guess[place])
        elif len(own) == 1 and not is_part_of_letter:
            ids.append(own[0])
        else:
            return None
    return ids


@functools.lru_cache(maxsize=2)
def _ids_by_bytes(tokenizer: Any) -> dict[bytes, list[int]]:
    """Return the ids of a tokenizer's vocabulary by the bytes that they stand for."""
    byte_of_letter = _bytes_of_letters() if _is_of_byte_letters(tokenizer) else {}
    added = set(tokenizer.get_added_vocab())
    ids_by_bytes: dict[bytes, list[int]] = {}
    bytes_alone: dict[bytes, list[int]] = {}
    for token, token_id in tokenizer.get_vocab().items():
        if token in added:
            ids_by_bytes.setdefault(token.encode(), []).append(token_id)
        elif _is_byte(token):
            bytes_alone[bytes([int(token[3:5], 16)])] = [token_id]
        else:
            ids_by_bytes.setdefault(_bytes_of(token, byte_of_letter), []).append(token_id)
    # a letter is written as a byte only where no other token is it
    return {**bytes_alone, **ids_by_bytes}


def _is_byte(token: str) -> bool:
    """Report whether a token is SentencePiece's way to write a byte, such as `<0x0A>`."""
    return len(token) == len("<0x0A>") and token.startswith("<0x") and token.endswith(">")


def _bytes_of(token: str, byte_of_letter: dict[str, int]) -> bytes:
    """Return what a token of the vocabulary stands for."""
    if byte_of_letter and all(letter in byte_of_letter for letter in token):
        return bytes(byte_of_letter[letter] for letter in token)
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()  # SentencePiece's letter for a space


def _is_of_byte_letters(tokenizer: Any) -> bool:
    """Report whether each letter of a token stands for a byte, as GPT-2's do."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])


def _bytes_of_letters() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
