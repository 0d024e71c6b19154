"""`torch.compile` with inductor: the model compiled to fused kernels, C++ on the CPU and Triton on a GPU."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import torch

from consistency.extras.serving.engines.engine import Compiled, LogitsOf

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def _use_private_cache() -> None:
    """Let compiled code lie in a new folder of this process alone.

    Torch's default is a folder of a known name in the folder for temporary files: whoever makes it first owns what is
    loaded from it.
    """
    missing = [name for name in _CACHES if name not in os.environ]
    if missing:
        folder = Path(tempfile.mkdtemp(prefix="consistency-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.update({name: str(folder / _CACHES[name]) for name in missing})


class TorchCompile:
    """Runs a model compiled by `torch.compile`."""

    name = "torch.compile"

    def __init__(self, device: str) -> None:
        _use_private_cache()
        self.version = str(torch.__version__)
        self.device = device
        # one program for all numbers of rows but one, instead of one for each until torch gives up
        self.settings = {"backend": "inductor", "dynamic": "True", "threads": str(torch.get_num_threads())}

    def compiled(self, model: LogitsOf, _inputs: dict[str, torch.Tensor]) -> Compiled:
        """Compile the model, which torch does at its first run."""
        torch._dynamo.reset()  # programs of the model's other states count towards the limit of recompilations
        model.to(self.device)
        function = torch.compile(model, backend="inductor", dynamic=True)

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                logits: torch.Tensor = function(*(t.to(self.device) for t in inputs.values()))
            return logits.cpu()

        return run
