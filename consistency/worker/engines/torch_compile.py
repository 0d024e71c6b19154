"""`torch.compile` with inductor: the model compiled to fused kernels, C++ on the CPU and Triton on a GPU."""

from __future__ import annotations

import torch

from consistency.worker.engines.engine import Compiled, LogitsOf


class TorchCompile:
    """Runs a model compiled by `torch.compile`."""

    name = "torch.compile"

    def __init__(self, device: str) -> None:
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
