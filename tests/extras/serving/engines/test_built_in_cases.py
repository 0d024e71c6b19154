"""ONNX Runtime and torch.compile answer for the built-in cases, and with mistakes planted: what a run says of them."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from consistency.extras.serving.inference.outputs import read_outputs
from tests.extras.serving.engines.made_outputs import HEALTHY, judged, outputs_of, request_of
from tests.extras.serving.engines.planted import MISTAKES

pytestmark = pytest.mark.engines

_ABSENT = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
_COMPILERS = ("g++", "clang++")
ONNX = pytest.param("onnxruntime", marks=pytest.mark.skipif(bool(_ABSENT), reason=f"not installed: {_ABSENT}"))
COMPILE = pytest.param(
    "torch-compile",
    marks=pytest.mark.skipif(not any(map(shutil.which, _COMPILERS)), reason=f"none of {_COMPILERS} is installed"),
)

SENTENCES = {
    "adapter ignored": "this engine answers as the base alone: the adapter is not applied",
    "wrong scaling": "this engine answers as if scaling were 1",
    "half of the layers": "this engine answers as if layers 2–3 had no adapter",
    "merged in bfloat16": "this engine answers as if the adapter were merged in bfloat16",
}


@pytest.mark.parametrize("engine", [ONNX, COMPILE])
def test_llama_is_consistent_and_every_mistake_is_named(engine: str, tmp_path: Path) -> None:
    files = outputs_of(engine, request_of("llama", "float32", tmp_path), mistakes=MISTAKES)
    assert len(read_outputs(files[HEALTHY]).modes) == 3
    comparison = judged("llama", "float32", files)
    said = {name: [one.message for one in comparison.findings if name in one.workers] for name in files}
    assert said.pop(HEALTHY) == []
    missing = {mistake: said[mistake.replace(" ", "-")] for mistake in MISTAKES
               if not any(SENTENCES[mistake] in text for text in said[mistake.replace(" ", "-")])}  # fmt: skip
    assert missing == {}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("engine", [ONNX, COMPILE])
def test_other_cases_are_consistent(engine: str, name: str, tmp_path: Path) -> None:
    assert judged(name, "float32", outputs_of(engine, request_of(name, "float32", tmp_path))).findings == ()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("engine", [COMPILE])  # ONNX Runtime has no kernels for bfloat16 on a CPU
def test_bfloat16_is_consistent(engine: str, name: str, tmp_path: Path) -> None:
    comparison = judged(name, "bfloat16", outputs_of(engine, request_of(name, "bfloat16", tmp_path)))
    assert comparison.verdict == "consistent"
    # a matrix of few rows takes other kernels, which round otherwise: a fact, where an engine does not promise the same
    assert {one.kind for one in comparison.findings} <= {"batch-variant"}
    assert {one.severity for one in comparison.findings} <= {"note"}
