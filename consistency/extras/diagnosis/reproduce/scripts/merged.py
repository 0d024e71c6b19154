"""Check whether this machine merges this LoRA within tolerance. Needs only torch and safetensors.

python reproduce.py [--device cuda:1] [--as-recorded]

The merged weight is W + scaling * (left @ right). It is computed in float64 and on the device; the difference is
compared with a bound on the rounding errors (Higham, Accuracy and Stability of Numerical Algorithms, 2002, lemma 3.1):
with D = |scaling| * (|left| @ |right|) an element may be off by product * D + weight * |W| + floor. The three
coefficients are in finding.json; for rank K in float32 `product` is (K + 2) * 2**-24 and one rounding for the store.

Exits with 0 if the result is within tolerance (it does not happen here) and 1 if it is not (it happens here). With
--as-recorded the recorded weight is checked instead.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

from shared import FACTS, as_bytes, choose_device, load_tensors, torch  # noqa: E402


def merge(tensors, device):
    """Compute the delta, or the merged weight if there is a base, as PEFT does."""
    left, right = tensors["left"].to(device), tensors["right"].to(device)
    adapter = left.dtype
    if torch.device(device).type == "cpu" and adapter in (torch.float16, torch.bfloat16):
        left, right = left.float(), right.float()  # as PEFT does on the CPU
    delta = ((left @ right) * FACTS["scaling"]).to(adapter)
    if "base" not in tensors:
        return delta
    weight = tensors["base"].to(device)
    return weight + delta.to(weight.dtype) if FACTS["safe"] else weight.clone().add_(delta)


def judge(actual, tensors):
    """Return the largest error over the tolerance, and a sentence about it."""
    left, right = tensors["left"].double(), tensors["right"].double()
    scaling, allowance = FACTS["scaling"], FACTS["allowance"]
    exact = scaling * (left @ right)
    allowed = allowance["product"] * abs(scaling) * (left.abs() @ right.abs()) + allowance["floor"]
    if "base" in tensors:
        exact += tensors["base"].double()
        allowed += allowance["weight"] * tensors["base"].double().abs()
    error = (actual.detach().to("cpu").double() - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / allowed)
    ratio = torch.where(ratio.isnan(), torch.inf, ratio)
    row, column = divmod(int(ratio.argmax()), ratio.shape[1])
    return float(ratio.max()), (
        f"{float(ratio.max()):.3g} times tolerance, at [{row}, {column}]: got {actual[row, column].item()!r}, "
        f"exact {exact[row, column].item()!r}, tolerance +-{allowed[row, column].item():.3g}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=FACTS["device"])
    parser.add_argument("--as-recorded", action="store_true", help="check the recorded weight instead of computing")
    options = parser.parse_args()

    tensors = load_tensors()
    ratio, text = judge(tensors["actual"], tensors)
    print(f"finding:  {FACTS['message']}")
    print(f"tensor:   {FACTS['tensor']}, {FACTS['window']}")
    print(f"recorded: on {FACTS['worker']}: {text}")
    if options.as_recorded:
        return 1 if ratio > 1 else 0

    device = choose_device(options.device)
    torch.set_float32_matmul_precision(FACTS["settings"].get("float32_matmul_precision", "highest"))
    here = merge(tensors, device)
    ratio, text = judge(here, tensors)
    same = torch.equal(as_bytes(here), as_bytes(tensors["actual"]))
    print(f"here:     torch {torch.__version__}, {device}: {text}" + (", bitwise as recorded" if same else ""))
    print("it happens here" if ratio > 1 else "it does not happen here")
    return 1 if ratio > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
