"""Stage `generation`: healthy ways are within, what is wrong in one is found in its layer and way, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.capture.records import TensorRecord
from consistency.extras.serving.generation import planted as faults
from consistency.extras.serving.generation import text
from consistency.extras.serving.generation.worker import MORE_WAYS, WAYS
from consistency.worker.model.ways import Sequences, Way
from tests.versions import CACHE, LOSES_THE_CACHE
from tests.worker.conftest import Look
from tests.worker.model.kinds_of_models import llava
from tests.worker.model.made_models import SIZES, a_llama, on_llama, saved

LAYERS = 2


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(a_llama(num_hidden_layers=LAYERS), tmp_path / "llama")


@pytest.fixture
def adapter(base: Path) -> Path:
    return on_llama(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


def of_generation(records: list[TensorRecord]) -> list[TensorRecord]:
    return [one for one in records if one.stage == "generation"]


def generate(look: Look, base: Path, adapter: Path | None = None, **changes: Any) -> list[TensorRecord]:
    return of_generation(look(base, adapter, stages=("forward", "generation"), **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_module_is_judged_in_every_way(look: Look, base: Path, adapter: Path, dtype: str) -> None:
    found = generate(look, base, adapter, dtype=dtype)
    assert {one.status for one in found} <= {"equal", "within"}
    by_way = {way: {one.layer for one in found if one.tensor == way} for way in WAYS}
    modules = {f"model.layers.{i}{part}" for i in range(LAYERS) for part in ("", ".self_attn", ".mlp")}
    for way, layers in by_way.items():
        assert modules | {"logits"} <= layers, way
    judged = [one for one in found if one.tensor in WAYS and one.limit_ratio is not None]
    assert all(0 < float(one.limit_ratio or 0) < 1 for one in judged if "bits_of_whole_sequences" in one.evidence)
    rows = {way: max(one.evidence["rows"] for one in found if one.tensor == way) for way in WAYS}
    assert rows["alone"] == rows["cache"] == rows["static_cache"] == 4 * 16
    assert rows["padded"] == 4 * 16 - sum((0, 3, 7, 1)), "as far as the longest goes"


PLANTED: dict[str, tuple[Callable[[], Callable[[], None]], str, str]] = {
    "last key": (faults.last_key_not_written, "cache", "wrong-with-cache"),
    "rows of the cache": (faults.rows_exchanged, "cache", "wrong-with-cache"),
    "narrow keys": (faults.keys_in_float8, "cache", "wrong-with-cache"),
    "stale keys": (faults.stale_keys, "static_cache", "wrong-with-cache"),
    "no adapter in steps": (faults.off_in_steps, "cache", "wrong-with-cache"),
    "padding": (faults.padding_is_seen, "padded", "padding-changes-the-model"),
    "padding counted": (faults.positions_of_padding, "padded", "padding-changes-the-model"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_found_in_its_way_and_its_layer(look: Look, base: Path, adapter: Path, name: str) -> None:
    """A stale key stands in a static cache alone, a key that was not written in a dynamic one, padding in a batch."""
    plant, way, word = PLANTED[name]
    undo = plant()
    try:
        found = generate(look, base, adapter)
    finally:
        undo()
    wrong = [one for one in found if one.status == "outside"]
    own = [one for one in wrong if one.tensor.split(".")[0] == way]
    assert own
    assert not [one for one in wrong if one.tensor == "alone"], "which has no cache and no padding"
    assert {str(one.word) for one in own} == {word}
    if "adapter" not in name and "padding" not in name:
        assert {one.layer.split(".")[2] for one in wrong if one.layer.startswith("model.layers.")} == {"1"}


def test_a_token_that_rounding_does_not_explain_is_wrong(look: Look, base: Path, adapter: Path) -> None:
    undo = faults.another_token()
    try:
        found = generate(look, base, adapter)
    finally:
        undo()
    wrong = [one for one in found if one.status == "outside"]
    assert [(one.layer, one.tensor, str(one.word)) for one in wrong] == [("prompt 0", "text", "other-token")]
    assert wrong[0].evidence["token"] == 2
    assert float(wrong[0].evidence["gap"]) > float(wrong[0].evidence["allowed"])
    assert "which rounding does not explain" in str(wrong[0].reason)


def test_two_tokens_that_are_tied_may_be_chosen_by_turns(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that has each row twice, a device may choose the one or the other."""
    model = a_llama(num_hidden_layers=1)
    base = saved(model, tmp_path / "tied")
    with torch.no_grad():
        head = model.lm_head.weight
        head[32:] = head[:32]
    model.save_pretrained(base)
    written = text._written
    calls = []

    def by_turns(*given: Any) -> torch.Tensor:
        calls.append(given)
        found = written(*given)
        if len(calls) == 2:  # the device's own, after that of the reference
            found[1, 5] = (found[1, 5] + 32) % 64
        return found

    monkeypatch.setattr(text, "_written", by_turns)
    found = {one.layer: one for one in generate(look, base) if one.tensor == "text"}
    assert [found[f"prompt {i}"].status for i in range(4)] == ["equal", "within", "equal", "equal"]
    parted = found["prompt 1"]
    assert parted.evidence["token"] == 5
    assert "both are right" in str(parted.reason)
    assert found["model"].evidence["nearly_tied"] == found["model"].evidence["steps"] == 4 * 16


def test_partings_come_as_soon_as_they_are_said_to() -> None:
    """Draw two devices by the same deviation, and count tokens until they part."""
    generator = torch.Generator().manual_seed(0)
    gap = torch.rand(2000, generator=generator, dtype=torch.float64) * 20
    deviation = torch.full_like(gap, 0.5)
    said = text.tokens_to_part(gap, deviation, 1)
    errors = torch.randn(2, 400, 2000, generator=generator, dtype=torch.float64) * deviation
    of_text = gap[torch.randint(2000, (400, 2000), generator=generator)]
    first = ((errors[0] > of_text) != (errors[1] > of_text)).to(torch.int8).argmax(1).to(torch.float64)
    assert said == pytest.approx(float(first.median()), rel=0.25)
    assert text.tokens_to_part(gap, deviation, 0.25) == pytest.approx(4 * (said or 0), rel=0.01)
    assert text.tokens_to_part(gap, deviation / 1e5, 1) is None or (
        text.tokens_to_part(gap, deviation / 1e5, 1) or 0
    ) > 100 * (said or 0)


def test_gaps_of_the_same_bits_are_counted() -> None:
    """One of four, and one more of each: a share of none would promise that no text ever parts."""
    one = torch.tensor([[[3.0, 2, 1], [3, 2, 1], [1, 3, 2], [1, 3, 2]]])
    other = one.clone()
    other[0, 0, 0], other[0, 1, 2] = 3.5, 0.5
    pairs = text._two_largest(one)
    assert text.share_unlike(one, other, pairs) == 2 / 5
    assert text.share_unlike(one, one, pairs) == 1 / 5


def test_model_code_that_is_wrong_in_a_way_is_named_as_what_it_is(look: Look, tmp_path: Path) -> None:
    """RWKV's code reads the padding, and for one token of each of several sequences it adds up their states."""
    config = transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, attention_hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        context_length=64,
    )  # fmt: skip
    found = generate(look, saved(transformers.RwkvForCausalLM(config), tmp_path / "rwkv"))
    wrong = {(one.tensor, str(one.word)) for one in found if one.status == "outside"}
    assert wrong == {("padded", "padding-changes-the-model"), ("cache", "cache-changes-the-model")}
    skipped = {one.tensor: str(one.reason) for one in found if one.status == "skipped"}
    assert skipped["static_cache"] == "the model does not run in this way: it has a cache of its own"
    assert "[4, 4, 32]" in skipped["cache.shape"], "as the bug is: a batch by a batch"


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")
@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        (peft.PromptTuningConfig, {("padded", "padding-changes-the-model")}),
        (peft.PrefixTuningConfig, set()),
    ],
    ids=["before the text", "in the cache"],
)  # fmt: skip
def test_what_an_adapter_puts_before_the_text_is_followed(
    look: Look, base: Path, prompt: type[peft.PromptLearningConfig], wrong: set[tuple[str, str]]
) -> None:
    """Prompt tuning puts its tokens before the padding, which the positions then count: peft#1093.

    A PEFT that looks for the cache under its name before transformers 5.24 finds none, and puts its tokens before each
    new one too: that is seen.
    """
    found = generate(look, base, on_llama(base, prompt(task_type="CAUSAL_LM", num_virtual_tokens=3)))
    if LOSES_THE_CACHE:
        assert ("text", "other-token") in {(one.tensor, str(one.word)) for one in found if one.status == "outside"}
        return
    assert {(one.tensor, str(one.word)) for one in found if one.status == "outside"} == wrong
    right = [one for one in found if one.tensor == "cache" and one.status in {"equal", "within"}]
    assert {f"model.layers.{i}.self_attn" for i in range(LAYERS)} | {"logits"} <= {one.layer for one in right}
    virtual = 0 if not wrong else 3
    assert max(one.evidence["rows"] for one in right) == 4 * (16 + virtual)


def test_padding_that_is_nan_in_a_half_type_is_no_fault_of_a_device(look: Look, tmp_path: Path) -> None:
    """LongT5's code masks with -1e10, which is infinite in float16."""
    config = transformers.LongT5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4, local_radius=8,
        decoder_start_token_id=0,
    )  # fmt: skip
    base = saved(transformers.LongT5ForConditionalGeneration(config), tmp_path / "longt5")
    wrong = {
        d: [one for one in generate(look, base, dtype=d) if one.status == "outside"] for d in ("bfloat16", "float16")
    }
    assert {(one.tensor, str(one.word)) for one in wrong["float16"]} == {("padded", "non-finite")}
    assert wrong["bfloat16"] == []


def test_a_pass_over_other_tokens_is_not_judged(look: Look, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model that is called twice for each token."""

    def zero(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, 0] = 0
        return chosen

    monkeypatch.setattr(Way, "_choose", lambda *_: zero)
    found = {one.tensor: one for one in generate(look, base) if one.layer == "model"}
    for way in ("cache", "static_cache", "padded"):
        assert found[way].status == "skipped"
        assert "it computes other tokens" in str(found[way].reason)


def test_an_adapter_that_mixes_the_batch_is_named(look: Look, base: Path) -> None:
    found = generate(look, base, on_llama(base, peft.LilyConfig(r=4, target_modules=["q_proj"])))
    wrong = {(one.tensor, str(one.word)) for one in found if one.status == "outside"}
    assert ("alone", "batch-changes-the-model") in wrong


def test_an_adapter_that_calls_the_base_itself_is_followed(look: Look, base: Path) -> None:
    """AdaLoRA's model calls the forward method of the base, past its hooks."""
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_r=4, target_r=2)
    found = generate(look, base, on_llama(base, config))
    assert {one.status for one in found} <= {"equal", "within"}
    assert {"logits", "model.layers.1.mlp"} <= {one.layer for one in found if one.tensor == "alone"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_after_a_choice_that_rounding_may_turn_are_left_out(look: Look, tmp_path: Path, dtype: str) -> None:
    config = transformers.MixtralConfig(
        **{**SIZES, "num_hidden_layers": 2}, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    found = generate(look, saved(transformers.MixtralForCausalLM(config), tmp_path / "mixtral"), dtype=dtype)
    assert {one.status for one in found} <= {"equal", "within"}
    left_out = sum(one.evidence.get("undecided_rows", 0) for one in found)
    judged = sum(one.evidence.get("rows", 0) for one in found) - left_out
    assert judged > 0
    assert bool(left_out) == (dtype == "bfloat16")


def test_what_cannot_be_generated_says_why(look: Look, base: Path, adapter: Path, masked_bert: Path) -> None:
    (alone,) = of_generation(look(base, adapter, stages=("generation",)))
    assert alone.reason == "the stage forward, whose float64 results judge it, is not run"
    (other,) = generate(look, masked_bert)
    assert (other.status, other.reason) == ("skipped", "the model generates no text")


def test_level_thorough_has_more_ways_and_no_adapter(look: Look, base: Path, adapter: Path) -> None:
    found = generate(look, base, adapter, level="thorough")
    assert {one.status for one in found} <= {"equal", "within"}
    ways = {*WAYS, *MORE_WAYS, "cache.adapter_off", "padded.adapter_off"}
    for way in ways:
        assert {"model.layers.1.self_attn", "logits"} <= {one.layer for one in found if one.tensor == way}, way
    undo = faults.last_key_not_written()
    try:
        wrong = {one.tensor for one in generate(look, base, adapter, level="thorough") if one.status == "outside"}
    finally:
        undo()
    assert {"cache", "chunked", "cache.adapter_off"} <= wrong
    assert "alone" not in wrong


def test_a_sliding_window_that_is_off_by_one_with_a_cache(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and text are longer than the window; in whole sequences it is right."""
    from transformers import masking_utils

    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4, max_position_embeddings=64)
    torch.manual_seed(0)
    base = saved(transformers.MistralForCausalLM(config), tmp_path / "mistral")
    assert {one.status for one in generate(look, base)} <= {"equal", "within"}
    real = masking_utils.create_sliding_window_causal_mask

    def narrower(config: Any, *args: Any, **kwargs: Any) -> Any:
        own = config.sliding_window
        cache = kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length():
            config.sliding_window = own - 1
        try:
            return real(config, *args, **kwargs)
        finally:
            config.sliding_window = own

    from transformers.models.mistral import modeling_mistral

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", narrower)
    bad = {(one.tensor, str(one.word)) for one in generate(look, base) if one.status == "outside"}
    assert ("cache", "cache-changes-the-model") in bad, "in float64 too: it is the model's code"
    assert not any(way == "alone" for way, _ in bad)


def reader(kind: str, folder: Path) -> tuple[Path, Path]:
    """Return a base with an encoder and a decoder, and an adapter in both."""
    torch.manual_seed(0)
    whole = {"vocab_size": 64, "d_model": 32}
    if kind == "t5":
        config = transformers.T5Config(**whole, d_kv=8, num_heads=4, num_layers=2, d_ff=48, decoder_start_token_id=0)
        model: Any = transformers.T5ForConditionalGeneration(config)
    else:
        sides = {
            f"{side}_{name}": size
            for side in ("encoder", "decoder")
            for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
        }
        model = transformers.BartForConditionalGeneration(
            transformers.BartConfig(**whole, **sides, max_position_embeddings=64)
        )
    base = saved(model, folder / kind)
    config = peft.LoraConfig(r=2, target_modules=["q", "v"] if kind == "t5" else ["q_proj", "v_proj"])
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")
    return base, folder / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_decoder_that_reads_an_encoder_is_judged_in_every_way(
    look: Look, tmp_path: Path, kind: str, dtype: str
) -> None:
    """BART's decoder reads what the last block of the encoder left, T5's a norm of it."""
    found = generate(look, *reader(kind, tmp_path), dtype=dtype)
    assert {one.status for one in found} <= {"equal", "within"}
    last = {"t5": "decoder.block.1", "bart": "model.decoder.layers.1"}[kind]
    for way in WAYS:
        assert {last, "logits"} <= {one.layer for one in found if one.tensor == way}, way
    assert not [one.layer for one in found if "encoder" in one.layer.split(".")], "it reads a text once in every way"
    assert {one.layer for one in found if one.tensor == "text"} == {"model", *(f"prompt {i}" for i in range(4))}


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_decoder_gets_what_is_given_of_the_encoder(tmp_path: Path, kind: str) -> None:
    """T5 norms what its last block left; of BART that is what the decoder reads."""
    base, _ = reader(kind, tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(base).eval()
    ids, encoder = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
    beside = {"input_ids": encoder, "attention_mask": encoder}
    read: list[torch.Tensor] = []
    attends = (
        model.decoder.block[0].layer[1].EncDecAttention if kind == "t5" else model.model.decoder.layers[0].encoder_attn
    )
    attends.register_forward_pre_hook(lambda _, __, given: read.append(given["key_value_states"]), with_kwargs=True)
    whole = torch.full((2, 16, 32), 0.5)
    last = {"t5": "input.encoder_hidden_states", "bart": "model.encoder.layers.1::"}[kind]
    sequences = Sequences(ids=ids, prompt=4, beside=beside, has_encoder=True)
    way = Way(model=model, sequences=sequences, given=lambda name: whole if last in name else None, shapes={})
    for run in (way.alone, way.cached, way.padded):
        read.clear()
        run()
        assert read
        assert all(bool((one[:, :16] == 0.5).all()) for one in read)


def _read_again(cache: Any, layer: int) -> None:
    """Exchange the rows of what a cache keeps of the encoder."""
    kept = cache.layers[layer]
    kept.keys, kept.values = kept.keys.flip(0), kept.values.flip(0)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_what_is_kept_of_an_encoder_is_found_where_it_is_another_text_s(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    base, adapter = reader(kind, tmp_path)
    from transformers import cache_utils

    real = cache_utils.Cache.update

    def update(cache: Any, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        found = real(cache, key, value, layer, *rest, **more)
        is_of_encoder = key.shape[-2] in (16, 16 + 7)  # as long as the text that it reads, and that padded
        if (
            layer == 1
            and is_of_encoder
            and key.dtype != torch.float64
            and not isinstance(cache, cache_utils.StaticCache)
        ):
            _read_again(cache, layer)
        return found

    monkeypatch.setattr(cache_utils.Cache, "update", update)
    wrong = [one for one in generate(look, base, adapter) if one.status == "outside"]
    assert {(one.tensor, str(one.word)) for one in wrong} == {
        ("cache", "wrong-with-cache"), ("padded", "wrong-with-padding"),
    }  # fmt: skip
    blocks = {one.layer for one in wrong if ".1" in one.layer}
    assert blocks
    assert not [one.layer for one in wrong if one.layer.startswith(("decoder.block.0", "model.decoder.layers.0"))]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_padding_that_a_decoder_reads_is_found(look: Look, tmp_path: Path, kind: str) -> None:
    undo = faults.padding_is_seen()
    try:
        found = generate(look, *reader(kind, tmp_path))
    finally:
        undo()
    wrong = {(one.tensor, str(one.word)) for one in found if one.status == "outside"}
    assert wrong == {("padded", "padding-changes-the-model")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_after_an_image_is_judged_in_every_way(look: Look, tmp_path: Path, dtype: str) -> None:
    """Its prompt is as long as the image, at least: what the vision tower makes stands in its place."""
    base = saved(llava(), tmp_path / "llava")
    found = generate(look, base, dtype=dtype)
    assert {one.status for one in found} <= {"equal", "within"}
    for way in WAYS:
        rows = {one.layer: one.evidence["rows"] for one in found if one.tensor == way}
        assert rows["model.language_model.layers.1"] == 20 * 4 - (sum((0, 3, 7, 1)) if way == "padded" else 0)
        assert "logits" in rows
