"""Every word of a diagnosis has a phrase, and a word of another version is kept."""

from __future__ import annotations

import re

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.records import TensorRecord
from consistency.case.stages import SPECS
from consistency.numerics import words
from consistency.numerics.words import Word

LATER = "a-word-of-a-later-version"

assert SPECS, "with them come the words that stages declare"
DECLARED = words.declared()


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("word", DECLARED)
def test_each_word_has_a_phrase_that_continues_a_sentence(word: Word, computed: bool) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", word)
    assert words.phrase_of(word) != word, "a word without a phrase"
    text = words.about(word, "3 of 4 lora_B tensors", computed=computed)
    assert text.count("3 of 4 lora_B tensors") == 1
    assert re.fullmatch(r"(NaN|[a-z0-9]).*[^.,;: ]", text)
    assert "  " not in text
    assert re.fullmatch(r"(deliver|flip|lose|fail)\b.*[^.,;: ]|fail", words.of_copies(word))


def test_a_computed_tensor_has_a_phrase_of_its_own() -> None:
    assert words.about(words.ZEROS, "w") == "zeros where the file is nonzero in w"
    assert words.about(words.ZEROS, "w", computed=True) == "zeros instead of a result in w"
    assert words.phrase_of(words.SHAPE, computed=True) == words.phrase_of(words.SHAPE)
    assert words.about(words.MISSING, "2 of 3 lora_B tensors") == "2 of 3 lora_B tensors missing"


def test_a_word_of_another_version_is_read_shown_and_written_again() -> None:
    record = TensorRecord(rule="bitwise", status="equal", stage="adapter", layer="a", tensor="w", word=Word(LATER))
    read = decode_json(encode_json(record), TensorRecord)
    assert read == record
    assert read.word is not None
    assert words.about(read.word, "w") == f"{LATER} in w"
    assert LATER not in words.declared()


def test_a_word_is_a_string_in_json() -> None:
    record = TensorRecord(rule="bitwise", status="equal", stage="adapter", layer="a", tensor="w", word=words.BIT_FLIP)
    raw = encode_json(record)
    assert b'"word":"bit-flip"' in raw
    assert decode_json(raw, TensorRecord).word == words.BIT_FLIP


def test_one_word_has_one_meaning() -> None:
    assert (
        words.declare(
            "zeros",
            phrase="zeros where the file is nonzero",
            computed="zeros instead of a result",
            copies="deliver zeros",
        )
        == words.ZEROS
    )
    with pytest.raises(ValueError, match="the word zeros is declared already, with another meaning"):
        words.declare("zeros", phrase="nothing at all")


def test_a_word_that_is_given_is_checked() -> None:
    assert words.registered("bit-flip") == words.BIT_FLIP
    with pytest.raises(ValueError, match="no word of a diagnosis: bit-flop"):
        words.registered("bit-flop")
