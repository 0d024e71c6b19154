"""`consistency inputs` and `consistency engine`: the fixed inputs of a case, and an engine that answers them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from consistency.case.options import OPTIONS, Edge, add_options
from consistency.cli.output import print_json
from consistency.cli.parser import BAD_USE, Once
from consistency.errors import CaptureError
from consistency.extras.serving.engines import compilers

_WRITTEN = {0: "written", **BAD_USE}

INPUTS_EXAMPLES = (
    ("for a model and adapter", "consistency inputs --base ./llama --adapter ./my-lora --out inputs.safetensors"),
    ("then, in ONNX Runtime", "consistency engine onnxruntime inputs.safetensors out.safetensors"),
    (
        "then compare",
        "consistency run --base ./llama --adapter ./my-lora --engine-outputs onnx=out.safetensors",
    ),
)

_TAKES = ("base", "adapter", "name", "dtype", "level", "inputs", "allow_pickle", "trust_remote_code")


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands."""
    text = "write the fixed inputs of a case, for another inference engine to compute outputs from"
    parser = command("inputs", _inputs, text, INPUTS_EXAMPLES, statuses=_WRITTEN)
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG.toml", help="options by name; the command line wins")
    add_options(add, Edge.COMMAND_LINE, only=_TAKES, one_case=True)
    add("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    add("--force", action="store_true", help="replace an earlier file")
    add("--json", action="store_true", help="print the requested outputs as JSON")
    _add_engine(command)


def _inputs(parsed: argparse.Namespace) -> int:
    from consistency.case.reading import gather_options
    from consistency.extras.serving.inference.of_captures import write_inputs
    from consistency.text import one_line

    options = {option.name: getattr(parsed, option.name, None) for option in OPTIONS}
    request = write_inputs(gather_options(parsed.config, options, Edge.COMMAND_LINE), parsed.out, replace=parsed.force)
    if parsed.json:
        print_json(request)
    else:
        print(f"{parsed.out}: inputs of {one_line(request.case.name)}, {request.case.dtype}")
        print(
            f"wanted: {request.output} for {', '.join(request.modes)}; the first row in batches of "
            f"{', '.join(map(str, request.batches))}"
        )
    return 0


ENGINE_EXAMPLES = (
    ("ONNX Runtime on the CPU", "consistency engine onnxruntime inputs.safetensors onnx.safetensors"),
    ("inductor on a GPU", "consistency engine torch-compile inputs.safetensors compiled.safetensors --device cuda:0"),
)


def _add_engine(command: Callable[..., argparse.ArgumentParser]) -> None:
    text = "run a case in ONNX Runtime or torch.compile, for --engine-outputs"
    parser = command("engine", _engine, text, ENGINE_EXAMPLES, statuses=_WRITTEN)
    parser.add_argument("engine", choices=tuple(compilers()), help="the engine")
    parser.add_argument("inputs", type=Path, metavar="INPUTS", help="file that `consistency inputs` wrote")
    parser.add_argument("outputs", type=Path, metavar="OUTPUTS", help="file to write")
    parser.add_argument("--device", default="cpu", help="device that the engine runs on (default: cpu)")
    parser.add_argument(
        "--base", action=Once, metavar="DIR", help="the base, where it is not in the folder that INPUTS names"
    )
    parser.add_argument("--adapter", action=Once, metavar="DIR", help="the adapter, likewise")
    parser.add_argument("--force", action="store_true", help="replace OUTPUTS")


def _engine(parsed: argparse.Namespace) -> int:
    if parsed.outputs.exists() and not parsed.force:
        raise CaptureError("the file exists", where=parsed.outputs, hint="choose another one, or give --force")
    from consistency.extras.serving.engines.answer import answer
    from consistency.extras.serving.engines.engine import make_engine

    answer(
        parsed.inputs,
        parsed.outputs,
        make_engine(parsed.engine, parsed.device),
        base=parsed.base,
        adapter=parsed.adapter,
    )
    print(f"wrote {parsed.outputs}")
    return 0
