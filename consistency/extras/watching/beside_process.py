"""The process beside a training that judges blocks on the CPU: `python -m …beside_process THREADS`.

It reads the name of a job's file from each line of its input, and writes the answer beside that file. It ends with its
input, so also where the training is gone. What it cannot say to be within rounding, the training's own process judges.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from consistency.capture.whole_file import write_whole
from consistency.devices.products import Products
from consistency.errors import first_line
from consistency.extras.watching.block_function import BlockFunction, without_dropout
from consistency.extras.watching.block_on_cpu import PASSES
from consistency.testing.calls import Computed, FunctionCall
from consistency.testing.options import Allow
from consistency.testing.passes import NoisyPasses, noise_of

_LESS_URGENT = 10
"""Niceness: the training goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockJob:
    """A block, and what its device has computed of it.

    Attributes
    ----------
    function : BlockFunction
        The block with its inputs.
    computed : dict
        The results of the device, on the CPU.
    device_type : str
        Type of the device.
    products : Products
        How the device may compute products.
    any_dtype : bool
        Whether a result may have another dtype than the CPU's.
    autocast : tuple of str and torch.dtype, or None
        The autocast that was on.
    """

    function: BlockFunction
    computed: Computed
    device_type: str
    products: Products
    any_dtype: bool
    autocast: tuple[str, torch.dtype] | None


def answer_of(job: Path) -> Path:
    """Return the file with the answer to a job."""
    return job.with_suffix(".json")


def judged(job: BlockJob) -> dict[str, Any]:
    """Return whether the results of a device are within rounding, and the largest ratio of an error to its limit."""
    function = job.function
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if job.autocast is not None:
            kind, dtype = job.autocast
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        stack.enter_context(without_dropout(function.block))
        call = FunctionCall(function.compute, None, function.inputs, gradients=False)
        noise = noise_of(Allow(products=job.products), torch.device(job.device_type), sums_in_half=False)
        passes = NoisyPasses(call, noise, PASSES, call.exact(), any_dtype=job.any_dtype)
        results = passes.judge(job.computed)
    return {
        "within": not any(result.status == "outside" for result in results) and len(results) == len(job.computed),
        "ratio": max((result.ratio for result in results), default=0.0),
    }


def _answer(file: Path) -> None:
    """Judge the job of a file, and write the answer beside it."""
    began_s = time.monotonic()
    try:
        # what this training's own process has written a moment ago
        job = torch.load(file, map_location="cpu", weights_only=False)
        answer = judged(job)
    except Exception as error:  # model code may raise anything
        answer = {"within": False, "error": first_line(error)}
    answer["seconds"] = round(time.monotonic() - began_s, 3)
    write_whole(answer_of(file), [json.dumps(answer).encode()])


def main() -> None:
    """Answer jobs until the input ends."""
    os.nice(_LESS_URGENT)
    torch.set_num_threads(int(sys.argv[1]))
    for line in sys.stdin:
        _answer(Path(line.rstrip("\n")))


if __name__ == "__main__":
    main()
