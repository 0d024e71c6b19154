"""Every closed form: what PEFT merges is within a bound that is sharp, and one number or another formula is outside."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from consistency.stages.merged.forms.form import Judged
from consistency.stages.merged.forms.loha import LoHa
from consistency.stages.merged.forms.source import Source
from consistency.worker.model.merging import weight_of
from tests.stages.merged.forms.conftest import Each
from tests.stages.merged.forms.made_layers import CONVOLUTIONS_IN_GROUPS, adapted, dora, largest, moved

Wrong = Callable[..., Any]
"""From what PEFT calls to what is called in its place."""

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "point")
LYCORIS = ("linear", "conv1d", "conv2d", "point", *CONVOLUTIONS_IN_GROUPS)


def lora(*targets: str, **changes: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=6.2, target_modules=list(targets), **changes)


def experts(*parameters: str) -> Any:
    """Adapt parameters: each expert has its own factors, which two matrices hold in different orders."""
    return lora(target_parameters=list(parameters))


def loha(*targets: str, **changes: Any) -> Any:
    return peft.LoHaConfig(**{"r": 4, "alpha": 6, "target_modules": list(targets), **changes})


def lokr(*targets: str, **changes: Any) -> Any:
    return peft.LoKrConfig(**{"r": 2, "alpha": 3, "target_modules": list(targets), **changes})


def ia3(*targets: str, inputs: bool, **changes: Any) -> Any:
    return peft.IA3Config(target_modules=list(targets), feedforward_modules=list(targets) if inputs else [], **changes)


def ia3_everywhere(*, inputs: bool) -> list[Any]:
    groups = () if inputs and not CONVOLUTIONS_IN_GROUPS else ("grouped",)
    return [
        ia3("linear", "conv2d", "conv3d", "point", *groups, inputs=inputs),
        ia3("transposed", inputs=inputs, fan_in_fan_out=True),
    ]


TRANSPOSED = dora("transposed", fan_in_fan_out=True)
EXPERTS = ("experts.stack", "experts.matrix", "other_way.stack")
HEALTHY: dict[str, list[Any]] = {
    "LoRA": [lora(*CONVOLUTIONS)],
    "LoRA, rank-stabilized": [lora(*CONVOLUTIONS, use_rslora=True)],
    "LoRA of experts": [experts(*EXPERTS)],
    "DoRA": [dora("linear", "embedding", *CONVOLUTIONS), TRANSPOSED],
    "LoHa": [loha(*LYCORIS, alpha=3.1)],
    "LoHa, core": [loha(*LYCORIS, alpha=3.1, use_effective_conv2d=True)],
    "LoKr, decomposed": [lokr(*LYCORIS, alpha=3.1)],
    "LoKr, whole": [lokr(*LYCORIS, alpha=3.1, r=64)],
    "LoKr, both decomposed": [lokr(*LYCORIS, alpha=3.1, r=1, decompose_both=True)],
    "LoKr, core": [lokr(*LYCORIS, alpha=3.1, use_effective_conv2d=True)],
    "LoKr, factor": [lokr(*LYCORIS, alpha=3.1, decompose_factor=4)],
    "IA³ of outputs": ia3_everywhere(inputs=False),
    "IA³ of inputs": ia3_everywhere(inputs=True),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_what_peft_computes_is_within(each: Each, kind: str) -> None:
    layers = [one for config in HEALTHY[kind] for one in each(config)]
    assert len(layers) >= len(HEALTHY[kind]) + 2
    for one in layers:
        shares = one.shares()
        assert set(shares) == {"plain", "safe"} | ({"delta"} if "IA³" not in kind else set())
        assert all(share <= 1 for share in shares.values()), one.name


@pytest.mark.parametrize(
    ("config", "least_of_delta", "least_of_weight"),
    [
        pytest.param(lora(*CONVOLUTIONS), 0.1, 0.1, id="LoRA"),
        pytest.param(experts(*EXPERTS), 0.1, 0.1, id="LoRA of experts"),
        pytest.param(dora("linear", "embedding", "conv2d"), 0.1, 0.1, id="DoRA"),
        pytest.param(TRANSPOSED, 0.1, 0.1, id="DoRA, transposed"),
        pytest.param(loha("linear"), 0.1, 0.5, id="LoHa"),
        pytest.param(lokr("linear"), 0.5, 0.5, id="LoKr"),
    ],
)
def test_the_bound_is_sharp(config: Any, least_of_delta: float, least_of_weight: float) -> None:
    for one in adapted(config):
        for name, share in one.shares().items():
            assert share > (least_of_delta if name == "delta" else least_of_weight), (one.name, name)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        pytest.param(lora("conv2d"), 256, id="LoRA"),
        pytest.param(dora("linear", "embedding", "conv2d"), 64, id="DoRA"),
        pytest.param(TRANSPOSED, 64, id="DoRA, transposed"),
        pytest.param(loha("linear"), 64, id="LoHa"),
        pytest.param(lokr("conv2d"), 16, id="LoKr"),
    ],
)
def test_one_element_that_is_off_by_some_numbers_is_found(config: Any, steps: int) -> None:
    for one in adapted(config):
        for tested in one.tensors().values():
            place = largest(tested)
            share, worst = one.worst(moved(tested, place, steps))
            assert share > 1
            assert worst == place


@pytest.mark.parametrize("parameter", ["experts.stack", "other_way.stack"])
def test_an_element_of_the_last_expert_is_found(parameter: str) -> None:
    (one,) = adapted(experts(parameter))
    for tested in one.tensors().values():
        share, worst = one.worst(moved(tested, (2, 7, 9), 256))
        assert share > 1
        assert worst == (2, 7, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_next_number_of_a_product_is_found(dtype: torch.dtype) -> None:
    """Of an IA³ nothing but the rounding of one product is allowed."""
    (one,) = adapted(ia3("linear", inputs=True), dtype, dtype)
    for tested in one.tensors().values():
        for column in range(8):
            share, _ = one.worst(moved(tested, (2, column), 2))
            assert share > 1


LORA_LAYER, IA3_LAYER = "peft.tuners.lora.layer.", "peft.tuners.ia3.layer."
LOHA_WEIGHT, LOKR_WEIGHT = "peft.tuners.loha.layer.make_weight", "peft.tuners.lokr.layer.make_kron"


def turned(real: Any) -> Wrong:
    return lambda layer, adapter: real(layer, adapter).flip(-1)


def of_experts(wrong: Wrong) -> Callable[[Any], Wrong]:
    return lambda real: lambda equation, b, a: real(equation, *wrong(b, a))


WRONG: dict[str, tuple[Any, str, Callable[[Any], Wrong]]] = {
    **{
        f"LoRA, a kernel turned, {target}": (lora(target), f"{LORA_LAYER}_ConvNd.get_delta_weight", turned)
        for target in ("conv1d", "conv2d", "conv3d")
    },
    **{
        f"LoRA of experts, {name}": (experts("experts.stack"), f"{LORA_LAYER}torch.einsum", of_experts(wrong))
        for name, wrong in {
            "another expert": lambda b, a: (b, a.flip(0)),
            "the rank reversed": lambda b, a: (b.flip(1), a),
            "experts as the slower index": lambda b, a: (b.reshape(len(b), b.shape[2], -1).transpose(1, 2), a),
        }.items()
    },
    **{
        f"LoHa, {name}": (loha("linear"), LOHA_WEIGHT, lambda _, wrong=wrong: wrong)  # type: ignore[misc]
        for name, wrong in {
            "factors swapped": lambda a, b, c, d, scale: ((a @ d) * (c @ b)) * scale,
            "no scaling": lambda a, b, c, d, scale: ((a @ b) * (c @ d)) * scale**0,
            "a sum": lambda a, b, c, d, scale: ((a @ b) + (c @ d)) * scale,
        }.items()
    },
    "LoHa, a core the other way": (
        loha("conv2d", use_effective_conv2d=True),
        f"{LOHA_WEIGHT}_cp",
        lambda real: lambda t1, *more, scale: real(t1.transpose(0, 1).contiguous(), *more, scale),
    ),
    **{
        f"LoKr, {name}": (lokr("linear"), LOKR_WEIGHT, lambda _, wrong=wrong: wrong)  # type: ignore[misc]
        for name, wrong in {
            "factors swapped": lambda first, second, scale=1.0: torch.kron(second, first) * scale,
            "no scaling": lambda first, second, scale=1.0: torch.kron(first, second) * scale**0,
            "rows reversed": lambda first, second, scale=1.0: torch.kron(first, second.flip(0)) * scale,
        }.items()
    },
    "IA³, applied twice": (
        ia3("linear", inputs=False),
        f"{IA3_LAYER}torch.mul",
        lambda real: lambda weight, scales: real(real(weight, scales), scales),
    ),
}  # fmt: skip
if CONVOLUTIONS_IN_GROUPS:
    WRONG["IA³, a group with another's vector"] = (
        ia3("grouped", inputs=True),
        f"{IA3_LAYER}Conv2d._get_ia3_scaling_for_weight",
        lambda real: lambda layer, scales: real(layer, scales).roll(8, 0),
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_formula_in_every_precision_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, place, wrong = WRONG[name]
    with monkeypatch.context() as patch:
        patch.setattr(place, wrong(pkgutil.resolve_name(place)))
        (one,) = adapted(config)
        tensors = one.tensors()
    assert all(share > 10 for share in one.shares(tensors).values())


@pytest.mark.parametrize("inputs", [False, True])
def test_a_vector_in_another_order_is_found(inputs: bool) -> None:
    (one,) = adapted(ia3("transposed", inputs=inputs, fan_in_fan_out=True))
    one.layer.ia3_l["default"].data = one.layer.ia3_l["default"].data.flip(0, 1)
    assert all(share > 10 for share in one.shares().values())


def test_a_vector_of_outputs_that_scales_the_inputs_is_found() -> None:
    (one,) = adapted(ia3("grouped", inputs=False))
    assert one.form is not None
    with torch.no_grad():
        wrong = weight_of(one.layer) * one.files["ia3_l.default"].reshape(-1)[: one.form.shape[1]].view(1, -1, 1, 1)
    assert one.worst(Judged(actual=wrong, safe=False))[0] > 10


def test_a_wrong_scaling_of_the_layer_is_found() -> None:
    (one,) = adapted(lora("conv2d", use_rslora=True))
    one.layer.scaling["default"] = 6.2 / 4
    assert all(share > 10 for share in one.shares().values())
    (one,) = adapted(loha("linear"))
    one.layer.scaling["default"] *= 1 + 1e-4
    assert one.shares()["delta"] > 1


def test_what_has_no_form() -> None:
    (one,) = adapted(lora("grouped"))
    assert one.form is None, "a convolution with groups"
    (one,) = adapted(loha("linear"))
    files = {name: tensor for name, tensor in one.files.items() if "w2_b" not in name}
    assert LoHa.of(Source(layer=one.layer, weight=torch.zeros(48, 40), files=files)) is None, "a file without a factor"
