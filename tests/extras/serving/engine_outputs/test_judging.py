"""Mistakes of engines with an adapter are named by what explains their numbers, and healthy engines are left alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from consistency.case.builtin import BUILTIN_CASES, builtin_folder
from consistency.comparison.result import Comparison, Finding
from consistency.errors import InputError
from consistency.extras.serving.engine_outputs import explanations, judging
from tests.extras.serving.engine_outputs.made_engines import (
    MERGED,
    OFF,
    ON,
    MadeEngine,
    Tensors,
    judged,
    merged,
    request,
    with_scalings,
    without,
)
from tests.versions import loads_onto_mixtures
from tests.worker.model.made_models import SIZES, adapter_on, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while merging


def block_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def in_upper_half(engine: MadeEngine) -> Any:
    blocks = [block_of(name) for name, _ in engine.layers]
    return lambda name: block_of(name) > max(blocks) // 2


def planted(engine: MadeEngine) -> dict[str, tuple[Tensors, str, str]]:
    """Return outputs with a mistake, the kind of the finding, and its sentence."""
    return {
        "ignored": (
            {ON: engine.logits(off=True), MERGED: engine.logits(off=True)},
            "adapter-ignored", "answers as the base alone: the adapter is not applied",
        ),
        "scaling": ({ON: with_scalings(engine, lambda _: 1.0)}, "scaling-ignored", "answers as if scaling were 1"),
        "half": (
            {ON: without(engine, in_upper_half(engine))},
            "layers-ignored", "answers as if layers 2–3 had no adapter",
        ),
        "bfloat16": (
            {ON: merged(engine, first="bfloat16"), MERGED: merged(engine, then=torch.bfloat16)},
            "merged-in-bfloat16", "answers as if the adapter were merged in bfloat16",
        ),
    }  # fmt: skip


def healthy(engine: MadeEngine) -> Tensors:
    return {ON: engine.logits(), OFF: engine.logits(off=True), MERGED: merged(engine)}


def errors(found: Comparison) -> dict[str, list[Finding]]:
    by_engine: dict[str, list[Finding]] = {}
    for finding in found.findings:
        if finding.severity != "note":
            for worker in finding.workers:
                by_engine.setdefault(worker, []).append(finding)
    return by_engine


def written(engine: MadeEngine, home: Path, outputs: Mapping[str, Tensors]) -> dict[str, Path]:
    return {name: engine.write(home / f"{name}.safetensors", one) for name, one in outputs.items()}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", BUILTIN_CASES)
def test_planted_mistakes_are_named_on_the_built_in_cases(name: str, tmp_path: Path) -> None:
    folder = builtin_folder(name)
    places = folder / "base", folder / "adapter"
    engine = request(*places, tmp_path / "in.safetensors")
    mistakes = planted(engine)
    files = written(
        engine, tmp_path, {name: one for name, (one, *_) in mistakes.items()} | {"healthy": healthy(engine)}
    )
    found = errors(judged(*places, tmp_path, files))
    assert sorted(found) == sorted(mistakes), "and neither the healthy engine nor the CPU"
    for name, (_, kind, sentence) in mistakes.items():
        assert [finding.kind for finding in found[name]] == [kind]
        assert sentence in found[name][0].message


def test_of_a_model_that_nothing_was_built_against(llama: Path, tmp_path: Path) -> None:
    """In bfloat16, with scalings of their own per layer, a head that is saved whole, and weights of other spreads."""
    adapter = on_llama(
        llama,
        peft.LoraConfig(
            r=4, lora_alpha=12, alpha_pattern={"v_proj": 40}, use_rslora=True, modules_to_save=["lm_head"],
            target_modules=["q_proj", "v_proj", "down_proj"],
        ),
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        engine = request(llama, adapter, tmp_path / "in.safetensors", dtype=dtype)
        head = [module for name, module in engine.model.named_modules() if name.endswith("lm_head")]
        outputs = {"healthy": healthy(engine), "ignored": {ON: engine.logits(off=True)}}
        if dtype == "float32":
            outputs |= {
                "kind": {ON: without(engine, lambda name: name.endswith("down_proj"))},
                "rslora": {ON: with_scalings(engine, lambda scaling: scaling / 2)},
            }
            head[0]._disable_adapters = True
            outputs["head"] = {ON: engine.logits()}
            head[0]._disable_adapters = False
        found = errors(judged(llama, adapter, tmp_path, written(engine, tmp_path, outputs), dtype=dtype))
        kinds = {name: [finding.kind for finding in those] for name, those in found.items()}
        wanted = {"ignored": ["adapter-ignored"]}
        if dtype == "float32":
            wanted |= {"kind": ["layers-ignored"], "rslora": ["rslora-ignored"], "head": ["saved-modules-ignored"]}
            assert "as if down_proj had no adapter" in found["kind"][0].message
        assert kinds == wanted


def small(llama: Path, tmp_path: Path) -> tuple[Path, MadeEngine]:
    adapter = on_llama(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return adapter, request(llama, adapter, tmp_path / "in.safetensors")


def top(logits: np.ndarray, count: int, *, skipped: int = 0) -> Tensors:
    found = torch.from_numpy(logits).log_softmax(-1).topk(count + skipped)
    return {ON: found.values[..., skipped:].numpy(), f"{ON}.ids": found.indices[..., skipped:].numpy()}


def test_the_largest_values_are_enough(llama: Path, tmp_path: Path) -> None:
    adapter, engine = small(llama, tmp_path)
    on, off = engine.logits(), engine.logits(off=True)
    some = np.ones(on.shape[:2], bool)
    some[:, -1] = False
    given = {"right": top(on, 6), "ignored": top(off, 6), "no-first": top(on, 6, skipped=1)}
    files = {
        name: engine.write(
            tmp_path / f"{name}.safetensors", {**one, "tokens": some}, values="log_probabilities", top_k=5
        )
        for name, one in given.items()
    }
    found = judged(llama, adapter, tmp_path, files)
    kinds = {name: [finding.kind for finding in those] for name, those in errors(found).items()}
    assert kinds == {"ignored": ["adapter-ignored"], "no-first": ["differs"]}, "the largest of all must be among them"
    notes = [finding.message for finding in found.findings if finding.kind == "part-compared"]
    assert any("120 of 128 places and the 5 largest of 64 values" in note for note in notes)


def test_rows_are_told_apart(llama: Path, tmp_path: Path) -> None:
    adapter, engine = small(llama, tmp_path)
    mixed, broken, computed = engine.logits(), engine.logits(), np.ones((8, 16), bool)
    mixed[[2, 5]] = engine.logits(off=True)[[2, 5]]
    broken[1, 2, 3] = np.nan
    computed[[3, 6]] = False
    outputs = {"mixed": {ON: mixed}, "broken": {ON: broken}, "partial": {ON: engine.logits(), "tokens": computed}}
    found = errors(judged(llama, adapter, tmp_path, written(engine, tmp_path, outputs)))
    messages = {name: [finding.message for finding in those] for name, those in found.items()}
    sentence = "this engine answers as the base alone: the adapter is not applied"
    assert messages["mixed"] == [f"forward · mixed · adapter_on in rows 2, 5: {sentence}"]
    assert messages["broken"] == [
        "forward · broken · adapter_on in row 1: NaN or infinity where the exact value is finite in logits"
    ]
    assert messages["partial"] == [
        "forward · partial · adapter_on of rows 3, 6: the engine gave no outputs of rows 3, 6 of 8"
    ]


@pytest.mark.slow
def test_a_resemblance_is_no_cause(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is named that does not explain the numbers within the rule, and none of several alone."""
    adapter, engine = small(llama, tmp_path)
    on, off = engine.logits(), engine.logits(off=True)
    outputs = {"nearly": {ON: off + (on - off) * 0.01}, "scaled": {ON: on * 1.01}}
    files = written(engine, tmp_path, outputs)
    found = errors(judged(llama, adapter, tmp_path, files))
    assert {name: [finding.kind for finding in those] for name, those in found.items()} == {
        "nearly": ["differs"], "scaled": ["wrong-scale"],
    }  # fmt: skip
    assert "no mistake with an adapter that is known here explains it" in found["nearly"][0].message
    monkeypatch.setattr(explanations, "_without", lambda *_: ("", 0.5))
    real = explanations.mistakes
    nearly = torch.from_numpy(off + (on - off) * 0.01).double()
    monkeypatch.setattr(
        explanations, "mistakes", lambda passes, off: ((cause, place, nearly) for cause, place, _ in real(passes, off))
    )
    (finding,) = errors(judged(llama, adapter, tmp_path, {"nearly": files["nearly"]}))["nearly"]
    assert "or as if scaling were 1, or as if" in finding.message
    assert finding.message.endswith("which is the same here"), "of several none is named alone"


def test_a_promise_of_batch_invariance(llama: Path, tmp_path: Path) -> None:
    adapter, engine = small(llama, tmp_path)
    row = engine.logits(rows=[0])[0]
    nudged, wrong = row.copy(), row.copy()
    nudged[3, 4] = np.nextafter(nudged[3, 4], np.float32(9))
    wrong[3, 4] += 0.01
    given = {
        "kept": (row, True), "broken": (nudged, True), "unpromised": (nudged, False), "wrong": (wrong, False),
    }  # fmt: skip
    files = {
        name: engine.write(
            tmp_path / f"{name}.safetensors",
            {ON: engine.logits(), "batch.1": row, "batch.3.first": row, "batch.3.last": last},
            batch_invariant=promised,
        )
        for name, (last, promised) in given.items()
    }
    found = judged(llama, adapter, tmp_path, files)
    about = {f.workers[0]: (f.severity, f.message) for f in found.findings if f.kind == "batch-variant"}
    assert "kept" not in about
    assert about["broken"][0] == "error"
    assert "row 0 last in a batch of 3 differs in 1 of 1024 values from row 0 alone" in about["broken"][1]
    assert about["unpromised"][0] == "note"
    assert "in 1 of 3 batches than alone" in about["unpromised"][1]
    assert about["wrong"][0] == "error"
    assert "times as far from float64 as the rule allows" in about["wrong"][1]


def test_outputs_of_other_inputs_are_refused(llama: Path, tmp_path: Path) -> None:
    adapter, engine = small(llama, tmp_path)
    other = {**dict.fromkeys(("name", "inputs"), "x"), "base": "", "adapter": "", "dtype": "float32"}
    file = engine.write(tmp_path / "other.safetensors", {ON: engine.logits()}, case=other)
    with pytest.raises(InputError, match="are of other inputs"):
        judged(llama, adapter, tmp_path, {"engine": file})


def test_without_the_judgement_nothing_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The findings above come from the explanations: without them the same outputs are outside, and unexplained."""
    adapter, engine = small(llama, tmp_path)
    files = written(engine, tmp_path, {"ignored": {ON: engine.logits(off=True)}})
    monkeypatch.setattr(judging, "explain", lambda _: explanations.Answer())
    assert [finding.kind for finding in errors(judged(llama, adapter, tmp_path, files))["ignored"]] == ["differs"]


def test_mistakes_that_come_to_the_same_are_all_named(llama: Path, tmp_path: Path) -> None:
    """With alpha = r, which is common, an ignored use_rslora was called a scaling of 1, with the advice for that."""
    config = peft.LoraConfig(r=4, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "v_proj"])
    adapter = on_llama(llama, config)
    engine = request(llama, adapter, tmp_path / "in.safetensors")
    files = written(engine, tmp_path, {"one": {ON: with_scalings(engine, lambda _: 1.0)}})
    ((finding,),) = errors(judged(llama, adapter, tmp_path, files)).values()
    assert finding.kind == "scaling-ignored"
    assert "as if scaling were 1, or as if scaling were lora_alpha / r: use_rslora is ignored" in finding.message
    assert "lora_alpha * sqrt(r)" in str(finding.next)


@pytest.mark.parametrize("mode", [ON, OFF])
def test_weights_in_few_bits_are_named(llama: Path, tmp_path: Path, mode: str) -> None:
    """The engine has loaded the base in float8_e4m3fn, with a scale for each row."""
    adapter, engine = small(llama, tmp_path)
    for name, parameter in engine.model.named_parameters():
        if parameter.dim() == 2 and "lora" not in name and "embed" not in name and "lm_head" not in name:
            scales = parameter.data.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            parameter.data = (parameter.data / scales).to(torch.float8_e4m3fn).float() * scales
    files = written(engine, tmp_path, {"quantized": {mode: engine.logits(off=mode == OFF)}})
    ((finding,),) = errors(judged(llama, adapter, tmp_path, files)).values()
    assert finding.kind == "rounded-weights"
    assert "answers as if weights were in float8_e4m3fn by row" in finding.message


@pytest.mark.parametrize("mode", [ON, OFF])
def test_rotary_positions_are_named(llama: Path, tmp_path: Path, mode: str) -> None:
    adapter, engine = small(llama, tmp_path)
    rotary = engine.model.get_base_model().model.rotary_emb
    own = rotary.inv_freq
    rotary.inv_freq = own.bfloat16().float()
    outputs = {"rounded": {mode: engine.logits(off=mode == OFF)}}
    rotary.inv_freq = 1 / 1_000_000.0 ** (torch.arange(len(own)) / len(own))
    outputs["other-base"] = {mode: engine.logits(off=mode == OFF)}
    found = errors(judged(llama, adapter, tmp_path, written(engine, tmp_path, outputs)))
    sentences = {name: finding.message for name, (finding,) in found.items()}
    assert "with rotary frequencies rounded to bfloat16" in sentences["rounded"]
    assert "with rotary positions of base 1,000,000 (here 10,000)" in sentences["other-base"]


def test_one_kind_in_one_block_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, num_key_value_heads=2)
    base = saved(transformers.LlamaForCausalLM(config), tmp_path / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    adapter = adapter_on(transformers.LlamaForCausalLM.from_pretrained(base), lora, tmp_path / "adapter")
    engine = request(base, adapter, tmp_path / "in.safetensors")
    left = {ON: without(engine, lambda name: name.endswith("layers.1.self_attn.v_proj"))}
    ((finding,),) = errors(judged(base, adapter, tmp_path, written(engine, tmp_path, {"left": left}))).values()
    assert "as if model.layers.1.self_attn.v_proj had no adapter" in finding.message


def test_a_variant_that_is_ignored_a_delta_per_rank_and_another_base(llama: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=12, use_dora=True, target_modules=["q_proj", "o_proj"])
    adapter = on_llama(llama, config)
    engine = request(llama, adapter, tmp_path / "in.safetensors")
    healthy_one = {ON: engine.logits(), OFF: engine.logits(off=True)}
    kinds = [layer.scaling for name, layer in engine.layers if name.endswith("o_proj")]
    for held in kinds:
        held["default"] *= 4
    outputs = {"healthy": healthy_one, "ranks": {ON: engine.logits()}}
    for held in kinds:
        held["default"] /= 4
    for _, layer in engine.layers:
        layer.lora_variant.clear()
    outputs["dora"] = {ON: engine.logits()}
    outputs["base"] = {name: 1.01 * one for name, one in healthy_one.items()}
    found = errors(judged(llama, adapter, tmp_path, written(engine, tmp_path, outputs)))
    kind = {name: {finding.kind for finding in those} for name, those in found.items()}
    assert (kind["ranks"], kind["dora"], "healthy" in kind) == ({"layers-repeated"}, {"variant-ignored"}, False)
    assert "as if o_proj (4 times) added the adapter several times" in found["ranks"][0].message
    assert "the engine's base, its config" in str(found["base"][0].next)


@loads_onto_mixtures
def test_a_mixture_is_explained_by_passes_that_decide_themselves_or_told_not_to_be_judged(tmp_path: Path) -> None:
    """A mistake moves the router, so that passes held to the right decisions explained none, and all was consistent."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    base = saved(transformers.MixtralForCausalLM(config), tmp_path / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    adapter = adapter_on(transformers.MixtralForCausalLM.from_pretrained(base), lora, tmp_path / "adapter")
    engine = request(base, adapter, tmp_path / "in.safetensors")
    outputs = {
        "healthy": {ON: engine.logits()},
        "scaling": {ON: with_scalings(engine, lambda _: 1.0)},
        "other": {ON: with_scalings(engine, lambda scaling: 3 * scaling)},
    }
    report = judged(base, adapter, tmp_path, written(engine, tmp_path, outputs))
    found = {name: [finding.kind for finding in those] for name, those in errors(report).items()}
    assert found == {"scaling": ["scaling-ignored"], "other": ["nothing-compared"]}
    assert report.verdict == "incomplete"


@pytest.mark.parametrize("scale", [False, True], ids=["", "scaled embeddings"])
def test_a_head_that_is_tied_again_on_loading(tmp_path: Path, scale: bool) -> None:
    """The config of the base ties them, and a merge changes each by its own adapter."""
    torch.manual_seed(0)
    kind = (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig)
    maker, config = kind if scale else (transformers.LlamaForCausalLM, transformers.LlamaConfig)
    made = config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    base = saved(maker(made), tmp_path / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=2, target_modules=["q_proj", "embed_tokens", "lm_head"])
    adapter = adapter_on(maker.from_pretrained(base), lora, tmp_path / "adapter")
    engine = request(base, adapter, tmp_path / "in.safetensors")
    outputs = {"healthy": {ON: engine.logits()}}
    whole = engine.load()
    head = whole.get_output_embeddings().get_base_layer()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # else both deltas are merged into the one weight
    merged_one = whole.merge_and_unload()
    outputs["untied"] = {ON: engine.logits(merged_one)}
    merged_one.get_output_embeddings().weight = merged_one.get_input_embeddings().weight
    outputs["tied"] = {ON: engine.logits(merged_one)}
    ((finding,),) = errors(judged(base, adapter, tmp_path, written(engine, tmp_path, outputs))).values()
    assert (finding.kind, finding.workers) == ("head-tied", ("tied",))
    assert "tie_word_embeddings" in str(finding.next)
