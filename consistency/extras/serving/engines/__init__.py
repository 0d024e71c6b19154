"""Inference engines that answer a request of `consistency inputs` from the models as transformers and PEFT load them.

Each compiles the model by its own compiler and runs it by its own kernels. A process of this package does it, but no
worker: nothing is pinned, and what it writes is judged like the file of any other engine.
"""

ENGINES = {
    "onnxruntime": "consistency.extras.serving.engines.onnx_runtime:OnnxRuntime",
    "torch-compile": "consistency.extras.serving.engines.torch_compile:TorchCompile",
}
"""Classes by their names on the command line, imported when they are used."""
