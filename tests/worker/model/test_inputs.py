from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import transformers

from consistency.case.case import Case, Fit
from consistency.case.inputs_file import paragraphs
from consistency.case.stage import Level
from consistency.case.stages import LEVELS
from consistency.errors import InputError
from consistency.worker.model import inputs as made
from consistency.worker.model.inputs import TEXT, _encoded, digest_of, fixed_inputs, sourced_inputs
from tests.worker.model.made_models import SIZES


class Words(torch.nn.Module):
    """A model that has the config of a language model."""

    config = SimpleNamespace(vocab_size=50, max_position_embeddings=100)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


@pytest.mark.parametrize(("fit", "shape"), [(Fit(), (8, 16)), (Fit(sequences=2), (2, 16)), (Fit(tokens=4), (8, 4))])
def test_a_case_that_is_cut_has_smaller_inputs(fit: Fit, shape: tuple[int, int]) -> None:
    inputs, reason = fixed_inputs(Case(name="x", base="b", fit=fit), Words())
    assert inputs is not None, reason
    assert inputs["input_ids"].shape == shape


MADE = {
    "whisper": (
        transformers.WhisperConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=40, num_mel_bins=8, max_source_positions=12,
            max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        transformers.WhisperForConditionalGeneration,
        {"input_features": (8, 8, 24), "decoder_input_ids": (8, 8)},
    ),
    "wav2vec2": (
        transformers.Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=[8, 8],
            conv_stride=[5, 2], conv_kernel=[10, 3], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        ),
        transformers.Wav2Vec2Model,
        {"input_values": (8, 170)},
    ),
    "spectrogram": (
        transformers.ASTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_length=32,
            num_mel_bins=16,
        ),
        transformers.ASTModel,
        {"input_values": (8, 32, 16)},
    ),
    "video": (
        transformers.VideoMAEConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16,
            patch_size=8, num_frames=4,
        ),
        transformers.VideoMAEModel,
        {"pixel_values": (8, 4, 3, 16, 16)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_sound_and_video_are_made_from_the_config_and_the_model_takes_them(kind: str) -> None:
    config, model_class, shapes = MADE[kind]
    model = model_class(config).eval()
    inputs, reason = fixed_inputs(Case(name="x", base="b"), model)
    assert inputs is not None, reason
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == shapes
    with torch.no_grad():
        model(**inputs)


def test_an_image_stands_before_the_text_where_the_config_says_how_long_it_is() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16, **sizes}
    text = {"model_type": "llama", "vocab_size": 40, **sizes}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=7, image_seq_length=4)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    inputs, reason = fixed_inputs(Case(name="x", base="b"), model)
    assert inputs is not None, reason
    assert {name: tuple(t.shape) for name, t in inputs.items()} == {
        "input_ids": (8, 20), "attention_mask": (8, 20), "pixel_values": (8, 3, 16, 16),
    }  # fmt: skip
    assert (inputs["input_ids"] == 7).sum(dim=1).tolist() == [4] * 8
    with torch.no_grad():
        found = model(**inputs).logits
        other = model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits
    assert not torch.equal(found, other)
    config.image_seq_length = 5  # not that of one tile
    inputs, _ = fixed_inputs(Case(name="x", base="b"), model)
    assert inputs is not None
    assert set(inputs) == {"input_ids", "attention_mask"}


def test_sound_without_a_length_in_the_config_is_declined() -> None:
    class Sound(Words):
        main_input_name = "input_features"

    inputs, reason = fixed_inputs(Case(name="x", base="b"), Sound())
    assert inputs is None
    assert "inputs for input_features cannot be made from the config" in reason


# --- text -----------------------------------------------------------------------------------------------------------

HAS_NONE = "random token ids: the base has no tokenizer"


class Trained(Words):
    config = SimpleNamespace(vocab_size=512, max_position_embeddings=100)


def text_of(folder: Path, rows: torch.Tensor) -> list[str]:
    return list(transformers.AutoTokenizer.from_pretrained(folder).batch_decode(rows, skip_special_tokens=True))


@pytest.fixture
def tokenizer(llama_base: Path, tmp_path: Path) -> Path:
    """Return a folder with the tokenizer of the built-in cases, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama_base / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(("level", "shape"), [(level, (plan.sequences, plan.tokens)) for level, plan in LEVELS.items()])
def test_a_base_with_a_tokenizer_reads_text(level: Level, shape: tuple[int, int], tokenizer: Path) -> None:
    inputs, reason, source = sourced_inputs(Case(name="x", base=str(tokenizer), level=level), Trained())
    assert inputs is not None, reason
    assert source == "text"
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == shape
    assert inputs["attention_mask"].all()
    assert (inputs["input_ids"][:, 0] == 1).all()  # the tokenizer has <s>, and does not set it by itself
    read, parts = text_of(tokenizer, inputs["input_ids"]), paragraphs(TEXT)
    for i, begun in enumerate(read):
        whole = begun.rstrip("\N{REPLACEMENT CHARACTER}")  # a character of several tokens may be cut
        assert "\n\n".join(parts[i:] + parts[:i]).startswith(whole)
    assert len(set(read)) == len(read)
    again, _, _ = sourced_inputs(Case(name="x", base=str(tokenizer), level=level), Trained())
    assert again is not None
    assert digest_of(again) == digest_of(inputs)
    again["input_ids"].zero_()
    assert inputs["input_ids"].any()


@pytest.mark.parametrize("level", Level)
def test_a_large_model_gets_half_of_the_sequences(
    level: Level, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, case = LEVELS[level], Case(name="x", base=str(tokenizer), level=level)
    elements = (1 << 28) + 1
    monkeypatch.setattr(made, "matrix_elements", lambda _: elements)
    inputs, _, _ = sourced_inputs(case, Trained())
    assert inputs is not None
    half = plan.sequences if level is Level.THOROUGH else max(1, plan.sequences // 2)
    assert len(inputs["input_ids"]) == half
    assert case.sequences(elements) == half
    assert case.sequences(elements - 1) == case.sequences() == plan.sequences
    cut = msgspec.structs.replace(case, fit=Fit(sequences=1))
    assert cut.sequences(elements) == cut.sequences() == 1


def test_a_classifier_without_padding_gets_one_sequence(tmp_path: Path) -> None:
    """`transformers` refuses more: it looks for the last token by that of padding."""
    for padding, count in ((None, 1), (0, 8)):
        config = transformers.LlamaConfig(**SIZES, pad_token_id=padding)
        model = transformers.LlamaForSequenceClassification(config)
        inputs, reason, _ = sourced_inputs(Case(name="x", base=str(tmp_path)), model)
        assert inputs is not None, reason
        assert len(inputs["input_ids"]) == count
        assert len(model(**inputs).logits) == count


def test_text_has_a_paragraph_for_each_sequence_of_the_largest_level() -> None:
    assert len(paragraphs(TEXT)) == max(plan.sequences for plan in LEVELS.values())


def test_a_base_without_a_tokenizer_reads_the_ids_that_it_always_did(llama_base: Path, tmp_path: Path) -> None:
    shutil.copy(llama_base / "tokenizer_config.json", tmp_path)  # of which transformers makes an empty tokenizer
    for base in (str(tmp_path), str(tmp_path / "none"), "python:some.module:make"):
        inputs, _, source = sourced_inputs(Case(name="x", base=base), Words())
        assert source == HAS_NONE
        assert inputs is not None
        assert digest_of(inputs) == "471711d66571a70c96c9f2a81e3b2d4f"


def test_a_tokenizer_that_cannot_be_used_leaves_random_ids_and_the_reason(tokenizer: Path) -> None:
    case = Case(name="x", base=str(tokenizer))
    _, _, source = sourced_inputs(case, Words())
    assert source == "random token ids: its tokenizer gives id 474, and the vocabulary has 50"
    (tokenizer / "tokenizer.json").write_text("{}")
    _encoded.cache_clear()
    inputs, _, source = sourced_inputs(case, Trained())
    assert inputs is not None
    assert source.startswith("random token ids: its tokenizer does not work: ")


def test_code_that_comes_with_a_tokenizer_is_not_run(tokenizer: Path) -> None:
    (tokenizer / "mine.py").write_text("raise SystemExit('it was run')")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    case = Case(name="x", base=str(tokenizer), trust_remote_code=True)
    inputs, _, source = sourced_inputs(case, Trained())
    assert inputs is not None
    assert source.startswith("random token ids: its tokenizer does not work: ")


def test_a_text_of_the_user_takes_its_place(tokenizer: Path) -> None:
    file = tokenizer / "in.txt"
    file.write_text("One\nÜber die Straße\n")
    inputs, _, source = sourced_inputs(Case(name="x", base=str(tokenizer), inputs=str(file)), Trained())
    assert inputs is not None
    assert source == "the text in --inputs"
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 16)
    first, second = text_of(tokenizer, inputs["input_ids"])
    assert first.startswith("One\n\nÜber")
    assert second.startswith("Über die Stra")


def test_a_text_of_the_user_that_cannot_be_read_is_no_reason_for_other_inputs(tokenizer: Path) -> None:
    (tokenizer / "in.txt").write_text("One")
    (tokenizer / "tokenizer.json").write_text("{}")
    case = Case(name="x", base=str(tokenizer), inputs=str(tokenizer / "in.txt"))
    inputs, reason, _ = sourced_inputs(case, Trained())
    assert inputs is None
    assert reason.startswith("the text in --inputs cannot be used: its tokenizer does not work: ")
    (tokenizer / "in.txt").unlink()
    _encoded.cache_clear()
    with pytest.raises(InputError, match="cannot read the inputs file"):
        sourced_inputs(case, Trained())


def test_a_decoder_reads_other_words_than_its_encoder(tokenizer: Path) -> None:
    class Both(Words):
        config = SimpleNamespace(vocab_size=512, is_encoder_decoder=True, decoder_start_token_id=0)

    inputs, _, source = sourced_inputs(Case(name="x", base=str(tokenizer)), Both())
    assert inputs is not None
    assert source == "text"
    ids, decoder = inputs["input_ids"], inputs["decoder_input_ids"]
    assert decoder.shape == (8, 8)
    assert (decoder[:, 0] == 0).all()
    assert torch.equal(decoder[:-1, 1:], ids[1:, 1:8])


def test_text_stands_behind_an_image(tokenizer: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16, **sizes}
    text = {"model_type": "llama", "vocab_size": 512, **sizes}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=7, image_seq_length=4)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    inputs, _, source = sourced_inputs(Case(name="x", base=str(tokenizer)), model)
    assert inputs is not None
    assert source == "text"
    assert (inputs["input_ids"][:, :4] == 7).all()
    assert (inputs["input_ids"][:, 4] == 1).all()
    assert text_of(tokenizer, inputs["input_ids"][:1, 4:])[0].startswith("A small boat")
