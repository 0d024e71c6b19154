"""A table of mistakes of a merge, each planted in a small model in two dtypes: found, and named by what explains it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from consistency.numerics.quantized import FP4, NF4
from tests.extras.merging.check_merged.made_merges import (
    Case,
    Tensors,
    change_adapter,
    checked,
    kinds,
    message,
    random,
    save,
    write,
)

DTYPES = (torch.float32, torch.bfloat16)
RANK = 8
HEADS = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
SHAPES = {
    "self_attn.q_proj": (96, 96),
    "self_attn.k_proj": (48, 96),
    "self_attn.v_proj": (48, 96),
    "self_attn.o_proj": (96, 96),
    "mlp.gate_proj": (160, 96),
    "mlp.up_proj": (160, 96),
    "mlp.down_proj": (96, 160),
}
PHI = {"self_attn.qkv_proj": (192, 96), "mlp.gate_up_proj": (320, 96)}
GPT2 = {"attn.c_attn": (96, 288), "mlp.c_fc": (96, 384)}

Wrong = Callable[["Merge", str], torch.Tensor]


@dataclass(frozen=True)
class Merge:
    """A case with what a mistake is made of: base, factors and deltas in float64, by the names of the weights."""

    case: Case
    dtype: torch.dtype

    def base(self, name: str) -> torch.Tensor:
        return self.case.tensors[name].double()

    def delta(self, name: str) -> torch.Tensor:
        return self.case.delta(name)

    def right(self, name: str) -> torch.Tensor:
        return self.base(name) + self.delta(name)

    def ranks(self, name: str, ranks: slice) -> torch.Tensor:
        scaling, b, a = self.case.deltas[name]
        return scaling * (b[:, ranks].double() @ a[ranks].double())

    def other(self, name: str, *, rank: int = RANK) -> torch.Tensor:
        """Return the delta of an adapter that has nothing to do with the case's."""
        rows, columns = self.base(name).shape
        made = random({"b": (rows, rank), "a": (rank, columns)}, seed=11)
        return 4 * made["b"].double() @ made["a"].double()

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype).double()


def case_of(folder: Path, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, config: dict[str, Any]) -> Case:
    """Return a model of two blocks with these weights in a dtype, and an adapter for all of them."""
    prefix = "transformer.h" if shapes is GPT2 else "model.layers"
    weights = {f"{prefix}.{n}.{name}.weight": shape for n in range(2) for name, shape in shapes.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in random(weights).items()}
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **HEADS}
    if shapes is GPT2:
        settings = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 96, "n_head": 6, "n_layer": 2}
    case = save(folder, tensors, settings, list(weights), config={"r": RANK, "lora_alpha": 4 * RANK, **config})
    if shapes is GPT2:
        change_adapter(case, transpose)
    return case


def transpose(factors: Tensors) -> None:
    """Give PEFT the factors of weights that are (in, out)."""
    for key in [key for key in factors if "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        factors[key], factors[other] = factors[other].T, factors[key].T


@dataclass(frozen=True)
class Mistake:
    """A mistake, the weights of a model that have it, the kind it is named by, and a part of the text."""

    wrong: Wrong
    kind: MergeCause
    text: str = ""
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=lambda: SHAPES)
    only: str = "_proj"
    config: dict[str, Any] = field(default_factory=dict)


def twice(merge: Merge, name: str) -> torch.Tensor:
    return merge.rounded(merge.right(name)) + merge.delta(name)


def scaled(times: float) -> Wrong:
    return lambda merge, name: merge.base(name) + times * merge.delta(name)


def with_delta_of(*pairs: tuple[str, str]) -> Wrong:
    """Return a merge in which the modules of a pair have each other's delta."""
    others = {**dict(pairs), **{second: first for first, second in pairs}}

    def wrong(merge: Merge, name: str) -> torch.Tensor:
        for part, other in others.items():
            if part in name:
                return merge.base(name) + merge.delta(name.replace(part, other))
        return merge.right(name)

    return wrong


def rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Return a merge of a changed delta."""
    return lambda merge, name: merge.base(name) + change(merge.delta(name))


def in_pairs(delta: torch.Tensor) -> torch.Tensor:
    return delta.view(-1, 2, 8, delta.shape[1]).transpose(1, 2).reshape(delta.shape)


def from_pairs(delta: torch.Tensor) -> torch.Tensor:
    return delta.view(-1, 8, 2, delta.shape[1]).transpose(1, 2).reshape(delta.shape)


def by_head(delta: torch.Tensor) -> torch.Tensor:
    """Return q, k and v of 96, 48 and 48 rows as three groups of two heads of q, one of k and one of v."""
    parts = (delta[:96], delta[96:144], delta[144:])
    return torch.cat([part.view(3, -1, delta.shape[1]) for part in parts], dim=1).reshape(delta.shape)


def without(places: slice | tuple[slice, slice]) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(delta: torch.Tensor) -> torch.Tensor:
        delta = delta.clone()
        delta[places] = 0
        return delta

    return change


def levels_of(values: torch.Tensor, levels: tuple[float, ...], block: int) -> torch.Tensor:
    table = torch.tensor(sorted(levels), dtype=torch.float64)
    blocks = values.reshape(-1, block)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    return (table[torch.bucketize(blocks / largest, (table[1:] + table[:-1]) / 2)] * largest).reshape(values.shape)


def in_eight_bits(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    return (values / scale).round() * scale


def units_off(merge: Merge, name: str) -> torch.Tensor:
    """Return an error of a few units in the last place of the largest elements, which float32 shows too."""
    right = merge.right(name)
    off = torch.finfo(merge.dtype).eps * right * (1 if merge.dtype == torch.bfloat16 else 3)
    return torch.where(right.abs() > 2.8 * right.std(), off, 0.0)


SIGNED_FP4 = (*(-level for level in FP4[1:]), *FP4)


def residue(merge: Merge, name: str) -> torch.Tensor:
    """Merge and unmerge another adapter three times in the dtype, and then merge the right one."""
    weight, other = merge.base(name), 0.1 * merge.other(name)
    for _ in range(3):
        weight = merge.rounded(merge.rounded(weight + other) - other)
    return weight + merge.delta(name)


def checkpoint(merge: Merge, name: str) -> torch.Tensor:
    """Merge the factors as they were some steps before."""
    scaling, b, a = merge.case.deltas[name]
    noise = random({"b": tuple(b.shape), "a": tuple(a.shape)}, seed=5)
    b, a = b.double() + 0.2 * noise["b"].double(), a.double() + 0.2 * noise["a"].double()
    return merge.base(name) + scaling * (b @ a)


K, OTHER = MergeCause, MergeCause.OTHER_PART
PLANTED: dict[str, Mistake] = {
    "nothing merged": Mistake(scaled(0), K.NOT_MERGED),
    "one module left out": Mistake(scaled(0), K.NOT_MERGED, only="k_proj"),
    "merged twice": Mistake(twice, K.TWICE),
    "merged twice at once": Mistake(scaled(2), K.TWICE),
    "subtracted": Mistake(scaled(-1), K.EXCHANGED, "base − adapter"),
    "unscaled": Mistake(scaled(1 / 4), K.WRONG_SCALE, "1 or 1/4 of it"),
    "alpha alone": Mistake(scaled(RANK), K.WRONG_SCALE, "lora_alpha (32)"),
    "half": Mistake(scaled(1 / 2), K.WRONG_SCALE, "1/2 of it, as a rank's share"),
    "rslora unknown": Mistake(
        scaled(8**-0.5), K.WRONG_SCALE, "lora_alpha / r (4)", config={"use_rslora": True}
    ),
    "rslora by mistake": Mistake(scaled(8**0.5), K.WRONG_SCALE, "lora_alpha / sqrt(r)"),
    "alpha missing": Mistake(scaled(1 / 4), K.WRONG_SCALE, "8 / r, as PEFT has it without lora_alpha (1)"),
    "scaled by 0.37": Mistake(scaled(0.37), K.WRONG_SCALE, "1.48, fitted"),
    "the delta alone": Mistake(Merge.delta, K.DELTA_ALONE),
    "transposed": Mistake(rows(lambda delta: delta.T), K.TRANSPOSED, only="q_proj"),
    "k and v exchanged": Mistake(with_delta_of(("k_proj", "v_proj")), K.OTHER_LAYER, "have each other's"),
    "gate and up exchanged": Mistake(with_delta_of(("gate_proj", "up_proj")), K.OTHER_LAYER, "have each other's"),
    "q for o": Mistake(with_delta_of(("q_proj", "o_proj")), K.OTHER_LAYER, "have each other's"),
    "blocks exchanged": Mistake(with_delta_of(("layers.0", "layers.1")), K.OTHER_LAYER, "have each other's"),
    "q in rotary pairs": Mistake(rows(in_pairs), K.ROW_ORDER, "as neighbours (Meta's layout) in each", only="q_proj"),
    "k from rotary pairs": Mistake(rows(from_pairs), K.ROW_ORDER, "as halves (Hugging Face's)", only="k_proj"),
    "qkv head by head": Mistake(rows(by_head), K.ROW_ORDER, "3 groups of 4 heads of 16", PHI, "qkv_proj"),
    "k and v of qkv exchanged": Mistake(
        rows(lambda delta: torch.cat((delta[:96], delta[144:], delta[96:144]))), OTHER,
        "k_proj and v_proj are exchanged", PHI, "qkv_proj",
    ),
    "q of qkv alone": Mistake(
        rows(without(slice(96, None))), K.PART_LEFT_OUT, "the delta of k_proj and v_proj was left out", PHI, "qkv_proj"
    ),
    "gate and up swapped": Mistake(
        rows(lambda delta: delta.roll(160, 0)), OTHER, "its halves are swapped", PHI, "gate_up_proj"
    ),
    "gate and up row by row": Mistake(
        rows(lambda delta: delta.view(2, 160, 96).transpose(0, 1).reshape(320, 96)), OTHER, "row by row", PHI,
        "gate_up_proj",
    ),
    "rows shuffled": Mistake(rows(lambda delta: delta[torch.arange(96) * 5 % 96]), K.ROW_ORDER, "row 1 that of 5",
                             only="q_proj"),
    "heads reversed": Mistake(rows(lambda delta: delta.view(6, 16, 96).flip(0).reshape(96, 96)), OTHER,
                              "rows 0-15 hold the delta of rows 80-95", only="q_proj"),
    "k and v of c_attn left out": Mistake(
        rows(without((slice(None), slice(96, None)))), K.PART_LEFT_OUT, "columns 0-95 (q) hold base + adapter", GPT2,
        "c_attn", {"fan_in_fan_out": True},
    ),
    "k and v of c_attn exchanged": Mistake(
        rows(lambda delta: torch.cat((delta[:, :96], delta[:, 192:], delta[:, 96:192]), dim=1)), OTHER,
        "of its columns: k and v are exchanged", GPT2, "c_attn", {"fan_in_fan_out": True},
    ),
    "half of the ranks": Mistake(
        lambda merge, name: merge.base(name) + merge.ranks(name, slice(0, 4)), K.SOME_RANKS, "ranks 0-3 of 8"
    ),
    "every second rank": Mistake(
        lambda merge, name: merge.base(name) + merge.ranks(name, slice(0, None, 2)), K.SOME_RANKS, "of 8"
    ),
    "half of the ranks, scaled by theirs": Mistake(
        lambda merge, name: merge.base(name) + 2 * merge.ranks(name, slice(4, None)), K.SOME_RANKS,
        "ranks 4-7 of 8, scaled by lora_alpha / 4",
    ),
    "half of the rows": Mistake(rows(without(slice(24, None))), K.PART_LEFT_OUT, "rows 0-23 hold base + adapter",
                                only="k_proj"),
    "every second row": Mistake(rows(without(slice(None, None, 2))), K.PART_LEFT_OUT, "of 48 rows hold the base",
                                only="k_proj"),
    "half of the columns": Mistake(
        rows(without((slice(None), slice(48, None)))), K.PART_LEFT_OUT, "columns 48-95 hold the base", only="k_proj"
    ),
    "int8 after": Mistake(lambda merge, name: in_eight_bits(merge.right(name)), K.ROUNDED_AFTER, "to int8 by row"),
    "int8 after a half type": Mistake(
        lambda merge, name: in_eight_bits(merge.rounded(merge.right(name))), K.ROUNDED_AFTER, "to int8 by row"
    ),
    "nf4 after": Mistake(lambda merge, name: levels_of(merge.right(name), NF4, 64), K.ROUNDED_AFTER, "to nf4"),
    "fp4 after": Mistake(lambda merge, name: levels_of(merge.right(name), SIGNED_FP4, 64), K.ROUNDED_AFTER, "to fp4"),
    "nf4 before": Mistake(
        lambda merge, name: merge.rounded(levels_of(merge.base(name), NF4, 64)) + merge.delta(name), K.FOUR_BIT_BASE,
        "nf4",
    ),
    "int8 before": Mistake(
        lambda merge, name: merge.rounded(in_eight_bits(merge.base(name))) + merge.delta(name), K.EIGHT_BIT_BASE,
        "int8 by row",
    ),
    "another adapter": Mistake(lambda merge, name: merge.base(name) + merge.other(name), K.OTHER_ADAPTER, "of rank 8"),
    "another adapter of rank 2": Mistake(
        lambda merge, name: merge.base(name) + merge.other(name, rank=2), K.OTHER_ADAPTER, "of rank 2"
    ),
    "another adapter too": Mistake(
        lambda merge, name: merge.right(name) + merge.other(name, rank=4), K.FURTHER_ADAPTER, "of rank 4"
    ),
    "another checkpoint": Mistake(checkpoint, K.OTHER_ADAPTER, "another checkpoint of it?"),
    "one unit off": Mistake(
        lambda merge, name: merge.right(name) + units_off(merge, name), K.OFF, "in the last place at most",
        only="q_proj",
    ),
    "a fifth, and noise": Mistake(
        lambda merge, name: merge.base(name) + 0.2 * merge.delta(name)
        + 0.02 * random({"n": tuple(merge.base(name).shape)}, seed=4)["n"].double(), K.OFF, "base + adapter × 0.20",
        only="q_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    mistake = PLANTED[name]
    case = case_of(tmp_path, mistake.shapes, dtype, mistake.config)
    merge = Merge(case, dtype)
    tensors = right_of(merge)
    for weight in case.deltas:
        if mistake.only in weight or (mistake.only == "_proj" and mistake.shapes is GPT2):
            tensors[weight] = mistake.wrong(merge, weight).to(dtype)
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [mistake.kind], [finding.message for finding in found.findings]
    assert mistake.text in message(found, mistake.kind)


def right_of(merge: Merge) -> Tensors:
    return {**merge.case.tensors, **{name: merge.right(name).to(merge.dtype) for name in merge.case.deltas}}


def once_rounded(merge: Merge, name: str) -> torch.Tensor:
    return merge.right(name)


def delta_rounded(merge: Merge, name: str) -> torch.Tensor:
    return merge.base(name) + merge.rounded(merge.delta(name))


def factors_rounded(merge: Merge, name: str) -> torch.Tensor:
    scaling, b, a = merge.case.deltas[name]
    return merge.base(name) + merge.rounded(
        merge.rounded(scaling * merge.rounded(b.double())) @ merge.rounded(a.double())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [1.0, 0.02], ids=["", "small"])
@pytest.mark.parametrize("order", [once_rounded, delta_rounded, factors_rounded])
def test_a_healthy_order_is_quiet(tmp_path: Path, order: Wrong, dtype: torch.dtype, size: float) -> None:
    for number, shapes in enumerate((SHAPES, PHI, GPT2)):
        config = {"fan_in_fan_out": shapes is GPT2, "lora_alpha": 4 * RANK * size}
        case = case_of(tmp_path / str(number), shapes, dtype, config)
        merge = Merge(case, dtype)
        tensors = {**case.tensors, **{name: order(merge, name).to(dtype) for name in case.deltas}}
        found = checked(case, tmp_path / str(number), tensors)
        assert (found.verdict, kinds(found)) == ("consistent", [])


def test_residue_of_merging_and_unmerging(tmp_path: Path) -> None:
    case = case_of(tmp_path, SHAPES, torch.bfloat16, {})
    merge = Merge(case, torch.bfloat16)
    tensors = {**case.tensors, **{name: residue(merge, name).bfloat16() for name in case.deltas}}
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.ROUNDINGS]
    assert "of the elements off, by " in message(found, MergeCause.ROUNDINGS)


@pytest.mark.parametrize("times", [1.0, 1 / 3, 2.0, 3.0])
@pytest.mark.parametrize("config", [LoKrConfig, LoHaConfig], ids=lambda config: config.__name__)
def test_the_scaling_of_another_method(tmp_path: Path, config: type[Any], times: float) -> None:
    """LoKr and LoHa unscaled, merged twice, or scaled twice; the plain merge of each is right."""
    torch.manual_seed(0)
    size = {**HEADS, "vocab_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(tmp_path / "base")
    settings = {"r": 4, "alpha": 12, "init_weights": False, "task_type": "CAUSAL_LM"}
    made = config(target_modules=["q_proj", "down_proj"], **settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(model, made).save_pretrained(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    state = merged.state_dict()
    changed = {}
    for name, tensor in state.items():
        changed[name] = (before[name] + times * (tensor - before[name])).float().contiguous()
    write(tmp_path / "merged", changed, json.loads((tmp_path / "base" / "config.json").read_text()))
    found = check_merged(tmp_path / "merged", base=tmp_path / "base", adapter=tmp_path / "adapter")
    if times == 1:
        assert (found.verdict, kinds(found)) == ("consistent", [])
    else:
        assert kinds(found) == [MergeCause.TWICE if times == 2 else MergeCause.WRONG_SCALE]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_noise_in_all_tensors_is_no_adapter(tmp_path: Path, dtype: torch.dtype) -> None:
    """The tensors after the first ones, which are looked at briefly, too."""
    case = case_of(tmp_path, SHAPES, dtype, {})
    merge = Merge(case, dtype)
    noise = random({name: tuple(merge.base(name).shape) for name in case.deltas}, seed=9)
    tensors = {**case.tensors}
    for name in case.deltas:
        tensors[name] = (merge.right(name) * (1 + 0.4 * noise[name].double())).to(dtype)
    found = checked(case, tmp_path, tensors)
    assert kinds(found) == [MergeCause.OFF]
    assert "base + adapter × 1.00, and" in message(found, MergeCause.OFF)
    assert found.findings[0].next == "look for what was merged or trained besides the adapter"


@pytest.mark.parametrize(
    ("times", "advice"), [(0.2, "look for what takes the adapter × 0.20"), (0.0, "give the base and the adapter that")]
)
def test_advice_follows_from_the_measure(tmp_path: Path, times: float, advice: str) -> None:
    case = case_of(tmp_path, SHAPES, torch.float32, {})
    merge = Merge(case, torch.float32)
    noise = random({name: tuple(merge.base(name).shape) for name in case.deltas}, seed=9)
    tensors = {**case.tensors}
    for name in case.deltas:
        tensors[name] = (merge.base(name) + times * merge.delta(name) + 0.05 * noise[name].double()).float()
    (found, *_) = checked(case, tmp_path, tensors).findings
    assert (found.kind, (found.next or "").startswith(advice)) == (MergeCause.OFF, True), found.next


def test_the_element_that_is_shown_is_not_one_near_zero(tmp_path: Path) -> None:
    case = case_of(tmp_path, SHAPES, torch.float32, {})
    merge = Merge(case, torch.float32)
    name = next(iter(case.deltas))
    wrong = merge.right(name).float()
    small, large = int(wrong.abs().argmin()), int(wrong.abs().argmax())
    wrong.view(-1)[small] += 1e-5
    wrong.view(-1)[large] *= 1.01
    found = checked(case, tmp_path, {**right_of(merge), name: wrong})
    assert f"[{large // 96}, {large % 96}] is" in message(found, MergeCause.OFF)
