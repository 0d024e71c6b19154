"""Every word of a diagnosis has a phrase, and a word of another version is kept."""

from __future__ import annotations

import re

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.records import TensorRecord
from consistency.numerics.words import Word

LATER = "a-word-of-a-later-version"


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("word", Word)
def test_each_word_has_a_phrase_that_continues_a_sentence(word: Word, computed: bool) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", word)
    assert word.phrase != word, "a member without a phrase"
    text = word.about("3 of 4 lora_B tensors", computed=computed)
    assert text.count("3 of 4 lora_B tensors") == 1
    assert re.fullmatch(r"(NaN|[a-z0-9]).*[^.,;: ]", text)
    assert "  " not in text
    assert re.fullmatch(r"(deliver|flip|lose|fail)\b.*[^.,;: ]|fail", word.copies)


def test_a_computed_tensor_has_a_phrase_of_its_own() -> None:
    assert Word.ZEROS.about("w") == "zeros where the file is nonzero in w"
    assert Word.ZEROS.about("w", computed=True) == "zeros instead of a result in w"
    assert Word.SHAPE.computed == Word.SHAPE.phrase
    assert Word.MISSING.about("2 of 3 lora_B tensors") == "2 of 3 lora_B tensors missing"


def test_a_word_of_another_version_is_read_shown_and_written_again() -> None:
    record = TensorRecord(rule="bitwise", status="equal", stage="adapter", layer="a", tensor="w", word=Word(LATER))
    read = decode_json(encode_json(record), TensorRecord)
    assert read == record
    assert read.word is not None
    assert read.word.about("w") == f"{LATER} in w"
    assert LATER not in list(Word)


def test_a_word_is_a_string_in_json() -> None:
    record = TensorRecord(rule="bitwise", status="equal", stage="adapter", layer="a", tensor="w", word=Word.BIT_FLIP)
    raw = encode_json(record)
    assert b'"word":"bit-flip"' in raw
    assert decode_json(raw, TensorRecord).word is Word.BIT_FLIP
