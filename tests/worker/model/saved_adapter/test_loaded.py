"""A saved LoRA with layers that add nothing, or with one process's part of its factors; and healthy ones with zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistency.capture.adapter_remarks import AdapterFlaw, AdapterRemark, remarks_in
from consistency.worker.model.saved_adapter.loaded import remarks_on

Tensors = dict[str, torch.Tensor]

KINDS = {"self_attn.q_proj": (64, 32), "self_attn.v_proj": (16, 32), "mlp.down_proj": (32, 48)}


def adapter(*, rank: int = 8, blocks: int = 4) -> Tensors:
    """Return a trained LoRA of several layers: every factor is drawn."""
    stream = torch.Generator().manual_seed(0)
    tensors = {}
    for block in range(blocks):
        for kind, (rows, columns) in KINDS.items():
            layer = f"base_model.model.model.layers.{block}.{kind}"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=stream)
            tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=stream)
    return tensors


def remarks(tensors: Tensors) -> list[AdapterRemark]:
    return remarks_on(tensors.items())


def flaws(tensors: Tensors) -> list[AdapterFlaw]:
    return [remark.flaw for remark in remarks(tensors)]


def keep(tensors: Tensors, which: Callable[[str], bool], index: int, of: int, axis: int = 0) -> Tensors:
    """Return an adapter of which some tensors hold one of several equal parts alone."""
    changed = dict(tensors)
    for key, tensor in tensors.items():
        if which(key):
            chunks = [chunk if n == index else chunk * 0 for n, chunk in enumerate(tensor.chunk(of, dim=axis))]
            changed[key] = torch.cat(chunks, dim=axis)
    return changed


def test_a_trained_adapter_has_no_flaw() -> None:
    assert flaws(adapter()) == []


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("of", [2, 4, 8])
def test_one_share_of_the_rows_of_every_lora_b(index: int, of: int) -> None:
    if index >= of:
        return
    (remark,) = remarks(keep(adapter(), lambda key: "lora_B" in key, index, of))
    assert remark.flaw is AdapterFlaw.ONE_SHARD
    ordinal = ("first", "second", "third", "fourth")[index]
    assert f"in 12 of 12 adapted layers all but the {ordinal} of {of} equal parts of the rows of lora_B" in remark.text
    assert remark.text.endswith("q_proj, v_proj, down_proj in layers 0-3")
    rows = 64 // of
    assert f"rows {index * rows}-{(index + 1) * rows - 1} of 64 in model.layers.0.self_attn.q_proj" in remark.text


def test_a_share_of_the_rows_of_both_factors_as_fsdp_leaves_it() -> None:
    texts = [remark.text for remark in remarks(keep(adapter(), lambda _: True, 0, 2))]
    assert len(texts) == 2
    assert any("rows of lora_A" in text for text in texts)
    assert any("rows of lora_B" in text for text in texts)


def test_a_share_as_tensor_parallel_leaves_it() -> None:
    """What is split by its outputs has rows of lora_B, what is split by its inputs columns of lora_A."""
    by_outputs = keep(adapter(), lambda key: "self_attn" in key and "lora_B" in key, 1, 4)
    both = keep(by_outputs, lambda key: "down_proj" in key and "lora_A" in key, 1, 4, axis=1)
    of_columns, of_rows = (remark.text for remark in remarks(both))
    assert "in 8 of 12 adapted layers all but the second of 4 equal parts of the rows of lora_B" in of_rows
    assert "in 4 of 12 adapted layers all but the second of 4 equal parts of the columns of lora_A" in of_columns


def test_dead_outputs_of_some_layers_are_no_share() -> None:
    tensors = adapter()
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][32:] = 0
    tensors["base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"][:16] = 0
    for block in range(4):  # and scattered ones in all of them
        tensors[f"base_model.model.model.layers.{block}.self_attn.v_proj.lora_B.weight"][1::2] = 0
    assert flaws(tensors) == []


def test_a_rank_that_was_padded_is_no_share() -> None:
    """Servers want one rank of all adapters: the added ranks are zero in both factors."""
    padded = {
        key: torch.nn.functional.pad(tensor, (0, 0, 0, 8) if "lora_A" in key else (0, 8))
        for key, tensor in adapter().items()
    }
    assert flaws(padded) == []


def test_tokens_that_no_text_had_are_no_share() -> None:
    tensors = adapter()
    for name in ("wte", "wpe"):
        a = torch.randn(8, 100)
        a[:, 50:] = 0
        tensors |= {f"model.{name}.lora_embedding_A": a, f"model.{name}.lora_embedding_B": torch.randn(32, 8)}
    assert flaws(tensors) == []


def test_one_layer_alone_is_no_share() -> None:
    tensors = {key: tensor for key, tensor in adapter(blocks=1).items() if "q_proj" in key}
    assert flaws(keep(tensors, lambda key: "lora_B" in key, 0, 2)) == []


def test_layers_that_add_nothing_are_named() -> None:
    tensors = adapter()
    for key in tensors:
        if "lora_B" in key and ("layers.1." in key or "layers.2.mlp" in key):
            tensors[key] = tensors[key] * 0
    (remark,) = remarks(tensors)
    assert remark.flaw is AdapterFlaw.UNTRAINED_LAYERS
    assert remark.text == (
        "4 of 12 adapted layers add nothing, since lora_B is zero there: q_proj, v_proj, down_proj in layers 1-2"
    )


def test_an_adapter_without_any_effect_is_named_elsewhere() -> None:
    assert flaws({key: tensor * 0 for key, tensor in adapter().items()}) == []


def test_a_magnitude_or_a_bias_changes_something_without_lora_b() -> None:
    tensors = adapter()
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors[f"{layer}.lora_B.weight"] = torch.zeros(64, 8)
    assert flaws({**tensors, f"{layer}.lora_magnitude_vector": torch.ones(64)}) == []
    assert flaws({**tensors, f"{layer}.lora_B.bias": torch.ones(64)}) == []
    assert flaws(tensors) == [AdapterFlaw.UNTRAINED_LAYERS]


def test_remarks_are_read_from_evidence_and_those_of_later_versions_left_out() -> None:
    remark = AdapterRemark(flaw=AdapterFlaw.ONE_SHARD, text="text")
    evidence = {"adapter_remarks": [remark.as_table(), {"flaw": "of-a-later-version", "text": "x"}, "rubbish"]}
    assert remarks_in(evidence) == [remark]
    assert remarks_in({}) == []


def test_what_the_config_says_otherwise_is_a_warning() -> None:
    tensors = adapter(rank=8)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (remark,) = remarks_on(tensors.items(), config)
    assert (remark.flaw, remark.severity) == (AdapterFlaw.CONFIG_MISMATCH, "warning")
    assert "4 layers of the file that target_modules does not name" in remark.text
    assert remarks_in({"adapter_remarks": [remark.as_table()]}) == [remark]
    fitting = {**config, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}
    assert remarks_on(tensors.items(), fitting) == [], "a name that matches no layer may be meant"
