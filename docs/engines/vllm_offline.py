"""Answer a request of `consistency inputs` with vLLM. Written from vLLM's documentation; NOT RUN by this project.

Usage: python vllm_offline.py inputs.safetensors outputs.safetensors [TOP_K]

https://docs.vllm.ai/en/latest/api/vllm/sampling_params/ (`prompt_logprobs`, `logprobs`),
https://docs.vllm.ai/en/latest/features/lora/ (`LoRARequest`), https://docs.vllm.ai/en/latest/features/batch_invariance/
"""

import json
import os
import sys

import numpy as np
import vllm
from safetensors import safe_open
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform


def main(source: str, target: str, top: int = 20) -> None:
    """Write the most likely tokens of every place, with the adapter and without it."""
    with safe_open(source, framework="numpy") as file:
        request = json.loads(file.metadata()["consistency"])
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("attention_mask").astype(bool)
    dtype, adapter = request["case"]["dtype"], request["adapter"]
    llm = vllm.LLM(
        model=request["base"], dtype=dtype, enable_lora=adapter is not None, max_lora_rank=64, max_logprobs=top,
        skip_tokenizer_init=True, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    params = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=top, logprobs=top, detokenize=False)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)

    def outputs(rows, lora):
        """Return log-probabilities and ids: of `top` tokens, and of the prompt's own, which vLLM adds."""
        prompts = [{"prompt_token_ids": ids[row][mask[row]].tolist()} for row in rows]
        values = np.zeros((len(rows), ids.shape[1], top + 1), np.float32)
        chosen = np.full(values.shape, -1, np.int64)
        for n, answer in enumerate(llm.generate(prompts, params, lora_request=lora)):
            # those of token i + 1 belong to place i; those after the last one come with the token that is generated
            found = [*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]
            for place, likely in zip(np.flatnonzero(mask[rows[n]]), found, strict=True):
                chosen[n, place, : len(likely)] = list(likely)
                values[n, place, : len(likely)] = [one.logprob for one in likely.values()]
        return values, chosen

    tensors, rows = {"tokens": mask}, list(range(len(ids)))
    for mode in ("adapter_off",) if adapter is None else ("adapter_on", "adapter_off"):
        tensors[mode], tensors[mode + ".ids"] = outputs(rows, lora if mode == "adapter_on" else None)
    for size in request["batches"]:  # the first row alone, and first and last among others
        for place in ("first", "last")[: min(size, 2)]:
            name = "batch.1" if size == 1 else f"batch.{size}.{place}"
            batch = rows[:size] if place == "first" else rows[1:size] + rows[:1]
            values, chosen = outputs(batch, lora)
            tensors[name], tensors[name + ".ids"] = values[batch.index(0)], chosen[batch.index(0)]
    about = {
        "schema": "consistency.outputs/1", "case": request["case"], "engine": "vllm", "version": vllm.__version__,
        "device": current_platform.get_device_name(), "dtype": dtype, "values": "log_probabilities", "top_k": top,
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
    }  # fmt: skip
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, target, metadata={"consistency": json.dumps(about)})


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
