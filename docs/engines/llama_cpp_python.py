"""Answer a request of `consistency inputs` with llama.cpp. Written from its Python binding; NOT RUN by this project.

llama.cpp reads GGUF files. Scripts of its repository convert base and adapter; the type has to be the case's dtype:
    python convert_hf_to_gguf.py BASE --outtype f32 --outfile base.gguf
    python convert_lora_to_gguf.py ADAPTER --base BASE --outtype f32 --outfile adapter.gguf

Usage: python llama_cpp_python.py inputs.safetensors outputs.safetensors base.gguf [adapter.gguf]

https://llama-cpp-python.readthedocs.io/en/latest/api-reference/ (`Llama`: `lora_path`, `logits_all`, `eval`, `scores`)
"""

import json
import sys

import llama_cpp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def main(source: str, target: str, base: str, adapter: str | None = None) -> None:
    """Write the logits of every place, with the adapter and without it: of each row alone, so in no batches."""
    with safe_open(source, framework="numpy") as file:
        request = json.loads(file.metadata()["consistency"])
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("attention_mask").astype(bool)

    def logits(lora):
        """Return the logits of every row, as float32; the cache of keys and values is no more rounded than they are."""
        llm = llama_cpp.Llama(
            base, lora_path=lora, logits_all=True, n_ctx=ids.shape[1], n_batch=ids.shape[1], verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
        )  # fmt: skip
        found = np.zeros((*ids.shape, llm.n_vocab()), np.float32)
        for row in range(len(ids)):
            llm.reset()
            llm.eval(ids[row][mask[row]].tolist())
            found[row, mask[row]] = llm.scores[: mask[row].sum()]
        llm.close()
        return found

    tensors = {"tokens": mask, "adapter_off": logits(None)}
    if adapter is not None:
        tensors["adapter_on"] = logits(adapter)
    about = {
        "schema": "consistency.outputs/1", "case": request["case"], "engine": "llama.cpp",
        "version": f"llama-cpp-python {llama_cpp.__version__}", "device": "cpu", "dtype": request["case"]["dtype"],
        "values": "logits", "settings": {"base": base, "adapter": str(adapter), "cache": "f32"},
    }  # fmt: skip
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, target, metadata={"consistency": json.dumps(about)})


if __name__ == "__main__":
    main(*sys.argv[1:5])
