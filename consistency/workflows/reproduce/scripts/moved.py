"""Does this machine bring these bytes to a device unchanged? Needs torch and safetensors, nothing else.

python reproduce.py [--device cuda:1] [--via cuda:0] [--times 20] [--as-recorded]

It shows what was recorded where the finding was made, and then does the same here: the right bytes go from the file to
the device, over memory that was filled with NaN, directly and by way of --via, and are read back.

Ends with 0 if every copy arrived whole (it does not happen here) and 1 if one did not (it happens here). With
--as-recorded nothing is copied: the bytes that the device held when the finding was made are judged instead.
"""

import argparse
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
    """End with a status that is neither of the two answers."""
    print(text, file=sys.stderr)
    sys.exit(2)


def digest(tensor):
    raw = as_bytes(tensor)
    return hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.numel())).hexdigest()  # NumPy need not be there


def difference(actual, expected):
    """Return None where the bytes are equal, else a sentence."""
    a, e = as_bytes(actual), as_bytes(expected)
    if torch.equal(a, e):
        return None
    size = expected.element_size()
    differs = (a != e).reshape(-1, size).any(dim=1)
    first = int(differs.nonzero()[0])

    def bits(raw):
        return "0x" + bytes(reversed(raw.reshape(-1, size)[first].tolist())).hex()

    flat_a, flat_e = actual.detach().to("cpu").reshape(-1), expected.reshape(-1)
    zeros = " all zeros where they are not" if not a.any() else ""
    return (
        f"{int(differs.sum())} of {len(differs)} elements differ{zeros}; the first is element {first}: "
        f"got {flat_a[first].item()!r} ({bits(a)}), "
        f"wanted {flat_e[first].item()!r} ({bits(e)})"
    )


def poisoned(like, device):
    """Return memory on a device in which a copy that never arrives shows."""
    target = torch.empty(like.shape, dtype=like.dtype, device=device)
    target.reshape(-1).view(torch.uint8).fill_(0xFF)  # a NaN in every floating format, -1 in every integer
    return target


def roads(device, via):
    """Yield a name and a function that brings a tensor from the host to the device."""
    yield f"file -> {device}", lambda tensor: poisoned(tensor, device).copy_(tensor)
    if via:
        yield (
            f"file -> {via} -> {device}",
            lambda tensor: poisoned(tensor, device).copy_(poisoned(tensor, via).copy_(tensor)),
        )


def choose_device(wanted):
    """Return the device of the finding where this machine has it, else the best it has."""
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        other = "cpu" if accelerator is None else str(torch.device(accelerator.type, 0))
        print(f"this machine has no {wanted}: {other} is tried instead")
        return other
    return wanted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=FACTS["device"])
    parser.add_argument("--via", default=FACTS["via"], help="another device that the bytes go through")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--as-recorded", action="store_true", help="judge the recorded bytes instead of copying")
    options = parser.parse_args()

    tensors = load_file(HERE / "tensors.safetensors")
    for name, tensor in tensors.items():
        if digest(tensor) != FACTS["sha256"][name]:
            refuse(f"tensors.safetensors is damaged: {name} is not what finding.json says")
    expected = tensors["expected"]
    print(f"finding:  {FACTS['message']}")
    print(f"tensor:   {FACTS['tensor']}, {FACTS['window']}")
    if "actual" in tensors:
        print(f"recorded: on {FACTS['worker']}: {difference(tensors['actual'], expected) or 'equal in this window'}")
    if options.as_recorded:
        if "actual" not in tensors:
            refuse("the bytes that the device held were not kept")
        return 1 if difference(tensors["actual"], expected) else 0

    device = choose_device(options.device)
    via = options.via if options.via and choose_device(options.via) == options.via else None
    print(f"here:     torch {torch.__version__}, {device}" + (f", by way of {via}" if via else ""))
    happens = False
    for name, bring in roads(device, via):
        wrong = [found for found in (difference(bring(expected), expected) for _ in range(options.times)) if found]
        happens = happens or bool(wrong)
        print(f"  {name}: {len(wrong)} of {options.times} copies wrong" + (f": {wrong[0]}" if wrong else ""))
    print("it happens here" if happens else "it does not happen here")
    return 1 if happens else 0


if __name__ == "__main__":
    sys.exit(main())
