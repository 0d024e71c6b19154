"""Answer a request of `consistency inputs` with TensorRT-LLM. Written from its documentation; NOT RUN by this project.

Usage: python tensorrt_llm_api.py inputs.safetensors outputs.safetensors

https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html (`LLM`, `SamplingParams.return_context_logits`),
https://nvidia.github.io/TensorRT-LLM/examples/llm_multilora.html (`LoraConfig`, `LoRARequest`)
"""

import json
import sys

import numpy as np
import tensorrt_llm
from safetensors import safe_open
from safetensors.numpy import save_file
from tensorrt_llm.executor import LoRARequest
from tensorrt_llm.llmapi import KvCacheConfig
from tensorrt_llm.lora_helper import LoraConfig


def main(source: str, target: str) -> None:
    """Write the logits of every place, with the adapter and without it."""
    with safe_open(source, framework="numpy") as file:
        request = json.loads(file.metadata()["consistency"])
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("attention_mask").astype(bool)
    dtype, adapter = request["case"]["dtype"], request["adapter"]
    of_lora = {} if adapter is None else {"lora_config": LoraConfig(lora_dir=[adapter], max_lora_rank=64)}
    # a block of the cache that is used again would leave out the logits of its tokens
    cache = KvCacheConfig(enable_block_reuse=False)
    llm = tensorrt_llm.LLM(
        model=request["base"], dtype=dtype, skip_tokenizer_init=True, kv_cache_config=cache, **of_lora
    )  # fmt: skip
    params = tensorrt_llm.SamplingParams(max_tokens=1, end_id=-1, return_context_logits=True, detokenize=False)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)

    def logits(rows, lora):
        """Return the logits of some rows, as float32."""
        prompts = [{"prompt_token_ids": ids[row][mask[row]].tolist()} for row in rows]
        answers = [one.context_logits.float().cpu().numpy() for one in llm.generate(prompts, params, lora_request=lora)]
        found = np.zeros((len(rows), ids.shape[1], answers[0].shape[-1]), np.float32)
        for n, answer in enumerate(answers):
            found[n, mask[rows[n]]] = answer
        return found

    tensors, rows = {"tokens": mask}, list(range(len(ids)))
    for mode in ("adapter_off",) if adapter is None else ("adapter_on", "adapter_off"):
        tensors[mode] = logits(rows, lora if mode == "adapter_on" else None)
    for size in request["batches"]:  # the first row alone, and first and last among others
        if size == 1:
            tensors["batch.1"] = logits(rows[:1], lora)[0]
        else:
            tensors[f"batch.{size}.first"] = logits(rows[:size], lora)[0]
            tensors[f"batch.{size}.last"] = logits(rows[1:size] + rows[:1], lora)[-1]
    about = {
        "schema": "consistency.outputs/1", "case": request["case"], "engine": "tensorrt_llm",
        "version": tensorrt_llm.__version__, "device": "cuda", "dtype": dtype, "values": "logits",
    }  # fmt: skip
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, target, metadata={"consistency": json.dumps(about)})


if __name__ == "__main__":  # TensorRT-LLM starts processes that import this file
    main(*sys.argv[1:3])
