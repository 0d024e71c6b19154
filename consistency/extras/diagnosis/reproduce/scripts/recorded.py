"""Compare a recorded tensor with its recorded reference. Needs only torch and safetensors.

python check_recorded.py

Computing them takes more than these tensors, so this script computes nothing again.

Exits with 1 if the recorded tensor exceeds its tolerance, else with 0.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

from shared import FACTS, load_tensors, torch  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()

    tensors = load_tensors()
    actual, expected = tensors["actual"].double().reshape(-1), tensors["expected"].double().reshape(-1)
    error = (actual - expected).abs()
    # the tolerance: one for all elements, or one each
    allowed = (
        tensors["allowed"].double().reshape(-1) if "allowed" in tensors else torch.full_like(error, FACTS["allowed"])
    )
    ratio = torch.where(error == 0, 0.0, error / allowed)
    ratio = torch.where(ratio.isnan(), torch.inf, ratio)
    worst = int(ratio.argmax())
    print(f"finding:  {FACTS['message']}")
    print(f"tensor:   {FACTS['tensor']}, {FACTS['window']}")
    print(
        f"recorded: on {FACTS['worker']}: {ratio[worst].item():.3g} times tolerance (+-{allowed[worst].item():.3g}),"
        f" at element {worst} of the window: got {actual[worst].item()!r}, expected {expected[worst].item()!r}"
    )
    return 1 if ratio[worst].item() > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
