"""What a merge allocates: exact on the CPU, inside its limit for every healthy kind, outside for a third copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from consistency.worker.faults import plant
from consistency.worker.memory.merge_peak import MergePeak, measure_merge
from consistency.worker.memory.peak import ProfilerMeter
from consistency.worker.model.merging import adapted_layers, weight_of

pytestmark = [pytest.mark.filterwarnings("ignore")]  # what PEFT says of layers of its own accord

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layers(torch.nn.Module):
    """One layer of each kind that PEFT merges by adding a delta."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 96)
        self.without_bias = torch.nn.Linear(64, 96, bias=False)
        self.transposed = Conv1D(96, 64)
        self.embedding = torch.nn.Embedding(100, 32)
        self.tied = torch.nn.Linear(32, 100, bias=False)
        self.tied.weight = self.embedding.weight
        self.conv = torch.nn.Conv2d(8, 16, 3)
        self.pointwise = torch.nn.Conv2d(32, 48, 1)


def adapted(kind: str, dtype: torch.dtype = torch.float32, *, cast: bool = True, **options: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=[kind], init_lora_weights=False, **options)
    model = peft.get_peft_model(Layers().to(dtype), config, autocast_adapter_dtype=cast)
    ((_, layer),) = adapted_layers(model)
    return layer


def measure(layer: Any, *, safe: bool = False) -> MergePeak:
    return measure_merge(layer, ProfilerMeter(), safe=safe)


KINDS: dict[str, Callable[[], Any]] = {
    kind: lambda kind=kind: adapted(kind)  # type: ignore[misc]
    for kind in ("linear", "without_bias", "transposed", "embedding", "tied", "conv", "pointwise")
}
KINDS |= {
    f"{kind}, {dtype}, adapter in {'float32' if cast else dtype}": (
        lambda kind=kind, dtype=dtype, cast=cast: adapted(kind, dtype, cast=cast)  # type: ignore[misc]
    )
    for kind, dtype, cast in itertools.product(("linear", "embedding", "conv"), DTYPES[1:], (True, False))
}
KINDS["rank-stabilized"] = lambda: adapted("linear", use_rslora=True, rank_pattern={"linear": 16})
KINDS["bias of its own"] = lambda: adapted("linear", lora_bias=True)


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_merge_is_inside_its_limit(kind: str, safe: bool) -> None:
    found = measure(KINDS[kind](), safe=safe)
    assert found.share is not None
    assert 0 < found.share <= 1


@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
def test_the_layer_is_left_as_it_was(safe: bool) -> None:
    layer = adapted("linear", torch.bfloat16)
    weight = weight_of(layer)
    before, place = weight.clone(), weight.data_ptr()
    measure(layer, safe=safe)
    assert torch.equal(weight_of(layer), before)
    assert weight_of(layer).data_ptr() == place
    assert not layer.merged_adapters
    assert "get_delta_weight" not in vars(layer)


def test_the_two_parts_of_a_merge_are_counted_to_the_byte() -> None:
    layer = adapted("without_bias")
    size = weight_of(layer).nbytes
    plain, safe = measure(layer).seen, measure(layer, safe=True).seen
    assert plain.before_mark - 2 * size in range(16)  # product and scaled product, and PEFT's scaling as a number
    assert (plain.after_mark, plain.kept) == (size, 0)
    # new weight and delta; isfinite makes the magnitudes, and three masks of a byte per element
    assert safe.after_mark == 3 * size + 3 * size // 4
    assert safe.kept == size


@pytest.mark.parametrize(("dtype", "cast"), list(itertools.product(DTYPES, (True, False))))
def test_a_third_copy_is_outside_the_limit(dtype: torch.dtype, cast: bool) -> None:
    layer = adapted("linear", dtype, cast=cast)
    healthy = measure(layer)
    with plant("merge-third-copy"):
        found = measure(layer)
    assert found.share is not None
    assert found.share > 1
    assert found.seen.before_mark == healthy.seen.before_mark, "the part that computes the delta tells nothing"
    assert found.seen.kept >= weight_of(layer).nbytes
    if dtype is torch.float32:
        assert found.seen.whole == healthy.seen.whole, "the peak of the whole hides it"
        assert found.seen.after_mark == 2 * weight_of(layer).nbytes


def test_a_copy_beside_a_safe_merge_is_outside_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = adapted("without_bias")
    real = type(layer).merge

    def merge(self: Any, **options: Any) -> None:
        spare = weight_of(self).clone()
        real(self, **options)
        del spare

    monkeypatch.setattr(type(layer), "merge", merge)
    found = measure(layer, safe=True)
    assert found.share is not None
    assert found.share > 1


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, target_modules=["linear"], use_dora=True),
        peft.LoHaConfig(r=2, target_modules=["linear"]),
    ],
    ids=["dora", "loha"],
)
def test_another_method_has_figures_and_no_limit(config: Any) -> None:
    ((_, layer),) = adapted_layers(peft.get_peft_model(Layers(), config))
    found = measure(layer)
    assert found.allowed is None
    assert found.share is None
    assert found.seen.whole >= weight_of(layer).nbytes
