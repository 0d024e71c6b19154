"""Every mistake of a merge that is known from public reports: planted, found, and named by what explains it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_adapter.made_adapters import save_adapter, save_base
from tests.extras.merging.check_merged.made_merges import (
    PREFIX,
    Case,
    change_adapter,
    checked,
    fused,
    kinds,
    llama,
    message,
    random,
    save,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Q = "model.layers.1.self_attn.q_proj.weight"


def test_nothing_is_merged(tmp_path: Path) -> None:
    case = llama(tmp_path)
    found = checked(case, tmp_path, case.tensors)
    assert (found.verdict, found.exit_status, kinds(found)) == ("inconsistent", 1, [MergeCause.NOT_MERGED])
    assert "14 of 14 adapted tensors hold the base alone" in found.findings[0].message


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_layers_are_not_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path)
    tensors = case.right(dtype)
    tensors |= {name: case.tensors[name].to(dtype) for name in (Q, "model.layers.0.mlp.up_proj.weight")}
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.NOT_MERGED]
    assert "2 of 14 adapted tensors" in found.findings[0].message


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_twice(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path)
    tensors = {**case.right(dtype), **{name: case.with_delta(name, 2, dtype=dtype) for name in case.deltas}}
    assert kinds(checked(case, tmp_path, tensors)) == [MergeCause.TWICE]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_safe", [False, True])
def test_merged_twice_by_peft_which_rounds_each_time(tmp_path: Path, dtype: torch.dtype, is_safe: bool) -> None:
    """In a half type most elements are not base + 2 × adapter, rounded: the first merge has rounded them already."""
    case = llama(tmp_path)
    weights = {name: tensor.to(dtype) for name, tensor in case.tensors.items()}
    for _ in range(2):
        for name in case.deltas:
            added = case.delta(name).to(dtype) if is_safe else case.delta(name)
            weights[name] = (weights[name].double() + added.double()).to(dtype)
    assert kinds(checked(case, tmp_path, weights)) == [MergeCause.TWICE]


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_twice_by_real_peft(tmp_path: Path, dtype: torch.dtype) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    for _ in range(2):
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    found = check_merged(tmp_path / "merged", base=base, adapter=adapter)
    assert kinds(found) == [MergeCause.TWICE]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("times", "config", "text"),
    [
        (1 / 4, {}, "1 or 1/4 of it, as a rank's share instead of 4"),
        (4, {}, "lora_alpha (16) instead of 4"),
        (2, {"use_rslora": False, "lora_alpha": 8}, "lora_alpha / sqrt(r)"),
        (1 / 2, {"use_rslora": True, "lora_alpha": 8}, "lora_alpha / r (2) or 1/2 of it"),
        (1 / 4, {"lora_alpha": 8}, "1/4 of it, as a rank's share"),
        (0.37, {}, "1.48, fitted, instead of 4"),
    ],
)
def test_another_scaling(
    tmp_path: Path, dtype: torch.dtype, times: float, config: dict[str, object], text: str
) -> None:
    case = llama(tmp_path, config=config)
    tensors = {**case.right(dtype), **{name: case.with_delta(name, times, dtype=dtype) for name in case.deltas}}
    found = checked(case, tmp_path, tensors)
    names = [MergeCause.TWICE] if times == 2 else [MergeCause.WRONG_SCALE]
    assert kinds(found) == names
    assert text in message(found, names[0])


def test_the_scaling_of_another_module(tmp_path: Path) -> None:
    case = llama(tmp_path, config={"alpha_pattern": {"layers.1.self_attn.q_proj": 20}})
    found = checked(case, tmp_path, case.right())
    assert kinds(found) == [MergeCause.WRONG_SCALE]
    assert "that of another module (4) instead of 5" in message(found, MergeCause.WRONG_SCALE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path, square=True)
    tensors = case.right(dtype)
    tensors[Q] = (case.tensors[Q].double() + case.delta(Q).T).to(dtype)
    assert kinds(checked(case, tmp_path, tensors)) == [MergeCause.TRANSPOSED]


def with_deltas_of(case: Case, others: dict[str, str], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return a merge in which some tensors have the delta of another one."""
    wrong = {name: (case.tensors[name].double() + case.delta(other)).to(dtype) for name, other in others.items()}
    return {**case.right(dtype), **wrong}


FIRST_Q = Q.replace("layers.1", "layers.0")


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_layers_are_exchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path)
    found = checked(case, tmp_path, with_deltas_of(case, {Q: FIRST_Q, FIRST_Q: Q}, dtype))
    assert kinds(found) == [MergeCause.OTHER_LAYER]
    said = message(found, MergeCause.OTHER_LAYER)
    assert said.startswith("2 of 14 adapted tensors hold base + the delta of another layer: ")
    assert said.endswith("model.layers.0.self_attn.q_proj and model.layers.1.self_attn.q_proj have each other's")


def test_one_layer_has_the_delta_of_another(tmp_path: Path) -> None:
    case = llama(tmp_path)
    found = checked(case, tmp_path, with_deltas_of(case, {Q: FIRST_Q}))
    assert kinds(found) == [MergeCause.OTHER_LAYER]
    said = message(found, MergeCause.OTHER_LAYER)
    assert said.startswith("1 of 14 adapted tensors holds base + the delta of another layer: ")
    assert said.endswith("model.layers.1.self_attn.q_proj has that of model.layers.0.self_attn.q_proj")


def test_several_pairs_are_exchanged(tmp_path: Path) -> None:
    """The blocks of a model in another order, and keys for values, which have the same shape."""
    case = llama(tmp_path)
    keys = [name for name in case.deltas if "k_proj" in name]
    values = [name.replace("k_proj", "v_proj") for name in keys]
    both = dict(zip([*keys, *values], [*values, *keys], strict=True))
    found = checked(case, tmp_path, with_deltas_of(case, {Q: FIRST_Q, FIRST_Q: Q, **both}))
    assert kinds(found) == [MergeCause.OTHER_LAYER]
    said = message(found, MergeCause.OTHER_LAYER)
    assert "6 of 14 adapted tensors hold base + the delta of another layer" in said
    for n in range(2):
        attention = f"model.layers.{n}.self_attn"
        assert f"{attention}.k_proj and {attention}.v_proj have each other's" in said


def test_the_delta_of_another_layer_has_that_layers_scaling(tmp_path: Path) -> None:
    case = llama(tmp_path, config={"alpha_pattern": {"layers.0.self_attn.q_proj": 20}})
    tensors = case.right()
    tensors[FIRST_Q] = case.with_delta(FIRST_Q, 5 / 4)
    for times in (1.0, 5 / 4):
        tensors[Q] = (case.tensors[Q].double() + times * case.delta(FIRST_Q)).float()
        found = checked(case, tmp_path, tensors)
        assert kinds(found) == [MergeCause.OTHER_LAYER]
    tensors[Q] = (case.tensors[Q].double() + 1.1 * case.delta(FIRST_Q)).float()
    assert kinds(checked(case, tmp_path, tensors)) == [MergeCause.OTHER_ADAPTER]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_beside_the_delta_of_another_layer_is_unexplained(tmp_path: Path, dtype: torch.dtype) -> None:
    case = llama(tmp_path)
    tensors = with_deltas_of(case, {Q: FIRST_Q}, dtype)
    tensors[Q][3, 4] += 0.25
    assert kinds(checked(case, tmp_path, tensors)) == [MergeCause.OFF]


def test_every_layer_with_the_same_delta_is_named(tmp_path: Path) -> None:
    case = llama(tmp_path)
    first, other = (f"model.layers.0.self_attn.{name}_proj" for name in ("k", "v"))

    def alike(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("lora_A", "lora_B"):
            tensors[f"{PREFIX}{other}.{part}.weight"] = tensors[f"{PREFIX}{first}.{part}.weight"].clone()

    change_adapter(case, alike)
    last = "model.layers.1.self_attn.k_proj.weight"
    tensors = with_deltas_of(case, {f"{other}.weight": f"{first}.weight", last: f"{first}.weight"})
    assert f"{last.removesuffix('.weight')} has that of {first} or {other}" in message(
        checked(case, tmp_path, tensors), MergeCause.OTHER_LAYER
    )


GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"


def test_a_half_of_a_fused_weight_is_left_out(tmp_path: Path) -> None:
    case = fused(tmp_path)
    tensors = case.right()
    tensors[GATE_UP][:32] = case.tensors[GATE_UP][:32]
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.PART_LEFT_OUT]
    said = message(found, MergeCause.PART_LEFT_OUT)
    assert "rows 0-31 (gate_proj) hold the base, rows 32-63 (up_proj) hold base + adapter" in said
    assert said.endswith("the delta of gate_proj was left out")


def in_bfloat16(tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        tensors[key] = tensor.bfloat16()


def test_rows_that_are_left_out_need_not_be_rounded_as_the_others_are(tmp_path: Path) -> None:
    """The others are summed in bfloat16, as by a merge that writes only what it merged."""
    case = fused(tmp_path)
    change_adapter(case, in_bfloat16)
    deltas = {}
    for name, (scaling, b, a) in case.deltas.items():
        deltas[name] = scaling, b.bfloat16().to(b.dtype), a.bfloat16().to(a.dtype)
    case = replace(case, deltas=deltas)
    tensors = case.right()
    before = case.tensors[GATE_UP]
    tensors[GATE_UP] = (before.bfloat16() + case.delta(GATE_UP).bfloat16()).float()
    tensors[GATE_UP][:32] = before[:32]
    assert before.dtype == torch.float32
    assert not torch.equal(before.bfloat16().float(), before)
    assert "rows 0-31 (gate_proj) hold the base" in message(checked(case, tmp_path, tensors), MergeCause.PART_LEFT_OUT)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (torch.arange(64).roll(32), "its halves are swapped"),
        (torch.arange(64).view(2, 32).T.reshape(-1), "row by row (g0, u0, g1, u1, ...)"),
        (torch.arange(64).view(32, 2).T.reshape(-1), "half after half, and the delta row by row"),
        (torch.arange(64) % 32 + 32, "rows 0-31 (gate_proj) hold the delta of rows 32-63"),
    ],
)
def test_the_delta_of_other_rows(tmp_path: Path, places: torch.Tensor, text: str) -> None:
    case = fused(tmp_path)
    tensors = case.right()
    tensors[GATE_UP] = (case.tensors[GATE_UP].double() + case.delta(GATE_UP)[places]).float()
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.OTHER_PART]
    assert text in message(found, MergeCause.OTHER_PART)


def test_saved_modules_are_dropped(tmp_path: Path) -> None:
    case = llama(tmp_path)
    change_adapter(
        case, lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(64, 32)}), modules_to_save=["lm_head"]
    )
    assert kinds(checked(case, tmp_path, {**case.right(), "lm_head.weight": torch.ones(64, 32)})) == []
    assert kinds(checked(case, tmp_path, case.right())) == [MergeCause.SAVED_DROPPED]


def test_a_tensor_that_is_saved_whole_and_adapted_besides(tmp_path: Path) -> None:
    case, key = llama(tmp_path), f"{PREFIX}{Q.replace('.weight', '.base_layer.weight')}"
    saved = random({Q: tuple(case.tensors[Q].shape)}, seed=5)[Q]
    change_adapter(case, lambda t: t.update({key: saved}))
    right = {**case.right(), Q: (saved.double() + case.delta(Q)).float()}
    assert kinds(checked(case, tmp_path, right)) == []
    assert kinds(checked(case, tmp_path, case.right())) == [MergeCause.OFF]


def test_a_bias_without_its_scaling(tmp_path: Path) -> None:
    tensors = random({"layers.0.fc.weight": (16, 16), "layers.0.fc.bias": (16,)})
    case = save(tmp_path, tensors, {"model_type": "x"}, ["layers.0.fc.weight"], config={"lora_bias": True})
    bias = torch.arange(16.0) / 16
    change_adapter(case, lambda t: t.update({f"{PREFIX}layers.0.fc.lora_B.bias": bias}))
    right = case.right()
    assert kinds(checked(case, tmp_path, {**right, "layers.0.fc.bias": tensors["layers.0.fc.bias"] + 4 * bias})) == []
    found = checked(case, tmp_path, {**right, "layers.0.fc.bias": tensors["layers.0.fc.bias"] + bias})
    assert kinds(found) == [MergeCause.BIAS_UNSCALED]


def test_another_base(tmp_path: Path) -> None:
    case, other = llama(tmp_path), llama(tmp_path / "other")
    noise = random({name: tuple(tensor.shape) for name, tensor in case.tensors.items()}, seed=3)
    moved = {name: tensor + 0.1 * noise[name] for name, tensor in other.tensors.items()}
    merged = Case(base=other.base, adapter=other.adapter, tensors=moved, deltas=other.deltas)
    found = checked(case, tmp_path, merged.right())
    assert kinds(found) == [MergeCause.OTHER_BASE]


def test_an_untouched_tensor_is_changed(tmp_path: Path) -> None:
    case = llama(tmp_path)
    tensors = case.right()
    tensors["model.norm.weight"][3] += 1e-6
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.CHANGED]
    assert "1 of 32 elements; [3]" in message(found, MergeCause.CHANGED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("away", [1, -1])
def test_one_element_is_off_by_two_roundings(tmp_path: Path, dtype: torch.dtype, away: int) -> None:
    case = llama(tmp_path)
    tensors = case.right(dtype)
    tensors[Q].view(torch.int16)[5, 7] += away  # one unit in the last place, which is two roundings
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.OFF]
    assert "1 of 1024 elements; [5, 7]" in message(found, MergeCause.OFF)


def test_a_base_of_four_bits(tmp_path: Path) -> None:
    from consistency.numerics.quantized import NF4

    case = llama(tmp_path)
    table = torch.tensor(NF4)
    tensors = case.right(torch.bfloat16)
    for name in case.deltas:
        blocks = case.tensors[name].reshape(-1, 64)
        largest = blocks.abs().amax(dim=1, keepdim=True)
        levels = table[(blocks[..., None] / largest[..., None] - table).abs().argmin(dim=-1)]
        before = (levels * largest).reshape(case.tensors[name].shape).bfloat16().double()
        tensors[name] = (before + case.delta(name)).bfloat16()
    assert kinds(checked(case, tmp_path, tensors)) == [MergeCause.FOUR_BIT_BASE]


def test_an_adapter_without_effect(tmp_path: Path) -> None:
    case = llama(tmp_path)
    change_adapter(case, lambda t: [t[name].zero_() for name in t if "lora_B" in name])
    found = checked(case, tmp_path, case.tensors)
    assert (found.verdict, kinds(found)) == ("consistent", [MergeCause.EMPTY_ADAPTER])


def test_keys_that_match_nothing(tmp_path: Path) -> None:
    case = llama(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.model.layers", "model.layers")] = tensors.pop(name)

    change_adapter(
        case, rename, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    found = checked(case, tmp_path, case.tensors)
    assert MergeCause.KEYS in kinds(found)
    assert "with model. instead of nothing they would" in message(found, MergeCause.KEYS)


@pytest.mark.parametrize("factor", [1.01, 1.001, 1.0004])
def test_a_scaling_that_is_a_little_off_is_no_product_in_tf32(tmp_path: Path, factor: float) -> None:
    """Each element is within what products in TF32 may be off, but all are off the same way."""
    case = llama(tmp_path)
    found = checked(case, tmp_path, {**case.right(), Q: case.with_delta(Q, factor)})
    assert kinds(found) == [MergeCause.WRONG_SCALE]
    assert f"{4 * factor:.6g}, fitted, instead of 4" in message(found, MergeCause.WRONG_SCALE)


def test_products_in_tf32_are(tmp_path: Path) -> None:
    """Cut as a tensor core cuts them, and rounded."""
    case, bits = llama(tmp_path), ~((1 << 13) - 1)
    for more in (0, 1 << 12):
        merged = dict(case.tensors)
        for name, (scaling, b, a) in case.deltas.items():
            cut = [((one.view(torch.int32) + more) & bits).view(torch.float32).double() for one in (b, a)]
            merged[name] = (case.tensors[name].double() + scaling * (cut[0] @ cut[1])).float()
        found = checked(case, tmp_path, merged)
        assert kinds(found) == []
        assert any("products in TF32 (14 matrices)" in one.message for one in found.findings)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_values_that_went_through_a_half_type_are_told(tmp_path: Path, half: torch.dtype) -> None:
    case = llama(tmp_path)
    through = {name: tensor.to(half).float() for name, tensor in case.right().items()}
    for name in (Q, "lm_head.weight"):
        found = checked(case, tmp_path, {**case.right(), name: through[name]})
        assert (found.verdict, kinds(found)) == ("consistent", [MergeCause.LOSS])
        assert f"1 tensor, such as {name}, rounded through" in message(found, MergeCause.LOSS)


def test_a_tied_head_that_peft_has_saved_beside_its_embedding(tmp_path: Path) -> None:
    """As `modules_to_save` with `ensure_weight_tying` leaves it; one that differs has no place."""
    case = llama(tmp_path)
    settings = {**json.loads((case.base / "config.json").read_text()), "tie_word_embeddings": True}
    case = save(
        tmp_path / "tied", {n: t for n, t in case.tensors.items() if n != "lm_head.weight"}, settings, [*case.deltas]
    )
    table, names = torch.ones(64, 32), ("lm_head", "model.embed_tokens")
    saved = {f"{PREFIX}{name}.weight": table.clone() for name in names}
    modules = sorted({name.split(".")[-2] for name in case.deltas})
    change_adapter(
        case, lambda t: t.update(saved), target_modules=modules, modules_to_save=["lm_head", "embed_tokens"]
    )  # PEFT reads it: the head is in no file of the base
    right = {**case.right(), "model.embed_tokens.weight": table}
    assert kinds(checked(case, tmp_path, right, settings)) == []
    change_adapter(case, lambda t: t.update({f"{PREFIX}lm_head.weight": table + 1}))
    lost = checked(case, tmp_path, right, settings)
    assert kinds(lost) == [MergeCause.TIED], "the keys are right: the folder has lost the head"
    assert "lm_head.weight of its own" in message(lost, MergeCause.TIED)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_differs_from_its_embedding(tmp_path: Path, tied: bool) -> None:
    case = llama(tmp_path)
    settings = {**json.loads((case.base / "config.json").read_text()), "tie_word_embeddings": True}
    tensors = {name: tensor for name, tensor in case.tensors.items() if name != "lm_head.weight"}
    case = save(tmp_path / "tied", tensors, settings, list(case.deltas))
    right = case.right()
    assert kinds(checked(case, tmp_path, right)) == []
    head = right["model.embed_tokens.weight"] + 0.5
    found = checked(case, tmp_path, {**right, "lm_head.weight": head}, {**settings, "tie_word_embeddings": tied})
    assert found.verdict == "inconsistent"
    assert (MergeCause.TIED in kinds(found)) is tied


@pytest.mark.parametrize("right", [True, False])
def test_more_rows(tmp_path: Path, right: bool) -> None:
    case = llama(tmp_path)
    tensors = case.right()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + (not right)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], torch.zeros(3, 32)))
    settings = json.loads((case.base / "config.json").read_text()) | {"vocab_size": 67}
    found = checked(case, tmp_path, tensors, settings)
    verdict = "right" if right else "wrong"
    expected = f"embed_tokens.weight has 67 rows, the base 64: the first 64 are {verdict}"
    assert expected in message(found, MergeCause.RESIZED)
    assert (found.verdict == "consistent") is right
