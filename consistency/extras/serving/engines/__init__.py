"""The inference engines that are known: how each computes by default, and which of them run here.

`consistency engine` runs those with a compiler: each compiles the model by its own compiler and runs it by its own
kernels. A process of this package does it, but no worker: nothing is pinned, and what it writes is judged like the file
of any other engine.

`consistency check-text --engine` takes all of them: a text is judged by what rounding makes in the engine's own
arithmetic, which may be another one than the model's dtype says. Each entry names where that is stated.
"""

from consistency.extras.serving.engines.known_engine import KnownEngine

ENGINES = {
    "vllm": KnownEngine(
        title="vLLM",
        source="kv_cache_dtype=auto is the model's dtype (config/cache.py), logprobs_mode=raw_logprobs "
        "(config/model.py), VLLM_FLOAT32_MATMUL_PRECISION=highest (envs.py)",
        version="0.32.0",
    ),
    "sglang": KnownEngine(
        title="SGLang",
        processed_by=("temperature",),
        source="kv_cache_dtype=auto is the model's dtype (server_args.py); without SGLANG_RETURN_ORIGINAL_LOGPROB log "
        "probabilities are taken after temperature (srt/layers/sampler.py)",
        version="0.5",
    ),
    "llama.cpp": KnownEngine(
        title="llama.cpp",
        kv_dtypes={"float32": "float16"},
        source="type_k and type_v are GGML_TYPE_F16 in llama_context_default_params (src/llama-context.cpp)",
        version="xllamacpp 2026.10.11549, which is llama.cpp b11549",
    ),
    "mlx": KnownEngine(
        title="MLX",
        source="KVCache has the dtype of its keys (mlx_lm/models/cache.py); log probabilities are those of the logits "
        "before the sampler (mlx_lm/generate.py)",
        version="mlx 0.32.4, mlx-lm 0.32.2",
    ),
    "ctranslate2": KnownEngine(
        title="CTranslate2",
        source="compute_type=default keeps the type of the saved model; a processor without bfloat16 or float16 "
        "computes these in float32, which is more exact",
        version="4.8.5",
    ),
    "onnxruntime": KnownEngine(
        title="ONNX Runtime",
        compiler="consistency.extras.serving.engines.onnx_runtime:OnnxRuntime",
        source="types of an ONNX graph are written in it; the model builder of onnxruntime-genai gives past keys and "
        "values that of the model (io_dtype in models/builders/base.py)",
        version="1.32.0, genai 0.18.0",
    ),
    "openvino": KnownEngine(
        title="OpenVINO",
        kv_dtypes={"float32": "float16"},
        computes_in={"float32": "bfloat16"},
        source="of a compiled model INFERENCE_PRECISION_HINT is bfloat16 on a processor that has it, and "
        "KV_CACHE_PRECISION is float16, with float32 too",
        version="2026.4.1",
    ),
    "tensorrt-llm": KnownEngine(
        title="TensorRT-LLM",
        source="kv_cache_config.dtype=auto is the model's dtype; its log probabilities are taken for the model's own",
        version="not run",
    ),
    "tgi": KnownEngine(
        title="Text Generation Inference",
        processed_by=("temperature", "top_k", "top_p"),
        source="log_softmax of the scores that its warpers leave (text_generation_server/utils/tokens.py)",
        version="not run",
    ),
    "torch-compile": KnownEngine(
        title="torch.compile",
        compiler="consistency.extras.serving.engines.torch_compile:TorchCompile",
        source="computes in the dtypes of the model",
        version="2.13.0",
    ),
}
"""Engines by their names on the command line; what runs one is imported when it is used."""


def compilers() -> dict[str, str]:
    """Return the classes that run engines here, by the engines' names."""
    return {name: engine.compiler for name, engine in ENGINES.items() if engine.compiler}
