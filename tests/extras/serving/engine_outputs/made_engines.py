"""Inference engines made of transformers and PEFT, with mistakes planted in them, and one run that judges them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.numpy import save_file

from consistency.capture.folder import SCHEMA, CaptureManifest
from consistency.capture.reader import read_capture
from consistency.capture.records import WorkerInfo
from consistency.capture.writer import CaptureWriter, write_json
from consistency.case.case import Case
from consistency.case.engine_file import EngineFile
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.extras.serving.inference.engine_request import write_request
from consistency.extras.serving.inference.request import METADATA, Request
from consistency.worker import determinism
from consistency.worker.protocol import STATE_FILE, EventLog, Job
from consistency.worker.session import Session

Tensors = dict[str, np.ndarray]
ON, OFF, MERGED = "adapter_on", "adapter_off", "adapter_merged"


class MadeEngine:
    """An engine's side of the two files: loads the request's model as transformers and PEFT do."""

    def __init__(self, source: Path) -> None:
        with safe_open(source, framework="pt") as file:
            self.request = msgspec.json.decode(file.metadata()[METADATA], type=Request)
            self.inputs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        self.model = self.load()

    def load(self, dtype: str | None = None) -> Any:
        config = transformers.AutoConfig.from_pretrained(self.request.base)
        auto = getattr(transformers, config.architectures[0])
        base = auto.from_pretrained(self.request.base, dtype=getattr(torch, dtype or self.request.case.dtype))
        return peft.PeftModel.from_pretrained(base, self.request.adapter).eval()

    @property
    def layers(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self.model.named_modules() if isinstance(one, BaseTunerLayer)]

    def logits(self, model: Any = None, rows: Any = slice(None), *, off: bool = False) -> np.ndarray:
        model = model or self.model
        inputs = {name: tensor[rows] for name, tensor in self.inputs.items()}
        with torch.no_grad(), model.disable_adapter() if off else nullcontext():
            found: np.ndarray = model(**inputs).logits.float().numpy()
        return found

    def write(self, path: Path, tensors: Mapping[str, np.ndarray], **about: Any) -> Path:
        fields = {
            "schema": "consistency.outputs/1", "case": self.request.case, "engine": "made", "version": "1",
            "device": "cpu", "dtype": self.request.case.dtype, **about,
        }  # fmt: skip
        text = msgspec.json.encode(fields).decode()
        save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, path, metadata={METADATA: text})
        return path


Fault = Callable[[MadeEngine], Tensors]


def with_scalings(engine: MadeEngine, scaling: Callable[[float], float]) -> np.ndarray:
    kept = [(layer.scaling, dict(layer.scaling)) for _, layer in engine.layers]
    for held, values in kept:
        held.update({name: scaling(value) for name, value in values.items()})
    found = engine.logits()
    for held, values in kept:
        held.update(values)
    return found


def without(engine: MadeEngine, chosen: Callable[[str], bool]) -> np.ndarray:
    layers = [layer for name, layer in engine.layers if chosen(name)]
    for layer in layers:
        layer._disable_adapters = True
    found = engine.logits()
    for layer in layers:
        layer._disable_adapters = False
    return found


def merged(engine: MadeEngine, *, first: str | None = None, then: torch.dtype | None = None) -> np.ndarray:
    """Return the outputs of a merge in a dtype, or of one that is converted after it, computed in the case's."""
    model = engine.load(first).merge_and_unload()
    if then is not None:
        model = model.to(then)
    return engine.logits(model.to(getattr(torch, engine.request.case.dtype)))


def judged(base: Path, adapter: Path, home: Path, files: Mapping[str, Path], **changes: Any) -> Comparison:
    """Run the stage `forward` of the reference worker in this process, judge the files, and compare."""
    engine_outputs = tuple(EngineFile(name=name, path=str(path)) for name, path in files.items())
    fields = {"dtype": "float32", "stages": ("forward",), "engine_outputs": engine_outputs, **changes}
    case = Case(name="x", base=str(base), adapter=str(adapter), **fields)
    with CaptureWriter(home / "capture", replace=True) as writer:
        folder, scratch = writer.worker_folder("cpu.isolated"), home / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        job = Job(
            case=case, name="cpu", device="cpu", load_path="isolated", folder=str(folder), blobs=str(writer.blobs),
            scratch=str(scratch), settings={}, makes_reference=True, threads=1, parent_pid=os.getpid(),
        )  # fmt: skip
        with determinism.deterministic(threads=1) as asked, EventLog(folder / "events.jsonl") as events:
            Session(job, events, asked).run()
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes())
        kept = {name: state[name] for name in ("environment", "inputs_digest")}
        write_json(
            folder / "worker.json",
            WorkerInfo(architecture="a", model="m", name="cpu", load_path="isolated", status="ok", **kept),
        )
        slugs = ("cpu.isolated", *(f"{name}.isolated" for name in files))
        place = writer.commit(CaptureManifest(schema=SCHEMA, tool="0", created="", host="h", case=case, workers=slugs))
    return compare([read_capture(place)])


def request(base: Path, adapter: Path, path: Path, **changes: Any) -> MadeEngine:
    """Write the inputs of a case, and return an engine that has read them."""
    write_request(Case(name="x", base=str(base), adapter=str(adapter), **{"dtype": "float32", **changes}), path)
    return MadeEngine(path)
