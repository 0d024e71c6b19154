"""Answer a request of `consistency inputs` with transformers and PEFT themselves: the smallest engine there is.

Usage: python transformers_peft.py inputs.safetensors outputs.safetensors [DEVICE]
"""

import json
import sys

import numpy as np
import peft
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

source, target, device = (*sys.argv[1:], "cpu")[:3]
with safe_open(source, framework="pt") as file:
    request = json.loads(file.metadata()["consistency"])
    inputs = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
dtype = request["case"]["dtype"]
architecture = transformers.AutoConfig.from_pretrained(request["base"]).architectures[0]
base = getattr(transformers, architecture).from_pretrained(request["base"], dtype=getattr(torch, dtype)).to(device)
model = base if request["adapter"] is None else peft.PeftModel.from_pretrained(base, request["adapter"])
model.eval()


def logits(rows=slice(None)):
    """Return the logits of some rows of the inputs, as float32."""
    with torch.no_grad():
        return model(**{name: tensor[rows] for name, tensor in inputs.items()}).logits.float().cpu().numpy()


outputs = {}
if request["adapter"] is None:
    outputs["adapter_off"] = logits()
else:
    outputs["adapter_on"] = logits()
    with model.disable_adapter():
        outputs["adapter_off"] = logits()
for size in request["batches"]:  # the first row alone, and first and last among others
    rows = list(range(size))
    if size == 1:
        outputs["batch.1"] = logits(rows)[0]
    else:
        outputs[f"batch.{size}.first"] = logits(rows)[0]
        outputs[f"batch.{size}.last"] = logits(rows[1:] + rows[:1])[-1]
if request["adapter"] is not None:
    model.merge_adapter()
    outputs["adapter_merged"] = logits()
about = {
    "schema": "consistency.outputs/1",
    "case": request["case"],  # unchanged: outputs of another case are refused
    "engine": "transformers + PEFT",
    "version": f"{transformers.__version__} + {peft.__version__}",
    "device": device,
    "dtype": dtype,
    "values": "logits",
    "batch_invariant": False,
}
outputs = {name: np.ascontiguousarray(value) for name, value in outputs.items()}
save_file(outputs, target, metadata={"consistency": json.dumps(about)})
