"""Compare a recorded tensor with its recorded reference. Needs only torch and safetensors.

python check_recorded.py

Computing them takes more than these tensors, so this script computes nothing again.

Exits with 1 if the recorded tensor exceeds its tolerance, else with 0.
"""

import argparse
import ctypes
import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
FACTS = json.loads((HERE / "finding.json").read_text(encoding="utf-8"))


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def refuse(text):
    """Exit with a status that is neither of the two answers."""
    print(text, file=sys.stderr)
    sys.exit(2)


def digest(tensor):
    raw = as_bytes(tensor)
    return hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.numel())).hexdigest()  # works without NumPy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()

    tensors = load_file(HERE / "tensors.safetensors")
    for name, tensor in tensors.items():
        if digest(tensor) != FACTS["sha256"][name]:
            refuse(f"tensors.safetensors is damaged: {name} does not match finding.json")
    actual, expected = tensors["actual"].double().reshape(-1), tensors["expected"].double().reshape(-1)
    error = (actual - expected).abs()
    # the tolerance: one for all elements, or one each
    allowed = (
        tensors["allowed"].double().reshape(-1) if "allowed" in tensors else torch.full_like(error, FACTS["allowed"])
    )
    share = torch.where(error == 0, 0.0, error / allowed)
    share = torch.where(share.isnan(), torch.inf, share)
    worst = int(share.argmax())
    print(f"finding:  {FACTS['message']}")
    print(f"tensor:   {FACTS['tensor']}, {FACTS['window']}")
    print(
        f"recorded: on {FACTS['worker']}: {share[worst].item():.3g} times tolerance (+-{allowed[worst].item():.3g}),"
        f" at element {worst} of the window: got {actual[worst].item()!r}, expected {expected[worst].item()!r}"
    )
    return 1 if share[worst].item() > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
