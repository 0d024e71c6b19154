"""PEFT: without `torch_device`, an adapter is read to device 0 and copied from there to the model's device.

Needs torch, transformers and peft, no download. Give the device of the model, other than the one PEFT chooses:

    python hop_over_device_0.py cuda:1      # two GPUs: every tensor is copied from cuda:0 to cuda:1
    python hop_over_device_0.py cpu         # one GPU: every tensor is copied from cuda:0 to the CPU

Without a GPU, name a module that registers a software accelerator with torch:

    python hop_over_device_0.py npu:1 accelerator.py
"""

import collections
import importlib.util
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Count the copies of tensors from one device to another."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        done = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            if source.device != done.device:
                self.found[f"{source.device} -> {done.device}"] += 1
        return done


def base():
    """Make a model of two layers, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config)


if len(sys.argv) > 2:
    spec = importlib.util.spec_from_file_location("accelerator", Path(sys.argv[2]).resolve())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda:1")
if len(sys.argv) > 2:
    # PEFT knows other accelerators than CUDA by their packages: let it answer as it does for CUDA, without a number
    peft.peft_model.infer_device = lambda: DEVICE.type

print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
print(f"the model is on {DEVICE}; PEFT's infer_device() answers {peft.peft_model.infer_device()!r}")
with tempfile.TemporaryDirectory() as folder:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base(), config).save_pretrained(folder)
    calls = {
        "PeftModel.from_pretrained": {},
        "… with torch_device=the model's": {"torch_device": str(DEVICE)},
        "… with torch_device=cpu": {"torch_device": "cpu"},
        "… with low_cpu_mem_usage=True": {"low_cpu_mem_usage": True},
    }
    for name, options in calls.items():
        model = base().to(DEVICE)
        with Copies() as copies:
            adapted = peft.PeftModel.from_pretrained(model, folder, **options)
        where = {str(t.device) for n, t in adapted.named_parameters() if "lora_" in n}
        print(f"{name:34} adapter on {sorted(where)}, copies: {dict(copies.found) or 'none'}")
    model = base().to(DEVICE)
    with Copies() as copies:
        model.load_adapter(folder)
    where = {str(t.device) for n, t in model.named_parameters() if "lora_" in n}
    print(f"{'transformers: model.load_adapter':34} adapter on {sorted(where)}, copies: {dict(copies.found) or 'none'}")
