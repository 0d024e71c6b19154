"""`consistency inputs`: write the fixed inputs of a case for another inference engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import OPTIONS, Edge, add_options
from consistency.cli.output import print_json

EXAMPLES = (
    ("for a model and adapter", "consistency inputs --base ./llama --adapter ./my-lora --out inputs.safetensors"),
    ("then, in ONNX Runtime", "consistency engine onnxruntime inputs.safetensors out.safetensors"),
    (
        "then compare",
        "consistency run --base ./llama --adapter ./my-lora --engine-outputs onnx=out.safetensors",
    ),
)

_TAKES = ("base", "adapter", "name", "dtype", "level", "inputs", "allow_pickle", "trust_remote_code")


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "write the fixed inputs of a case, for another inference engine to compute outputs from"
    parser = command("inputs", _inputs, text, EXAMPLES)
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG.toml", help="options by name; the command line wins")
    add_options(add, Edge.COMMAND_LINE, only=_TAKES, one_case=True)
    add("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    add("--force", action="store_true", help="replace an earlier file")
    add("--json", action="store_true", help="print the requested outputs as JSON")


def _inputs(parsed: argparse.Namespace) -> int:
    from consistency.case.reading import gather_options
    from consistency.text import one_line
    from consistency.workflows.engines import write_inputs

    given = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    request = write_inputs(gather_options(parsed.config, given, Edge.COMMAND_LINE), parsed.out, replace=parsed.force)
    if parsed.json:
        print_json(request)
    else:
        print(f"{parsed.out}: inputs of {one_line(request.case.name)}, {request.case.dtype}")
        print(f"wanted: {request.output} for {', '.join(request.modes)}; the first row in batches of "
              f"{', '.join(map(str, request.batches))}")  # fmt: skip
    return 0
