"""Run the drill on models of many architectures, and print the table of `docs/faults-by-architecture.md`.

    python -m benchmarks.faults_by_architecture DIR              # make models and adapters, run, print the page
    python -m benchmarks.faults_by_architecture DIR --write      # the same, into docs/faults-by-architecture.md
    python -m benchmarks.faults_by_architecture DIR --only jamba,t5
    python -m benchmarks.faults_by_architecture DIR --again      # run again what the folder has rows of

Run from the root of the repository, with the extra `quantized`. `DIR/NAME` gets a tiny model and an adapter of it,
`DIR/NAME/out` the report of each fault, `DIR/NAME/rows.json` what became of each. It is `consistency drill --base …
--adapter …`: the case is first run without a fault, and each fault that can be planted in it goes into one of two
workers.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import zoo
from benchmarks.faults_by_method import DEVICES, cell
from benchmarks.generated_parts import show
from consistency.case.options import Options
from consistency.errors import InputError
from consistency.extras.diagnosis.drill.drill import DrillRow, choose, drill, prepare_trials
from consistency.extras.diagnosis.drill.plantable import several_adapters
from consistency.worker.faults.catalogue import FAULTS

PAGE = Path(__file__).parents[1] / "docs" / "faults-by-architecture.md"
STALL_S = 30.0
"""Seconds without a sign of life after which a worker is lost; two of the faults hang."""

_WORDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE: dict[str, Any] = {
    **_WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A tiny model and the layers its adapter is on.

    Attributes
    ----------
    tiny : zoo.Tiny
    targets : tuple of str or str
        `target_modules`.
    dtype : str
        In which the model is saved, and loaded.
    quantized : mapping of str to Any
        Fields of a `BitsAndBytesConfig` that the base is saved with.
    method : str
        As PEFT names it.
    fields : mapping of str to Any
        Further fields of the adapter's configuration.
    """

    tiny: zoo.Tiny
    targets: tuple[str, ...] | str
    dtype: str = "float32"
    quantized: Mapping[str, Any] = field(default_factory=dict)
    method: str = "LORA"
    fields: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(tiny=zoo.MODELS["gpt2"], targets=("c_attn", "c_fc")),
    "bert": Architecture(tiny=zoo.MODELS["bert"], targets=("query", "value")),
    "t5": Architecture(tiny=zoo.MODELS["t5"], targets=("q", "v", "wi", "wo")),
    "vit": Architecture(tiny=zoo.MODELS["vit"], targets=("q_proj", "v_proj")),
    "llava": Architecture(tiny=zoo.MODELS["llava"], targets=("q_proj", "v_proj")),
    "mixtral": Architecture(tiny=zoo.MODELS["mixtral"], targets=("q_proj", "v_proj")),
    "deepseek_v3": Architecture(
        tiny=zoo.Tiny(
            family="mixture of experts", type="deepseek_v3", model="DeepseekV3ForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 128, "moe_intermediate_size": 32, "num_key_value_heads": 4,
                    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
                    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        ),
        targets="all-linear", dtype="bfloat16",
    ),
    "gpt_oss": Architecture(
        tiny=zoo.Tiny(
            family="mixture of experts", type="gpt_oss", model="GptOssForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16,
                    "num_local_experts": 4, "num_experts_per_tok": 2,
                    "layer_types": ["sliding_attention", "full_attention"]},
        ),
        targets=("q_proj", "v_proj", "o_proj"), dtype="bfloat16",
    ),
    "mamba": Architecture(tiny=zoo.MODELS["mamba"], targets=("in_proj", "x_proj")),
    "jamba": Architecture(
        tiny=zoo.Tiny(
            family="hybrid", type="jamba", model="JambaForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 128, "num_key_value_heads": 2, "attn_layer_period": 2,
                    "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4,
                    "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        ),
        targets=("q_proj", "v_proj", "in_proj", "x_proj"),
    ),
    "llama int8": Architecture(
        tiny=zoo.Tiny(
            family="decoder", type="llama", model="LlamaForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 128, "num_key_value_heads": 2},
        ),
        targets=("q_proj", "down_proj"), quantized={"load_in_8bit": True},
    ),
    "llama nf4": Architecture(
        tiny=zoo.Tiny(
            family="decoder", type="llama", model="LlamaForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 128, "num_key_value_heads": 2},
        ),
        targets=("q_proj", "down_proj"),
        quantized={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"},
    ),
    "gemma3": Architecture(
        tiny=zoo.Tiny(
            family="decoder", type="gemma3_text", model="Gemma3ForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
                    "query_pre_attn_scalar": 16},
        ),
        targets=("q_proj", "o_proj", "down_proj"), dtype="bfloat16", fields={"use_rslora": True},
    ),
    "phi3": Architecture(
        tiny=zoo.Tiny(
            family="decoder", type="phi3", model="Phi3ForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 128, "num_key_value_heads": 2},
        ),
        targets=("qkv_proj", "gate_up_proj"), dtype="float16",
    ),
    "qwen3_moe": Architecture(
        tiny=zoo.Tiny(
            family="mixture of experts", type="qwen3_moe", model="Qwen3MoeForCausalLM", task="CAUSAL_LM",
            config={**_WIDE, "intermediate_size": 96, "moe_intermediate_size": 32, "num_key_value_heads": 2,
                    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        ),
        targets=("q_proj", "v_proj"), fields={"use_dora": True},
    ),
    "whisper": Architecture(tiny=zoo.MODELS["whisper"], targets=("q_proj", "v_proj", "fc1")),
    "clip": Architecture(tiny=zoo.MODELS["clip"], targets=("q_proj", "v_proj")),
    "bart": Architecture(tiny=zoo.MODELS["bart"], targets=("k_proj", "v_proj", "fc1"), method="IA3",
                         fields={"feedforward_modules": ["fc1"]}),
    "llama lokr": Architecture(tiny=zoo.MODELS["llama"], targets=("q_proj", "v_proj"), dtype="bfloat16", method="LOKR"),
    "llama oft": Architecture(tiny=zoo.MODELS["llama"], targets=("q_proj", "down_proj"), method="OFT"),
}  # fmt: skip
"""What `zoo.MODELS` has of each family, and the kinds that it lacks; dtypes and other methods than LoRA among them."""


class Drilled(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture and what became of each fault; `healthy` is why none was planted."""

    name: str
    rows: dict[str, DrillRow]
    healthy: str = ""
    took_s: float = 0.0


def make(name: str, home: Path) -> tuple[Path, Path]:
    """Save the model and its adapter in a folder, and return the folders of both."""
    import peft
    import torch
    import transformers

    one = ARCHITECTURES[name]
    base, adapter = home / "base", home / "adapter"
    if adapter.exists():
        return base, adapter
    model = zoo.build(one.tiny).to(getattr(torch, one.dtype))
    saved: Any = model
    saved.save_pretrained(home / "plain" if one.quantized else base)
    if one.quantized:
        quantized: Any = getattr(transformers, one.tiny.model).from_pretrained(
            home / "plain", quantization_config=transformers.BitsAndBytesConfig(**one.quantized), device_map={"": "cpu"}
        )
        quantized.save_pretrained(base)
    given: dict[str, Any] = {"target_modules": one.targets if isinstance(one.targets, str) else list(one.targets)}
    if one.method == "LORA":
        given |= {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "fan_in_fan_out": one.tiny.type == "gpt2"}
    config = zoo.fitted(one.method, {**given, "task_type": one.tiny.task, **one.fields})
    torch.manual_seed(1)
    adapted = peft.get_peft_model(saved, config, autocast_adapter_dtype=False)
    if one.method != "LORA":  # which has no start at random, for every method
        zoo.move(adapted, np.random.default_rng(1))
    adapted.save_pretrained(adapter)
    return base, adapter


def run(name: str, home: Path, *, only: Sequence[str] = ()) -> Drilled:
    """Plant every fault that can be in a case of this architecture."""
    began = time.monotonic()
    base, adapter = make(name, home)
    options = Options(base=str(base), adapter=str(adapter), devices=DEVICES, stall=STALL_S)
    faults = choose(only)
    with several_adapters(adapter) as several:
        try:
            trials = prepare_trials(faults, options, several=several, out=home / "out", watch=_silent, replace=True)
        except InputError as error:
            return Drilled(name=name, rows={}, healthy=str(error.parts.get("got", error)))
        rows = drill(trials, out=home / "out", watch=_silent, replace=True)
    return Drilled(name=name, rows={row.fault: row for row in rows}, took_s=time.monotonic() - began)


def _silent(_label: str, _event: object) -> None:
    """Show no progress."""


# --- the page -------------------------------------------------------------------------------------------------------


def table(found: Sequence[Drilled]) -> str:
    """Return a table of faults by architectures, without those faults that none of them can have."""
    lines: list[Iterable[str]] = [("fault", *(one.name for one in found)), ("---",) * (1 + len(found))]
    for fault in FAULTS:
        if any(row.planted for one in found for name, row in one.rows.items() if name == fault):
            lines.append((f"`{fault}`", *(cell(one.rows.get(fault)) for one in found)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def why_not(found: Sequence[Drilled]) -> str:
    """Return a list of why faults were not planted: one line for each reason."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if one.healthy:
            reasons[f"without any fault: {one.healthy}"]["every fault"].append(one.name)
        for fault, row in one.rows.items():
            if not row.planted:
                reasons[row.message.strip().splitlines()[0]][f"`{fault}`"].append(one.name)
    lines = []
    for reason, by_fault in sorted(reasons.items()):
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for fault, names in by_fault.items():
            groups[tuple(names)].append(fault)
        where = "; ".join(
            f"{', '.join(faults)}" + ("" if len(names) == len(found) else f" in {', '.join(names)}")
            for names, faults in groups.items()
        )
        lines.append(f"* {reason}: {where}")
    return "\n".join(lines)


def figures(found: Sequence[Drilled]) -> str:
    """Return the sentence about the run as a whole, and a table of the architectures."""
    planted = [row for one in found for row in one.rows.values() if row.planted]
    passed = sum(row.passed for row in planted)
    lines: list[Iterable[str]] = [("architecture", "family", "dtype", "method", "on", "faults found", "seconds")]
    lines.append(("---",) * 7)
    for one in found:
        made = ARCHITECTURES[one.name]
        of = [row for row in one.rows.values() if row.planted]
        targets = made.targets if isinstance(made.targets, str) else ", ".join(made.targets)
        method = " ".join((made.method, *(name for name, value in made.fields.items() if value is True)))
        dtype = made.dtype + ("" if not made.quantized else f", {one.name.split()[-1]}")
        counted = f"{sum(row.passed for row in of)} of {len(of)}"
        lines.append((one.name, made.tiny.family, dtype, method, targets, counted, f"{one.took_s:.0f}"))
    of_all = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{passed} of {len(planted)} planted faults found and named, in {len(found)} cases on "
        f"{', '.join(DEVICES)}.\n\n{of_all}"
    )


def listed(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield architecture, fault and cell of every cell of a page."""
    names: list[str] = []
    for line in page.splitlines():
        cells = [text.strip() for text in line.strip("|").split("|")]
        if line.startswith("| fault |"):
            names = cells[1:]
        elif line.startswith("| `"):
            yield from ((name, cells[0].strip("`"), text) for name, text in zip(names, cells[1:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(ARCHITECTURES))
    parser.add_argument("--again", action="store_true", help="run again what the folder has rows of")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    given = parser.parse_args()
    zoo.quiet()
    found = []
    for name in given.only:
        home = given.folder.resolve() / name.replace(" ", "-")
        kept = home / "rows.json"
        if given.again or not kept.exists():
            home.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(msgspec.json.encode(run(name, home)))
        found.append(msgspec.json.decode(kept.read_bytes(), type=Drilled))
        print(figures(found[-1:]), "", why_not([one for one in found[-1:] if one.healthy]), sep="\n", flush=True)
    show({"figures": figures(found), "table": table(found), "reasons": why_not(found)}, PAGE, write=given.write)


if __name__ == "__main__":
    main()
