"""What the scripts of this folder share: the finding, its tensors, and where they are computed."""

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FACTS = json.loads((HERE / "finding.json").read_text(encoding="utf-8"))
os.environ.update(FACTS["variables"])  # kernels are chosen when torch is imported

import torch  # noqa: E402 - after the variables
from safetensors.torch import load_file  # noqa: E402


def as_bytes(tensor):
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def refuse(text):
    """Exit with a status that is neither of the two answers."""
    print(text, file=sys.stderr)
    sys.exit(2)


def load_tensors():
    """Return the recorded tensors, which are those of finding.json."""
    tensors = load_file(HERE / "tensors.safetensors")
    for name, tensor in tensors.items():
        raw = as_bytes(tensor)
        found = hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.numel())).hexdigest()  # works without NumPy
        if found != FACTS["sha256"].get(name):
            refuse(f"tensors.safetensors is damaged: {name} does not match finding.json")
    return tensors


def choose_device(wanted):
    """Return the device of the finding if this machine has it, else the best that it has."""
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        other = "cpu" if accelerator is None else str(torch.device(accelerator.type, 0))
        print(f"this machine has no {wanted}: using {other} instead")
        return other
    return wanted
