"""The scripts in `docs/engines/` for engines that do not run here: what they write is read."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.extras.serving.engines.answer import read_request
from consistency.extras.serving.inference.engine_request import write_request
from consistency.extras.serving.inference.outputs import read_outputs

SCRIPTS = Path(__file__).resolve().parents[4] / "docs" / "engines"
VOCABULARY, TOP = 512, 20


def expected(ids: list[int], lora: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return made logits, other ones with an adapter, that depend on all tokens up to each place."""
    sums = np.cumsum(ids)[:, None] + np.arange(VOCABULARY) * (7 if lora else 5)
    return np.sin(sums).astype(np.float32) * 4


def likely(logits: np.ndarray[Any, np.dtype[np.float32]]) -> list[tuple[float, int]]:
    values = logits - np.log(np.exp(logits).sum())
    return [(float(values[i]), int(i)) for i in np.argsort(-values)[:TOP]]


def module(name: str, **content: object) -> ModuleType:
    found = ModuleType(name)
    vars(found).update(content, __version__="1.2.3")
    return found


def vllm() -> dict[str, ModuleType]:
    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["enable_lora"]
            assert options["max_logprobs"] == TOP

        def generate(self, prompts: Any, params: Any, lora_request: Any) -> list[Any]:
            assert params["prompt_logprobs"] == params["logprobs"] == TOP
            return [self.answer(prompt["prompt_token_ids"], lora_request is not None) for prompt in prompts]

        def answer(self, ids: list[int], lora: bool) -> Any:
            logits = expected(ids, lora)
            places = [{i: SimpleNamespace(logprob=value) for value, i in likely(row)} for row in logits]
            for token, place, row in zip(ids[1:], places, logits, strict=False):  # the prompt's own is always there
                place.setdefault(token, SimpleNamespace(logprob=float(row[token] - np.log(np.exp(row).sum()))))
            return SimpleNamespace(
                prompt_logprobs=[None, *places[:-1]], outputs=[SimpleNamespace(logprobs=places[-1:])]
            )  # fmt: skip

    platform = SimpleNamespace(get_device_name=lambda: "a device")
    return {
        "vllm": module("vllm", LLM=LLM, SamplingParams=dict),
        "vllm.lora": module("vllm.lora"),
        "vllm.lora.request": module("vllm.lora.request", LoRARequest=lambda *_: "adapter"),
        "vllm.platforms": module("vllm.platforms", current_platform=platform),
    }


def sglang() -> dict[str, ModuleType]:
    class Engine:
        def __init__(self, **options: Any) -> None:
            assert options["lora_paths"][0].startswith("adapter=")

        def generate(self, *, input_ids: Any, lora_path: Any, top_logprobs_num: int, **_: Any) -> list[Any]:
            assert top_logprobs_num == TOP
            return [self.answer(ids, lora == "adapter") for ids, lora in zip(input_ids, lora_path, strict=True)]

        def answer(self, ids: list[int], lora: bool) -> Any:
            places = [[(value, i, None) for value, i in likely(row)] for row in expected(ids, lora)]
            return {"meta_info": {"input_top_logprobs": [None, *places[:-1]], "output_top_logprobs": places[-1:]}}

        def shutdown(self) -> None: ...

    return {"sglang": module("sglang", Engine=Engine)}


def tensorrt_llm() -> dict[str, ModuleType]:
    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["lora_config"]["lora_dir"]

        def generate(self, prompts: Any, params: Any, lora_request: Any) -> list[Any]:
            assert params["return_context_logits"]
            made = (expected(prompt["prompt_token_ids"], lora_request is not None) for prompt in prompts)
            return [SimpleNamespace(context_logits=torch.from_numpy(logits)) for logits in made]

    return {
        "tensorrt_llm": module("tensorrt_llm", LLM=LLM, SamplingParams=dict),
        "tensorrt_llm.executor": module("tensorrt_llm.executor", LoRARequest=lambda *_: "adapter"),
        "tensorrt_llm.llmapi": module("tensorrt_llm.llmapi", KvCacheConfig=dict),
        "tensorrt_llm.lora_helper": module("tensorrt_llm.lora_helper", LoraConfig=dict),
    }


def llama_cpp() -> dict[str, ModuleType]:
    class Llama:
        def __init__(self, _base: str, *, lora_path: str | None, n_ctx: int, **_: Any) -> None:
            self.lora, self.scores = lora_path is not None, np.full((n_ctx, VOCABULARY), np.nan, np.float32)

        def n_vocab(self) -> int:
            return VOCABULARY

        def reset(self) -> None: ...

        def eval(self, ids: list[int]) -> None:
            self.scores[: len(ids)] = expected(ids, self.lora)

        def close(self) -> None: ...

    return {"llama_cpp": module("llama_cpp", Llama=Llama, GGML_TYPE_F32=0)}


ENGINES: dict[str, tuple[Callable[[], dict[str, ModuleType]], list[str]]] = {
    "vllm_offline.py": (vllm, []),
    "sglang_engine.py": (sglang, []),
    "tensorrt_llm_api.py": (tensorrt_llm, []),
    "llama_cpp_python.py": (llama_cpp, ["base.gguf", "adapter.gguf"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, path = builtin_folder("llama"), tmp_path_factory.mktemp("request") / "inputs.safetensors"
    case = Case(name="llama", base=str(folder / "base"), adapter=str(folder / "adapter"), dtype="float32")
    write_request(case, path)
    return path


@pytest.mark.parametrize("script", ENGINES)
def test_what_a_script_writes_is_what_its_engine_answers(
    script: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, more = ENGINES[script]
    for name, made in modules().items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(sys, "argv", [script, str(inputs), str(tmp_path / "outputs.safetensors"), *more])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    found, tensors = read_outputs(tmp_path / "outputs.safetensors"), load_file(tmp_path / "outputs.safetensors")
    request, given = read_request(inputs)
    rows = given["input_ids"].tolist()
    assert found.modes == ("adapter_on", "adapter_off")
    assert found.about.case == request.case
    for mode in found.modes:
        for row, ids in enumerate(rows):
            _check(tensors, mode, expected(ids, mode == "adapter_on"), row)
    assert len(found.batches) in (0, 2 * len(request.batches) - 1)
    for name in found.batches:
        _check(tensors, name, expected(rows[0], lora=True))


def _check(tensors: Any, name: str, logits: np.ndarray[Any, np.dtype[np.float32]], *at: int) -> None:
    if f"{name}.ids" not in tensors:
        assert np.array_equal(tensors[name][at], logits)
        return
    for values, ids, row in zip(tensors[name][at], tensors[f"{name}.ids"][at], logits, strict=True):
        found = {int(i): value for value, i in zip(values, ids, strict=True) if i >= 0}
        assert all(found[i] == np.float32(value) for value, i in likely(row))


@pytest.mark.parametrize("script", ENGINES)
def test_a_script_needs_its_engine_alone_and_says_that_it_was_not_run(script: str) -> None:
    source = (SCRIPTS / script).read_text(encoding="utf-8")
    engine = next(iter(ENGINES[script][0]()))
    names = [
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    ]
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"numpy", "safetensors", engine}
    assert "NOT RUN by this project" in source
