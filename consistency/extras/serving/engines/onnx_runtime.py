"""ONNX Runtime: the model exported by torch's own exporter, run by the kernels of ONNX Runtime."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consistency.errors import InputError, extra_hint
from consistency.extras.serving.engines.engine import Compiled, LogitsOf

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_INPUTS, _OUTPUT = "inputs", "logits"
_EXPORTERS = ("torch.onnx", "onnxscript")


class OnnxRuntime:
    """Runs a model in ONNX Runtime with its default optimizations."""

    name = "ONNX Runtime"

    def __init__(self, device: str) -> None:
        try:
            import onnx
            import onnxruntime
            import onnxscript
        except ImportError as error:
            raise InputError(
                "a library for ONNX Runtime is not installed", got=error, hint=extra_hint("onnx")
            ) from error
        self._runtime: Any = onnxruntime
        self.provider = _PROVIDERS.get(device.partition(":")[0])
        available = onnxruntime.get_available_providers()
        if self.provider not in available:
            raise InputError(
                f"ONNX Runtime cannot run on {device}",
                where="this installation of onnxruntime",
                got=", ".join(available),
                wanted=self.provider or " or ".join(_PROVIDERS),
            )
        self.version = f"{onnxruntime.__version__}, exported by torch {torch.__version__}"
        self.device = device
        self.settings = {
            "provider": self.provider,
            "optimization": "all",
            "onnx": onnx.__version__,
            "onnxscript": onnxscript.__version__,
        }

    def compiled(self, model: LogitsOf, inputs: dict[str, torch.Tensor]) -> Compiled:
        """Export the model with a free number of rows, and load it."""
        rows = torch.export.Dim("rows")
        shapes = tuple({0: rows} for _ in inputs)
        # a file, because one message of protobuf holds 2 GiB at most
        with tempfile.TemporaryDirectory() as folder, _quiet():
            program = torch.onnx.export(
                model,
                tuple(inputs.values()),
                dynamo=True,
                verbose=False,
                dynamic_shapes={_INPUTS: shapes},
                input_names=list(inputs),
                output_names=[_OUTPUT],
            )
            assert program is not None
            path = Path(folder) / "model.onnx"
            program.save(path, external_data=True)
            session = self._runtime.InferenceSession(str(path), providers=[self.provider])
        # the exporter leaves out inputs that the model does not use
        names = {graph_input.name for graph_input in session.get_inputs()}

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            arrays = {name: tensor.numpy() for name, tensor in inputs.items() if name in names}
            (logits,) = session.run([_OUTPUT], arrays)
            return torch.from_numpy(np.ascontiguousarray(logits))

        return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's warnings on its own code, on libraries that it lacks, and on constants that it keeps."""
    loggers = [logging.getLogger(name) for name in _EXPORTERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
