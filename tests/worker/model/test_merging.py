"""A merge leaves a layer as it was: every tensor to the bit, in its own storage, and every attribute of its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from consistency.worker.model.loading import ADAPTER_NAME, load_model
from consistency.worker.model.merging import adapted_layers, in_merged, merged, restored, weight_of
from tests.worker.model.made_models import SIZES, case_of, on_llama, perturb, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]  # what PEFT says of layers of its own accord


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(3, 16, 24))
        self.down = torch.nn.Parameter(torch.randn(3, 24, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eij,ejk->bk", x, self.gate_up, self.down)


class Layers(torch.nn.Module):
    """One layer of each kind that some method of PEFT adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.transposed = Conv1D(48, 32)
        self.embedding = torch.nn.Embedding(50, 32)
        self.tied = torch.nn.Linear(32, 50, bias=False)
        self.tied.weight = self.embedding.weight
        self.conv = torch.nn.Conv2d(8, 16, 3)
        self.experts = Experts()
        self.norm = torch.nn.LayerNorm(32)


LINEAR: dict[str, Any] = {"target_modules": ["linear"]}
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, **LINEAR),
    "lora with a bias": lambda: peft.LoraConfig(r=4, lora_bias=True, **LINEAR),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **LINEAR),
    "lora, transposed": lambda: peft.LoraConfig(r=4, target_modules=["transposed"], fan_in_fan_out=True),
    "lora, embedding": lambda: peft.LoraConfig(r=4, target_modules=["embedding"]),
    "dora, embedding": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["embedding"]),
    "lora, tied": lambda: peft.LoraConfig(r=4, target_modules=["tied"]),
    "lora, conv": lambda: peft.LoraConfig(r=4, target_modules=["conv"]),
    "dora, conv": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["conv"]),
    "lora, experts": lambda: peft.LoraConfig(
        r=4, target_modules=[], target_parameters=["experts.gate_up", "experts.down"]
    ),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, total_step=10, **LINEAR),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], **LINEAR),
    "loha": lambda: peft.LoHaConfig(r=2, **LINEAR),
    "lokr": lambda: peft.LoKrConfig(r=2, **LINEAR),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, **LINEAR),
    "boft": lambda: peft.BOFTConfig(boft_block_size=8, **LINEAR),
    "hra": lambda: peft.HRAConfig(r=4, **LINEAR),
    "shira": lambda: peft.ShiraConfig(r=4, **LINEAR),
    "vera": lambda: peft.VeraConfig(r=4, **LINEAR),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=8, **LINEAR),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, **LINEAR),
    "c3a": lambda: peft.C3AConfig(block_size=8, **LINEAR),
    "randlora": lambda: peft.RandLoraConfig(r=4, **LINEAR),
    "miss": lambda: peft.MissConfig(r=4, **LINEAR),
    "road": lambda: peft.RoadConfig(group_size=8, **LINEAR),
    "norm": lambda: peft.LNTuningConfig(target_modules=["norm"]),
    "tokens": lambda: peft.TrainableTokensConfig(target_modules=["embedding"], token_indices=[1, 4]),
}  # fmt: skip


def adapted(method: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(Layers().to(dtype), METHODS[method]())
    perturb(model)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Every tensor of a model with its bits and its place, and the attributes of its modules."""

    tensors: dict[str, tuple[int, int, bytes]]
    attributes: dict[str, str]

    @classmethod
    def of(cls, model: torch.nn.Module) -> State:
        tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
        return cls(
            tensors={
                name: (id(t), t.data_ptr(), t.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
                for name, t in tensors.items()
            },
            attributes={name: _told(vars(module)) for name, module in model.named_modules()},
        )


def _told(value: Any) -> str:
    """Tell a value with all that containers hold; objects by their identity."""
    if isinstance(value, dict):
        return str({str(k): _told(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_told(v) for v in value])
    return repr(value) if isinstance(value, (str, int, float, type(None))) else str(id(value))


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_leaves_everything_as_it_was(method: str, safe: bool) -> None:
    model = adapted(method)
    before = State.of(model)
    twin = adapted(method)  # PEFT 0.18 leaves tensors in trainable tokens that cannot be copied
    layers = list(zip(adapted_layers(model), adapted_layers(twin), strict=True))
    assert layers
    for (_, layer), (_, other) in layers:
        with merged(layer, safe=safe) as weight:
            assert layer.merged_adapters == [ADAPTER_NAME]
        with torch.no_grad():
            other.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        assert torch.equal(weight, weight_of(other)), "not what PEFT merges, or not kept"
        assert not torch.equal(weight, weight_of(layer)), "nothing was merged"
    assert State.of(model) == before


def test_it_is_left_as_it_was_where_the_merge_fails() -> None:
    model = adapted("dora")
    before = State.of(model)
    ((_, layer),) = adapted_layers(model)

    def fail() -> None:
        with restored(layer):
            layer.merge(adapter_names=[ADAPTER_NAME])
            raise RuntimeError("half done")

    with pytest.raises(RuntimeError, match="half"):
        fail()
    assert State.of(model) == before


def test_the_storage_of_the_model_is_never_written(tmp_path: Path) -> None:
    """Neither by a plain merge, which PEFT does in place: a page of a mapped file becomes private memory then."""
    model = adapted("lora", torch.bfloat16)
    ((_, layer),) = adapted_layers(model)
    base = layer.get_base_layer()
    (tmp_path / "weight").write_bytes(base.weight.detach().view(torch.uint8).numpy().tobytes())
    mapped = np.memmap(tmp_path / "weight", mode="c")  # as safetensors maps it
    base.weight.data = torch.from_numpy(mapped).view(torch.bfloat16).view(32, 32)
    mapped.flags.writeable = False
    place = base.weight.data_ptr()
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("the system does not tell which pages are private")
    with merged(layer, safe=False) as weight:
        assert weight.data_ptr() != place
    lines = iter(smaps.read_text(encoding="ascii", errors="replace").splitlines())
    for line in lines:
        if line.startswith(f"{mapped.ctypes.data:x}-"):
            break
    private = next(line for line in lines if line.startswith("Anonymous:"))
    assert int(private.split()[1]) == 0


# the adapter merged while the model runs


@pytest.mark.parametrize(("targets", "tied"), [(["q_proj", "up_proj"], False), (["embed_tokens", "q_proj"], True)])
def test_a_model_runs_merged_and_is_left_as_it_was(tmp_path: Path, targets: list[str], tied: bool) -> None:
    """A weight that another layer uses too is merged for both."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    base = saved(transformers.LlamaForCausalLM(config), tmp_path / "base")
    case = case_of(base, on_llama(base, peft.LoraConfig(r=2, target_modules=targets)))
    model: Any = load_model(case, "cpu")
    twin: Any = load_model(case, "cpu")
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    with torch.no_grad():
        found = in_merged(model, lambda: model(**inputs).logits)
        twin.merge_adapter()
        assert torch.equal(found, twin(**inputs).logits)
        assert not torch.equal(found, model(**inputs).logits)
    assert all(torch.equal(p, before[n][1]) and p.data_ptr() == before[n][0] for n, p in model.named_parameters())
    assert not any(layer.merged_adapters for _, layer in adapted_layers(model))


def test_a_weight_that_is_used_without_its_layer_is_merged_all_the_same(tmp_path: Path) -> None:
    base = saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), tmp_path / "base")
    model: Any = load_model(case_of(base, on_llama(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))), "cpu")
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = weight.detach().clone()
    found = in_merged(model, lambda: weight.detach().clone())
    assert not torch.equal(found, before)


def test_an_error_of_the_model_leaves_its_layers_as_they_were(tmp_path: Path) -> None:
    base = saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), tmp_path / "base")
    model: Any = load_model(case_of(base, on_llama(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))), "cpu")

    def fail(*_: object) -> None:
        raise ValueError("inside the layer")

    hook = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.register_forward_hook(fail)
    with pytest.raises(ValueError, match="inside the layer"), torch.no_grad():
        in_merged(model, lambda: model(input_ids=torch.arange(4)[None]))
    hook.remove()
    assert not any(layer.merged_adapters for _, layer in adapted_layers(model))
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for _, layer in adapted_layers(model))
