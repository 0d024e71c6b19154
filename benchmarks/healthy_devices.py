"""Check models of today's kinds on healthy devices with a GPU's arithmetic: nothing has to be found.

    python -m benchmarks.healthy_devices                       # twelve tiny kinds, the built-in cases, three dtypes
    python -m benchmarks.healthy_devices --wide                # hidden size 2048, two layers, as well
    python -m benchmarks.healthy_devices --dtypes float32 --only deepseek
    python -m benchmarks.healthy_devices --dtypes float32 --only invariant --seeds 100 --stages gradient
    python -m benchmarks.healthy_devices --dtypes float32 --seeds 20 --devices cpu,cpu@baseline,cpu@avx2 \
        --stages replicas,shards,tensor-parallel       # ranks of a group: kernel variants of this CPU

Without `--devices` they are of the software accelerator (`tests/accelerator`): one accumulator for each element (S),
half types in a matrix unit that cuts its accumulator (T), sums split into three (A); with `cumsum` in float32 and
CUDA's `topk`. They are a double: what holds here is that such arithmetic raises no alarm, not that a GPU has it.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.accelerator.build import build
from tests.accelerator.fixtures import Double

DEVICES = {"npu:0": "S", "npu:1": "T", "npu:2": "A"}
BUILT_IN = ("llama", "gpt2", "bert")
SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def dense() -> Any:
    config = transformers.LlamaConfig(**SMALL, intermediate_size=160, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), ["q_proj", "v_proj", "down_proj"]


def deepseek() -> Any:
    """Make a mixture of experts whose routing is `topk(sorted=False)`, by groups."""
    config = transformers.DeepseekV3Config(
        **SMALL, intermediate_size=96, moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), ["q_a_proj", "o_proj"]


def mamba() -> Any:
    config = transformers.Mamba2Config(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=1,
        chunk_size=8,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config), ["in_proj"]


def encoder() -> Any:
    config = transformers.BertConfig(**SMALL, intermediate_size=96, num_labels=3)
    return transformers.BertForSequenceClassification(config), ["query", "value"]


def encoder_decoder() -> Any:
    config = transformers.T5Config(
        vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), ["q", "v"]


def wide() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ["q_proj", "v_proj", "down_proj"]


def invariant() -> Any:
    """Make an encoder whose biases are trained too: a key's changes no weight of a softmax, so its gradient is zero."""
    config = transformers.BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    return transformers.BertForSequenceClassification(config), ["query", "key"]


def biased() -> Any:
    """Make a decoder with biases, and a head that is its embedding."""
    config = transformers.Qwen2Config(**SMALL, intermediate_size=160, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config), ["q_proj", "v_proj", "up_proj"]


def normalized() -> Any:
    """Make a decoder with norms of queries and keys, local windows, soft caps and a scaled embedding."""
    config = transformers.Gemma3TextConfig(
        **SMALL, intermediate_size=160, num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=16,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config), ["q_proj", "o_proj", "down_proj"]


def fused() -> Any:
    """Make a decoder whose projections are one layer."""
    config = transformers.Phi3Config(**SMALL, intermediate_size=160, num_key_value_heads=2, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config), ["qkv_proj", "gate_up_proj"]


def norms_after() -> Any:
    config = transformers.Olmo2Config(**SMALL, intermediate_size=160, num_key_value_heads=2)
    return transformers.Olmo2ForCausalLM(config), ["q_proj", "v_proj", "up_proj"]


def multiplied() -> Any:
    """Make a decoder that scales its embedding, attention, residuals and logits."""
    config = transformers.GraniteConfig(
        **SMALL, intermediate_size=160, num_key_value_heads=2, embedding_multiplier=12.0, attention_multiplier=0.1,
        residual_multiplier=0.22, logits_scaling=8.0,
    )  # fmt: skip
    return transformers.GraniteForCausalLM(config), ["k_proj", "o_proj", "gate_proj"]


def mixture() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SMALL, intermediate_size=96, moe_intermediate_size=32, num_key_value_heads=2, head_dim=16, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config), ["q_proj", "v_proj"]


def sinks() -> Any:
    """Make a mixture of experts with biases in them, and attention that may attend to nothing."""
    config = transformers.GptOssConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config), ["q_proj", "o_proj"]


KINDS: dict[str, Callable[[], Any]] = {
    "dense": dense, "biased": biased, "deepseek": deepseek, "mamba": mamba, "encoder": encoder,
    "encoder-decoder": encoder_decoder, "normalized": normalized, "fused": fused, "norms-after": norms_after,
    "multiplied": multiplied, "mixture": mixture, "sinks": sinks,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--only", default="", help="names of kinds and built-in cases, separated by commas")
    parser.add_argument("--wide", action="store_true", help="one of real width too")
    parser.add_argument("--stages", default="merged,forward,gradient")
    parser.add_argument("--devices", default="", help="those of this machine, in place of the double's")
    parser.add_argument("--seeds", type=int, default=1, help="models of each kind, with other weights")
    arguments = parser.parse_args()
    chosen = [name for name in arguments.only.split(",") if name]
    kinds = KINDS | ({"wide": wide} if arguments.wide else {}) | ({"invariant": invariant} if chosen else {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = []
        for name in (*kinds, *BUILT_IN):
            if chosen and name not in chosen:
                continue
            for seed in range(1 if name in BUILT_IN else arguments.seeds):
                place = f"{name}-{seed}" if seed else name
                built_in = {"base": f"builtin:{name}"}
                files = built_in if name in BUILT_IN else made(folder / place, kinds[name], seed)
                for dtype in arguments.dtypes.split(","):
                    fields = {"name": f"{place}-{dtype}", "dtype": dtype, **files}
                    lines += ["[[case]]", *(f"{field} = {json.dumps(value)}" for field, value in fields.items())]
        suite = folder / "suite.toml"
        suite.write_text("\n".join(lines) + "\n", encoding="utf-8")
        out = folder / "out"
        environment = None
        if not arguments.devices:
            double = Double(folder=build(Path.home() / ".cache" / "consistency-double"))
            environment = double.environment(devices=len(DEVICES), architectures=list(DEVICES.values()), as_cuda=True)
        command = [sys.executable, "-P", "-m", "consistency", "run", str(suite)]
        options = ["--devices", arguments.devices or ",".join(("cpu", *DEVICES)), "--stages", arguments.stages]
        options += ["--load-paths", "isolated", "--out", str(out)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)
        if not (out / "suite.json").exists():
            print(done.stdout, done.stderr)
            return 2
        return _told(out, arguments.stages.split(","))


def made(folder: Path, make: Callable[[], Any], seed: int) -> dict[str, str]:
    """Save a base and an adapter on it, and return the fields of a case that name them."""
    torch.manual_seed(seed)
    model, targets = make()
    model.save_pretrained(folder / "base")
    bias: Any = "all" if make is invariant else "none"
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, bias=bias)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder / "adapter")
    return {"base": str(folder / "base"), "adapter": str(folder / "adapter")}


def _told(out: Path, stages: Sequence[str]) -> int:
    """Print a row of the worst ratio and of what was skipped for each case; return 1 where anything is found."""
    alarms = 0
    print(f"| case | verdict | {' | '.join(stages)} | skipped |", f"|---|---|{'---|' * len(stages)}---|", sep="\n")
    for report in sorted(out.glob("cases/*/report.json")):
        content = json.loads(report.read_text(encoding="utf-8"))
        worst: dict[str, float] = collections.defaultdict(float)
        skipped: collections.Counter[str] = collections.Counter()
        for row in content["outcomes"]:
            if isinstance(row["ratio"], float):
                worst[row["stage"]] = max(worst[row["stage"]], row["ratio"])
            if row["status"] == "skipped":
                skipped[f"{row['stage']}: {row['reason']}"] += content["cohorts"][row["cohort"]]["count"]
        found = [finding["message"] for finding in content["findings"] if finding["severity"] != "note"]
        alarms += bool(found)
        ratios = " | ".join(f"{worst[stage]:.2f}" for stage in stages)
        reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.items()) or "none"
        print(f"| {report.parent.name} | {content['verdict']} | {ratios} | {reasons} |", *found, sep="\n    ")
    print(f"{alarms} cases with a finding")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
