"""What a capture names is not trusted: an engine's outputs are compared without running a stranger's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from consistency.capture.folder import SCHEMA, Capture, CaptureManifest, WorkerCapture
from consistency.capture.records import WorkerInfo
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.engine_file import EngineFile
from consistency.errors import InputError
from consistency.extras.serving.inference.identity import CaseKey, adapter_digest, base_digest
from consistency.extras.serving.inference.of_captures import _engines_alone, case_of_engines
from consistency.extras.serving.inference.request import METADATA

LLAMA = builtin_folder("llama")


def captured(**changes: Any) -> Capture:
    case = Case(name="a", **{"base": str(LLAMA / "base"), "adapter": str(LLAMA / "adapter"), **changes})
    manifest = CaptureManifest(schema=SCHEMA, tool="0", created="", host="h", case=case, workers=())
    return Capture(folder=Path("x"), manifest=manifest, workers=())


def outputs(path: Path, case: Case, **changes: Any) -> EngineFile:
    key = CaseKey(name="a", inputs="i", base=base_digest(case), adapter=adapter_digest(case), dtype="float32")
    about = {
        "schema": "consistency.outputs/1", "case": msgspec.structs.replace(key, **changes), "engine": "e",
        "version": "1", "device": "d", "dtype": "float32",
    }  # fmt: skip
    text = msgspec.json.encode(about).decode()
    save_file({"adapter_on": np.zeros((2, 3, 5), np.float32)}, path, metadata={METADATA: text})
    return EngineFile(name="vllm", path=str(path))


def test_nothing_of_a_stranger_is_run(tmp_path: Path) -> None:
    capture = captured(allow_pickle=True, trust_remote_code=True, wrapper="python:a:b", soak_s=9.0, only=("base",))
    file = outputs(tmp_path / "o.safetensors", capture.manifest.case)
    found = case_of_engines(capture, [file])
    assert (found.allow_pickle, found.trust_remote_code, found.wrapper, found.soak_s) == (False, False, None, None)
    assert (found.stages, found.only, found.engine_outputs) == (("forward",), (), (file,))
    with pytest.raises(InputError, match="with a base in a folder"):
        case_of_engines(captured(base="python:os:getcwd"), [file])


def test_outputs_of_another_case_and_files_elsewhere(tmp_path: Path) -> None:
    case = captured().manifest.case
    for part in ("base", "adapter"):
        with pytest.raises(InputError, match=f"of another {part}"):
            case_of_engines(captured(), [outputs(tmp_path / "o.safetensors", case, **{part: "0"})])
    with pytest.raises(InputError, match="in another dtype than its inputs are for"):
        case_of_engines(captured(), [outputs(tmp_path / "o.safetensors", case, dtype="bfloat16")])
    with pytest.raises(InputError, match="in another dtype than the case"):
        case_of_engines(captured(dtype="bfloat16"), [outputs(tmp_path / "o.safetensors", case)])
    with pytest.raises(InputError, match="not on this host"):
        case_of_engines(captured(adapter="/nowhere"), [outputs(tmp_path / "o.safetensors", case)])


def test_the_worker_of_the_reference_is_left_out() -> None:
    made: dict[str, Any] = {"architecture": "a", "model": "m", "load_path": "isolated", "status": "ok"}
    workers = tuple(
        WorkerCapture(info=WorkerInfo(name=name, engine=engine, **made), parts=())
        for name, engine in (("cpu", None), ("vllm", "vllm 1"))
    )
    found = _engines_alone(msgspec.structs.replace(captured(), workers=workers))
    assert [worker.info.name for worker in found.workers] == ["vllm"]
