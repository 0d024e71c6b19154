"""Answer a request of `consistency inputs` with SGLang. Written from its documentation; NOT RUN by this project.

Usage: python sglang_engine.py inputs.safetensors outputs.safetensors [TOP_K]

https://docs.sglang.io/basic_usage/sampling_params.html (`return_logprob`, `top_logprobs_num`, `logprob_start_len`),
https://docs.sglang.io/advanced_features/lora.html (`lora_paths`, `lora_path`),
https://docs.sglang.io/advanced_features/deterministic_inference.html
"""

import json
import sys

import numpy as np
import sglang
from safetensors import safe_open
from safetensors.numpy import save_file


def main(source: str, target: str, top: int = 20) -> None:
    """Write the most likely tokens of every place, with the adapter and without it."""
    with safe_open(source, framework="numpy") as file:
        request = json.loads(file.metadata()["consistency"])
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("attention_mask").astype(bool)
    dtype, adapter, deterministic = request["case"]["dtype"], request["adapter"], False
    engine = sglang.Engine(
        model_path=request["base"], dtype=dtype, skip_tokenizer_init=True, disable_radix_cache=True, random_seed=0,
        enable_deterministic_inference=deterministic, **({"lora_paths": [f"adapter={adapter}"]} if adapter else {}),
    )  # fmt: skip

    def outputs(rows, lora):
        """Return log-probabilities and ids of `top` tokens."""
        values = np.zeros((len(rows), ids.shape[1], top), np.float32)
        chosen = np.full(values.shape, -1, np.int64)
        answers = engine.generate(
            input_ids=[ids[row][mask[row]].tolist() for row in rows], return_logprob=True, logprob_start_len=0,
            top_logprobs_num=top, lora_path=[lora] * len(rows) if adapter else None,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},  # another one would divide the logits
        )  # fmt: skip
        for n, answer in enumerate(answers):
            about = answer["meta_info"]
            # those of token i + 1 belong to place i; those after the last one come with the token that is generated
            found = [*about["input_top_logprobs"][1:], about["output_top_logprobs"][0]]
            for place, likely in zip(np.flatnonzero(mask[rows[n]]), found, strict=True):
                values[n, place, : len(likely)] = [one[0] for one in likely]
                chosen[n, place, : len(likely)] = [one[1] for one in likely]
        return values, chosen

    tensors, rows = {"tokens": mask}, list(range(len(ids)))
    lora = "adapter" if adapter else None
    for mode in ("adapter_on", "adapter_off") if adapter else ("adapter_off",):
        tensors[mode], tensors[mode + ".ids"] = outputs(rows, lora if mode == "adapter_on" else None)
    for size in request["batches"]:  # the first row alone, and first and last among others
        for place in ("first", "last")[: min(size, 2)]:
            name = "batch.1" if size == 1 else f"batch.{size}.{place}"
            batch = rows[:size] if place == "first" else rows[1:size] + rows[:1]
            values, chosen = outputs(batch, lora)
            tensors[name], tensors[name + ".ids"] = values[batch.index(0)], chosen[batch.index(0)]
    engine.shutdown()
    about = {
        "schema": "consistency.outputs/1", "case": request["case"], "engine": "sglang",
        "version": sglang.__version__, "device": "cuda", "dtype": dtype, "values": "log_probabilities", "top_k": top,
        "batch_invariant": deterministic,
    }  # fmt: skip
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, target, metadata={"consistency": json.dumps(about)})


if __name__ == "__main__":  # SGLang starts processes that import this file
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
