"""Print what the merges of several tools lose: a row for each folder that one of them wrote.

    python -P -m benchmarks.merge_tools --base BASE --adapter ADAPTER FOLDER [FOLDER ...]

The exact sum is PEFT's own merge in float64. The error of a folder is the norm of its difference from that, over the
norm of what the adapter adds; beside it stands that of one rounding of the exact sum to the folder's dtype, below which
no folder can be.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file

from consistency.comparison.result import Comparison
from consistency.extras.merging.check_merged.result import check_merged, statement

Tensors = Mapping[str, torch.Tensor]


def exact_merge(base: str, adapter: str) -> tuple[Tensors, Tensors]:
    """Return the base, and base + adapter by PEFT's merge, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = peft.PeftModel.from_pretrained(model, adapter).to(torch.float64)
    return before, adapted.merge_and_unload().state_dict()


def errors(base: Tensors, exact: Tensors, folder: Path) -> tuple[float, float]:
    """Return the error of a folder's adapted tensors, and that of one rounding, both over the norm of the delta."""
    squares = {"delta": 0.0, "error": 0.0, "one rounding": 0.0}
    for file in sorted(folder.glob("model*.safetensors")):
        for name, tensor in load_file(file).items():
            if name not in exact or torch.equal(exact[name], base[name]):
                continue
            differences = {
                "delta": exact[name] - base[name],
                "error": tensor.double() - exact[name],
                "one rounding": exact[name].to(tensor.dtype).double() - exact[name],
            }
            for key, difference in differences.items():
                squares[key] += float(difference.square().sum())
    return (squares["error"] / squares["delta"]) ** 0.5, (squares["one rounding"] / squares["delta"]) ** 0.5


def row(folder: Path, checked: Comparison, error: float, least: float) -> str:
    """Return the row of one folder."""
    said = statement(checked)
    problems = [finding.message for finding in checked.findings if finding.severity != "note"]
    roundings = [finding.message for finding in checked.findings if finding.message.startswith("how it was rounded")]
    cells = [folder.name, said.heading, f"{error:.2%}", f"{least:.2%}", "; ".join(roundings), "; ".join(problems)]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.merge_tools",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parsed = parser.parse_args()
    base, exact = exact_merge(parsed.base, parsed.adapter)
    print("| folder | check-merged | error | one rounding | order | problems |")
    print("| --- | --- | --- | --- | --- | --- |")
    for folder in parsed.folders:
        checked = check_merged(folder, base=parsed.base, adapter=parsed.adapter)
        print(row(folder, checked, *errors(base, exact, folder)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
