"""Running a model: what a pass replaces is put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.errors import CaptureError
from consistency.stages.gradient import worker as gradient
from consistency.worker import device_error
from consistency.worker.model import running
from consistency.worker.model.merging import disabled
from consistency.worker.model.running import activations, is_of_the_model, model_code, outputs, parameters_kept, refusal
from consistency.worker.recorder import Skip
from tests.worker.conftest import Look
from tests.worker.model.made_models import adapter_on, an_attention

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT warns while saving

STAGES = ("base", "adapter", "merged", "gradient", "forward", "memory")


def test_an_adapter_on_torchs_attention_is_checked(tmp_path: Path, look: Look) -> None:
    """PEFT merges it for each pass, and what it unmerges has the dtype of the pass: that in float64 stayed."""
    config = peft.LoraConfig(r=2, target_modules=["attention", "out"])
    adapter = adapter_on(an_attention(), config, tmp_path / "adapter")
    inputs = tmp_path / "inputs.safetensors"
    save_file({"x": torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))}, inputs)
    base = Path("python:tests.worker.model.made_models:an_attention")
    found = look(base, adapter, stages=STAGES, inputs=str(inputs))
    assert not [r for r in found if r.status in ("outside", "missing", "unexpected", "blocked")]
    merged = {(r.layer, r.tensor): (r.shape, r.rule, r.status) for r in found if r.stage == "merged"}
    for tensor in ("delta", "weight", "weight_safe_merge"):
        assert merged["blocks.1.attention", tensor] == ((48, 16), "bound", "within")
    layers = {f"blocks.{n}.attention{inner}" for n in (0, 1) for inner in ("", ".base_layer.out_proj")}
    assert {r.layer for r in found if r.stage == "gradient"} == {*layers, "out", "blocks.1", "model"}
    modes = ("adapter_on", "adapter_off", "adapter_merged")
    of_a_mode = {"", ".input.x", ".end_to_end"}
    judged = [r for r in found if r.stage in ("gradient", "forward") and not r.tensor.endswith(".given")]
    assert {r.tensor for r in judged if r.stage == "forward"} == {f"{mode}{one}" for mode in modes for one in of_a_mode}
    assert {r.status for r in judged} <= {"within", "equal"}


def test_only_what_was_replaced_is_put_back() -> None:
    layer = torch.nn.Linear(2, 2)
    weight, bias = layer.weight, layer.bias
    with parameters_kept(layer):
        layer.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        with torch.no_grad():
            bias.zero_()
    assert layer.weight is weight
    assert layer.bias is bias
    assert not layer.bias.any(), "what is written in place is not undone"
    with parameters_kept(layer):
        del layer.weight
        layer.weight = torch.zeros(2, 2)  # as PEFT does for the pass
        del layer.weight
        layer.register_parameter("weight", torch.nn.Parameter(torch.ones(2, 2)))
    assert layer.weight is weight


def test_a_method_that_asks_for_tasks_gets_one_for_each_sequence(tmp_path: Path) -> None:
    base = builtin_folder("llama") / "base"
    poly = peft.PolyConfig(r=2, n_tasks=3, target_modules=["q_proj"], task_type="CAUSAL_LM")
    prompt = peft.MultitaskPromptTuningConfig(num_tasks=2, num_virtual_tokens=2, task_type="CAUSAL_LM")
    inputs = {"input_ids": torch.arange(20).reshape(5, 4), "attention_mask": torch.ones(5, 4, dtype=torch.int64)}
    for config, tasks in ((poly, [0, 1, 2, 0, 1]), (prompt, [0, 1, 0, 1, 0])):
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
        with torch.no_grad():
            found = outputs(model, inputs)
            plain = model(**inputs, task_ids=torch.tensor(tasks)).logits
            other = model(**inputs, task_ids=torch.tensor([0] * 5)).logits
        assert torch.equal(found["logits"], plain)
        assert not torch.equal(plain, other) or config is poly, "a fresh router sends all tasks the same way"
        with disabled(model), torch.no_grad():
            off = outputs(model, inputs)
        assert torch.equal(off["logits"], AutoModelForCausalLM.from_pretrained(base)(**inputs).logits)


def written_here(source: str) -> Callable[..., Any]:
    """Return a function whose frames are of this package."""
    names: dict[str, Any] = {}
    exec(compile(source, device_error.__file__, "exec"), names)
    found: Callable[..., Any] = names["mistaken"]
    return found


@pytest.mark.parametrize("mistake", ["not_defined", "len(3)", "(_ for _ in ()).throw(AssertionError())"])
def test_a_mistake_of_ours_is_not_the_models(mistake: str) -> None:
    layer = torch.nn.Linear(1, 1)
    with pytest.raises((NameError, TypeError, AssertionError)), model_code(layer):
        written_here(f"def mistaken(): {mistake}")()
    with pytest.raises(Skip, match="NameError"), model_code(layer):
        written_here("def mistaken(model): model()")(lambda: not_defined)  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(Skip, match="TypeError"), model_code(layer):  # what torch says of the model's arguments
        written_here("class Mode:\n    def __torch_dispatch__(self): len(3)\nmistaken = Mode().__torch_dispatch__")()


def a_hook_writes(error: type[Exception]) -> Callable[..., Any]:
    """Return a hook of this package that fails to write a file, as on a full disk: the error is of a library below."""
    source = "def mistaken(*_):\n    from pathlib import Path\n    Path('/no/such/folder/x').write_bytes(b'')"
    if error is SafetensorError:
        source = (
            "def mistaken(*_):\n    from safetensors.torch import save_file\n    save_file({}, '/no/such/folder/x')"
        )
    if error is CaptureError:
        source = "def mistaken(*_):\n    from consistency.errors import CaptureError\n    raise CaptureError('full')"
    return written_here(source)


@pytest.mark.parametrize("error", [OSError, SafetensorError, CaptureError])
def test_what_a_hook_of_ours_cannot_write_is_not_the_models(error: type[Exception]) -> None:
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(a_hook_writes(error))
    with pytest.raises(error), model_code(layer, "the pass of this model fails: "):
        layer(torch.ones(1))


def test_a_file_that_the_model_cannot_read_is_the_models() -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Path("/no/such/folder/table").read_bytes()
            return x

    wrapped = torch.nn.Sequential(Reads(), torch.nn.Linear(1, 1))
    with pytest.raises(Skip, match="FileNotFoundError"), model_code(wrapped):
        wrapped(torch.ones(1))
    # and where a hook of ours calls the model
    with pytest.raises(Skip, match="FileNotFoundError"), model_code(wrapped):
        written_here("def mistaken(model, x): model(x)")(wrapped, torch.ones(1))


@pytest.mark.slow
def test_a_stage_fails_by_a_mistake_of_ours(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin_folder("llama")
    for mistaken, status in ((written_here("def mistaken(*_): not_defined"), "blocked"), (_no_backward, "skipped")):
        monkeypatch.setattr(gradient, "gradients_of", mistaken)
        (row,) = [r for r in look(folder / "base", folder / "adapter", stages=("gradient",)) if r.stage == "gradient"]
        assert (row.tensor, row.status) == ("adapter_on", status)


def _no_backward(*_: Any) -> Any:
    raise NameError("of the model")


def test_of_an_accelerator_the_device_is_asked_whose_error_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = torch.nn.Linear(1, 1), RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert is_of_the_model(shape, layer)
    monkeypatch.setattr(running, "device_of", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr(device_error, "computes", lambda _: True)
    assert is_of_the_model(shape, layer)
    assert is_of_the_model(IndexError("a mask"), layer)
    assert not is_of_the_model(torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), layer)
    assert not is_of_the_model(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), layer)
    monkeypatch.setattr(device_error, "computes", lambda _: False)
    assert not is_of_the_model(shape, layer)
    assert is_of_the_model(IndexError("a mask"), layer)


def reason_of(call: Callable[[], object]) -> str:
    """Return why a model that raises this is not run."""
    try:
        call()
    except Exception as error:
        return refusal(Case(name="x", base="b"), error, torch.nn.Linear(2, 2))
    raise AssertionError


class Lacking(torch.nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("silu is not implemented for this device")


def test_an_operation_that_a_device_lacks_is_named_by_its_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Lacking()))
    with pytest.raises(NotImplementedError) as failed:
        model(torch.ones(1, 2))
    said = "an operation of 1.0 is not implemented on cpu: NotImplementedError: silu is not implemented for this device"
    for inputs in (None, "inputs.txt"):  # the user's inputs are not to blame
        assert refusal(Case(name="x", base="b", inputs=inputs), failed.value, model) == said
    error = RuntimeError("\"gelu_kernel\" not implemented for 'Half'")
    assert refusal(Case(name="x", base="b"), error, model).startswith("an operation of the model is not implemented")


def test_an_error_of_pefts_own_code_is_called_that() -> None:
    inputs_made = "the model does not run on inputs made from its config"
    assert reason_of(lambda: torch.ones(2) @ torch.ones(3)).startswith(inputs_made)
    assert reason_of(lambda: peft.PeftType("NONE")).startswith(inputs_made)
    layer = peft.get_peft_model(an_attention(), peft.LoraConfig(r=2, target_modules=["out"])).base_model.model.out
    assert reason_of(lambda: layer(torch.ones(2, 3))).startswith("PEFT's code fails on this model: RuntimeError")


def test_a_layer_that_lacks_an_attribute_of_the_one_it_replaces_is_named() -> None:
    """Whisper reads the stride of its convolutions."""
    layer = peft.get_peft_model(an_attention(), peft.LoraConfig(r=2, target_modules=["out"])).base_model.model.out
    expected = "the model reads an attribute that PEFT's layer in its place lacks: AttributeError"
    assert reason_of(lambda: layer.stride).startswith(expected)
    assert not reason_of(lambda: torch.nn.Linear(1, 1).stride).startswith(expected)


class Transposed(torch.nn.Module):
    """Mamba's output layer: its input comes from a scan over the sequence, with the channels before the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = torch.nn.Linear(64, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.out_proj(x.transpose(1, 2))
        return rows


def test_a_pass_is_the_same_program_whether_or_not_weights_require_a_gradient() -> None:
    """PEFT's `set_adapter` changes the flag, and torch another multiplication with it, under `no_grad` too."""
    model = Transposed()
    x = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))
    operations = []
    for needed in (True, False):
        model.out_proj.weight.requires_grad_(needed)
        with _Recorded() as recorded:
            activations(model, {"x": x})
        assert model.out_proj.weight.requires_grad == needed
        operations.append(recorded.names)
    assert operations[0] == operations[1]
    assert "aten.bmm.default" in operations[0]


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
