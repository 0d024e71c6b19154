from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.errors import InputError
from consistency.extras.serving.engines.answer import answer, case_of, read_request
from consistency.extras.serving.engines.engine import Compiled, LogitsOf, make_engine
from consistency.extras.serving.inference.engine_request import write_request
from consistency.extras.serving.inference.outputs import read_outputs
from consistency.extras.serving.inference.request import METADATA
from consistency.worker.model.loading import load_model


class Eager:
    """An engine that compiles nothing."""

    name, version, device = "eager", str(torch.__version__), "cpu"
    settings = {"kernels": "torch's"}

    def compiled(self, model: LogitsOf, _inputs: dict[str, torch.Tensor]) -> Compiled:
        return lambda inputs: model(*inputs.values())


class Unable(Eager):
    def compiled(self, _model: LogitsOf, _inputs: dict[str, torch.Tensor]) -> Compiled:
        raise NotImplementedError("no kernel for this\nat all")


def case(name: str = "llama") -> Case:
    folder = builtin_folder(name)
    return Case(name=name, base=str(folder / "base"), adapter=str(folder / "adapter"), dtype="float32")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("request") / "inputs.safetensors"
    write_request(case(), path)
    return path


@pytest.fixture(scope="module")
def outputs(inputs: Path) -> Path:
    path = inputs.with_name("outputs.safetensors")
    answer(inputs, path, Eager())
    return path


def test_every_output_that_is_asked_for_is_what_the_model_computes(inputs: Path, outputs: Path) -> None:
    found, tensors = read_outputs(outputs), load_file(outputs)
    request, given = read_request(inputs)
    assert found.modes == request.modes
    assert found.about.case == request.case
    assert found.about.settings == Eager.settings
    assert len(found.batches) == 2 * len(request.batches) - 1
    model: Any = load_model(case(), "cpu")
    with torch.no_grad():
        assert torch.equal(model(**given).logits, tensors["adapter_on"])
        with model.disable_adapter():
            assert torch.equal(model(**given).logits, tensors["adapter_off"])
        model.merge_adapter()
        assert torch.equal(model(**given).logits, tensors["adapter_merged"])
    assert not torch.equal(tensors["adapter_merged"], tensors["adapter_on"])


def test_the_first_row_is_followed_through_the_batches(outputs: Path) -> None:
    tensors = load_file(outputs)
    row, other = tensors["adapter_on"][0], tensors["adapter_on"][1]
    for name in read_outputs(outputs).batches:
        torch.testing.assert_close(tensors[name], row)
    assert (row - other).abs().max() > 1


def test_other_files_than_the_requests_are_refused(inputs: Path) -> None:
    request, _ = read_request(inputs)
    other = builtin_folder("gpt2")
    with pytest.raises(InputError, match="this is not the base that the request is of"):
        case_of(request, base=str(other / "base"))
    with pytest.raises(InputError, match="this is not the adapter that the request is of"):
        case_of(request, adapter=str(other / "adapter"))


def test_what_an_engine_cannot_do_is_said_with_its_name(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"eager cannot run this model\n.*adapter_on.*\n.*no kernel for this"):
        answer(inputs, tmp_path / "outputs.safetensors", Unable())
    assert not list(tmp_path.iterdir())


def test_a_file_that_asks_for_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no request to an engine"):
        read_request(builtin_folder("llama") / "adapter" / "adapter_model.safetensors")


def test_an_engine_that_is_not_known_or_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no inference engine is known as 'onnxruntim'"):
        make_engine("onnxruntim", "cpu")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"onnx[\s\S]*pip install '\.\[onnx\]'"):
        make_engine("onnxruntime", "cpu")


def test_a_request_runs_no_function_that_it_names(inputs: Path, tmp_path: Path) -> None:
    request, tensors = read_request(inputs)
    path = tmp_path / "inputs.safetensors"
    asking = msgspec.structs.replace(request, base="python:os:abort")
    save_file(tensors, path, {METADATA: msgspec.json.encode(asking).decode()})
    with pytest.raises(InputError, match="a function makes the base"):
        answer(path, tmp_path / "outputs.safetensors", Eager())


def test_compiled_code_is_in_a_folder_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    make_engine("torch-compile", "cpu")
    folder = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
