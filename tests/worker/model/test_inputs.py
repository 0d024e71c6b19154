from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from consistency.case.case import Case
from consistency.case.fit import Fit
from consistency.worker.model.inputs import fixed_inputs


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
