"""`consistency engine`: answer a request of `consistency inputs` with an engine that runs what torch loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from consistency.errors import CaptureError
from consistency.worker.engines import ENGINES

EXAMPLES = (
    ("ONNX Runtime on the CPU", "consistency engine onnxruntime inputs.safetensors onnx.safetensors"),
    ("inductor on a GPU", "consistency engine torch-compile inputs.safetensors compiled.safetensors --device cuda:0"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("engine", _engine, "run a case in ONNX Runtime or torch.compile, for --engine-outputs", EXAMPLES)
    parser.add_argument("engine", choices=tuple(ENGINES), help="the engine")
    parser.add_argument("inputs", type=Path, metavar="INPUTS", help="file that `consistency inputs` wrote")
    parser.add_argument("outputs", type=Path, metavar="OUTPUTS", help="file to write")
    parser.add_argument("--device", default="cpu", help="device that the engine runs on (default: cpu)")
    parser.add_argument("--base", metavar="DIR", help="the base, where it is not in the folder that INPUTS names")
    parser.add_argument("--adapter", metavar="DIR", help="the adapter, likewise")
    parser.add_argument("--force", action="store_true", help="replace OUTPUTS")


def _engine(parsed: argparse.Namespace) -> int:
    if parsed.outputs.exists() and not parsed.force:
        raise CaptureError("the file exists", where=parsed.outputs, hint="choose another one, or give --force")
    from consistency.worker.engines.answer import answer
    from consistency.worker.engines.engine import make_engine

    answer(parsed.inputs, parsed.outputs, make_engine(parsed.engine, parsed.device), base=parsed.base,
           adapter=parsed.adapter)  # fmt: skip
    print(f"wrote {parsed.outputs}")
    return 0
