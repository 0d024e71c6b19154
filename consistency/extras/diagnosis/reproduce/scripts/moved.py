"""Check whether this machine copies these bytes to a device unchanged. Needs only torch and safetensors.

python reproduce.py [--device cuda:1] [--via cuda:0] [--times 20] [--as-recorded]

It shows the recorded bytes, and then repeats the copy here: the expected bytes go from the file to the device, into
memory that was filled with NaN, directly and through --via, and are read back.

Exits with 0 if every copy is correct (it does not happen here) and 1 if one is not (it happens here). With
--as-recorded nothing is copied: the recorded bytes are checked instead.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

from shared import FACTS, as_bytes, choose_device, load_tensors, refuse, torch  # noqa: E402


def difference(actual, expected):
    """Return None if the bytes are equal, else a sentence."""
    a, e = as_bytes(actual), as_bytes(expected)
    if torch.equal(a, e):
        return None
    size = expected.element_size()
    differs = (a != e).reshape(-1, size).any(dim=1)
    first = int(differs.nonzero()[0])

    def bits(raw):
        return "0x" + bytes(reversed(raw.reshape(-1, size)[first].tolist())).hex()

    flat_a, flat_e = actual.detach().to("cpu").reshape(-1), expected.reshape(-1)
    zeros = ", all of them zero" if not a.any() else ""
    return (
        f"{int(differs.sum())} of {len(differs)} elements differ{zeros}; the first is element {first}: "
        f"got {flat_a[first].item()!r} ({bits(a)}), "
        f"expected {flat_e[first].item()!r} ({bits(e)})"
    )


def poisoned(like, device):
    """Return memory on a device in which a missing copy shows."""
    target = torch.empty(like.shape, dtype=like.dtype, device=device)
    target.reshape(-1).view(torch.uint8).fill_(0xFF)  # a NaN in every floating format, -1 in every integer
    return target


def paths(device, via):
    """Yield a name and a function that copies a tensor from the host to the device."""
    yield f"file -> {device}", lambda tensor: poisoned(tensor, device).copy_(tensor)
    if via:
        yield (
            f"file -> {via} -> {device}",
            lambda tensor: poisoned(tensor, device).copy_(poisoned(tensor, via).copy_(tensor)),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=FACTS["device"])
    parser.add_argument("--via", default=FACTS["via"], help="an intermediate device")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--as-recorded", action="store_true", help="check the recorded bytes instead of copying")
    options = parser.parse_args()

    tensors = load_tensors()
    expected = tensors["expected"]
    print(f"finding:  {FACTS['message']}")
    print(f"tensor:   {FACTS['tensor']}, {FACTS['window']}")
    if "actual" in tensors:
        print(f"recorded: on {FACTS['worker']}: {difference(tensors['actual'], expected) or 'equal in this window'}")
    if options.as_recorded:
        if "actual" not in tensors:
            refuse("the bytes on the device were not recorded")
        return 1 if difference(tensors["actual"], expected) else 0

    device = choose_device(options.device)
    via = options.via if options.via and choose_device(options.via) == options.via else None
    print(f"here:     torch {torch.__version__}, {device}" + (f", through {via}" if via else ""))
    happens = False
    for name, bring in paths(device, via):
        wrong = [found for found in (difference(bring(expected), expected) for _ in range(options.times)) if found]
        happens = happens or bool(wrong)
        print(f"  {name}: {len(wrong)} of {options.times} copies wrong" + (f": {wrong[0]}" if wrong else ""))
    print("it happens here" if happens else "it does not happen here")
    return 1 if happens else 0


if __name__ == "__main__":
    sys.exit(main())
