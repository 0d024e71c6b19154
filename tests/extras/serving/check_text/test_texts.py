"""A text becomes the writer's own token ids, by ids or by the words of each token, with what is judged of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from consistency.case.builtin import builtin_folder
from consistency.errors import InputError
from consistency.extras.serving.check_text.formats.registry import texts_of
from consistency.extras.serving.check_text.pieces import REPLACEMENT, ids_of_pieces
from consistency.extras.serving.check_text.texts import Text, encoded, other_tokens


@pytest.fixture(scope="module")
def of_bytes() -> Any:
    """A tokenizer whose letters stand for bytes."""
    return transformers.AutoTokenizer.from_pretrained(builtin_folder("llama") / "base")


@pytest.fixture(scope="module")
def of_spaces() -> Any:
    """A tokenizer as SentencePiece's: a letter for a space, and tokens that are bytes."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁blue", "blue", "▁sky", "."]
    vocabulary = [(word, -float(place)) for place, word in enumerate(words)]
    made = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Prepend("▁")
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def test_the_words_of_each_token_give_the_writers_ids(of_bytes: Any) -> None:
    words = "The licensor grants é to you"
    ids = of_bytes(words)["input_ids"]
    # a writer's own division: each token cut into its bytes, which are all in the vocabulary
    single = [of_bytes.convert_tokens_to_ids(letter) for one in ids for letter in of_bytes.convert_ids_to_tokens(one)]
    for own in (ids, single):
        pieces = [bytes_of(of_bytes, one) for one in own]
        assert ids_of_pieces(pieces, of_bytes, ids) == own
        text = Text(prompt="In", text=words, pieces=pieces, logprobs=[-0.5] * len(own))
        tokens = encoded(text, of_bytes, "text 1")
        assert (tokens.ids, tokens.is_exact) == (own, True)
    assert ids_of_pieces([b"no such token"], of_bytes, ids) is None
    text = Text(prompt="In", text=words, pieces=[words.encode()])
    assert not encoded(text, of_bytes, "text 1").is_exact


def test_parts_of_letters_are_told_by_the_whole_words_or_refused(of_bytes: Any) -> None:
    words = "né é"
    ids = of_bytes(words)["input_ids"]
    pieces = [of_bytes.decode([one]).encode() for one in ids]
    assert sum(REPLACEMENT in piece for piece in pieces) >= 2
    end = of_bytes.eos_token
    choice = {
        "message": {"role": "assistant", "content": words},
        "logprobs": {"content": [{"token": piece.decode(), "logprob": -0.5} for piece in [*pieces, end.encode()]]},
    }
    (text,) = texts_of({"object": "chat.completion", "choices": [choice], "prompt": "In"}, "line 1")
    tokens = encoded(text, of_bytes, "text 1")
    assert (tokens.ids, tokens.is_exact) == ([*ids, of_bytes.eos_token_id], True)
    lost = Text(prompt="In", text=b"".join(pieces).decode(), pieces=[*pieces, b" you"])
    with pytest.raises(InputError, match="the words of a token are lost"):
        encoded(lost, of_bytes, "text 1")


def bytes_of(tokenizer: Any, token: int) -> bytes:
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(byte_of[letter] for letter in tokenizer.convert_ids_to_tokens(token))


def test_a_special_token_is_its_own_words(of_bytes: Any) -> None:
    end = of_bytes.eos_token
    assert end is not None
    assert ids_of_pieces([end.encode()], of_bytes, []) == [of_bytes.eos_token_id]


def test_spaces_and_bytes_of_sentencepiece(of_spaces: Any) -> None:
    id_of = of_spaces.convert_tokens_to_ids
    assert ids_of_pieces([b" blue", b" sky", b"."], of_spaces, []) == [id_of("▁blue"), id_of("▁sky"), id_of(".")]
    assert ids_of_pieces(["é".encode()[:1], "é".encode()[1:]], of_spaces, []) == [id_of("<0xC3>"), id_of("<0xA9>")]
    # decoded by itself a first token loses its space: the tokenizer's own division says which it is
    guess = [id_of("▁blue"), id_of("▁sky")]
    assert ids_of_pieces([b"blue", b" sky"], of_spaces, guess) == guess
    assert ids_of_pieces([b"blue", b" sky"], of_spaces, []) == [id_of("blue"), id_of("▁sky")]


def test_a_prompt_that_has_its_special_tokens_gets_no_others(of_spaces: Any) -> None:
    class AddsBegin:
        """The tokenizer, with the begin token of Llama's."""

        eos_token_id = None

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            ids = of_spaces(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [0, *ids] if add_special_tokens else ids}

    for is_rendered, begins in ((True, 1), (False, 2)):
        text = Text(prompt="<s> blue", text=" sky", prompt_is_rendered=is_rendered)
        assert encoded(text, AddsBegin(), "text 1").prompt.count(0) == begins


def test_what_is_not_judged_has_no_log_probability() -> None:
    text = Text(prompt=[1], text=[2, 3, 4], logprobs=[-0.5, -0.25, math.nan], judged=[True, False, True])
    tokens = encoded(text, None, "text 1")
    assert (tokens.judged, tokens.is_exact) == ([True, False, True], True)
    assert str(tokens.logprobs) == "[-0.5, nan, nan]"
    assert encoded(Text(prompt=[1], text=[2], logprobs=[-0.5]), None, "text 1").judged is None


def test_a_text_of_which_a_part_is_not_judged_is_divided_in_one_way(of_bytes: Any) -> None:
    text = Text(prompt="In", text=" you", judged=[True] * len(of_bytes(" you")["input_ids"]))
    tokens = encoded(text, of_bytes, "text 1")
    assert list(other_tokens(tokens, 0, of_bytes(" ")["input_ids"][0], of_bytes)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"judged": [True]}, "each token has a mark whether it is judged"),
        ({"judged": [False, False]}, "a token that the model wrote"),
        ({"logprobs": [-0.5]}, "each token has a log probability"),
        ({"trainer_logprobs": [-0.5]}, "each token has a log probability of the trainer"),
    ],
)
def test_other_lengths_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        encoded(Text(prompt=[1], text=[2, 3], **fields), None, "line 3, sample 2")
    assert caught.value.where == "line 3, sample 2"
