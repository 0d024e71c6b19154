"""Plant faults in single layers of a trained model, and see which the rule `block` finds, and where.

    python -m benchmarks.trained DIR
    python -m benchmarks.faults_in_blocks DIR/smollm2 --dtypes bfloat16,float16,float32 --layers 0,15,29
    python -m benchmarks.faults_in_blocks DIR/gemma3 --layers 0,8,17
    python -m benchmarks.faults_in_blocks DIR/smollm2 --backward            # wrong gradients in single layers

The model computes on the CPU, by the passes of the stage `forward`, or `gradient`: in float64, with noise, healthy, and
with one fault at a time. A line has the largest figure over its limit among the modules of the layer, and how many
modules of other layers are outside, which has to be none.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from consistency.case.case import Case
from consistency.devices.products import Products
from consistency.numerics.error_spread import ErrorFigures, Spread
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rounded_products import RoundedProducts
from consistency.worker import cpu_error
from consistency.worker.decisions.track import Track
from consistency.worker.judging.gradients import crossing_by, in_float64
from consistency.worker.model import float64_reference, half_kernels
from consistency.worker.model.block_backward import Backward, backward_by_blocks
from consistency.worker.model.block_pass import ResultPlace, as_exact, rounded, run_by_blocks
from consistency.worker.model.inputs import sourced_inputs
from consistency.worker.model.running import tokens_of
from consistency.worker.training.backward import of_outputs, trainable

Fault = Callable[[Any], Any]
"""Called with a layer of the model, returns a context in which it is wrong."""

PASSES = 3


Results = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """A model with what its blocks are given, and the exact results and their spreads.

    Attributes
    ----------
    results : callable
        Compute the results of the model as it is.
    """

    model: Any
    results: Callable[[], Results]
    exact: Results
    spreads: dict[str, Spread]
    kernels: RoundedProducts | None
    """As the stages have them: a processor without fast kernels of a half type takes minutes for one pass."""

    def figures(self) -> dict[str, ErrorFigures]:
        """Return the figures of the model as it is, by place."""
        with half_kernels.computing(self.kernels):
            found = self.results()
        return {name: spread.figures(found[name], self.exact[name]) for name, spread in self.spreads.items()}


def _results(model: Any, inputs: dict[str, torch.Tensor], given: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    run_by_blocks(model, inputs, given, lambda place, result: found.__setitem__(str(place), result.detach().clone()))
    return found


def load(folder: Path, dtype: str) -> Any:
    """Return the model with its adapter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, dtype))
    return peft.PeftModel.from_pretrained(model, folder / "adapter").eval()


def reference_of(folder: Path, dtype: str, *, backward: bool = False) -> Reference:
    """Compute a model in float64 and with noise: its forward pass, or its gradients."""
    model = load(folder, dtype)
    inputs, reason, _ = sourced_inputs(Case(name="x", base=str(folder / "base")), model)
    if inputs is None:
        raise ValueError(reason)
    if backward:
        return _of_gradients(model, inputs)
    kind, given, exact = getattr(torch, dtype), dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def round_first(name: str, value: torch.Tensor) -> torch.Tensor:
        given[name] = rounded(value, kind)
        return given[name].to(value.dtype)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        if result.is_floating_point():
            exact[str(place)] = as_exact(result, kind)

    with Float64Mode():
        run_by_blocks(model, inputs, round_first, take)

    def results() -> Results:
        return _results(model, inputs, lambda name, own: given[name].to(own.dtype))

    kernels = half_kernels.replacement(model, tokens_of(inputs))
    drawn = _drawn(results, kernels)
    spreads = {name: Spread.of([one[name] for one in drawn], exact[name]) for name in exact}
    return Reference(model, results, exact, spreads, kernels)


def _of_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> Reference:
    wanted = {name: one for name, one in model.named_parameters() if "lora_" in name}
    of = Backward(model=model, parameters=wanted, inputs=inputs, loss=of_outputs)
    with tempfile.TemporaryDirectory() as scratch:
        exact = in_float64(of, Track(Path(scratch) / "decisions.bin"))
    crossing = crossing_by(float64_reference.Reference.of_this_process(exact.given))

    def results() -> Results:
        found: Results = {}
        with trainable(model, wanted.values()):
            backward_by_blocks(of, crossing, lambda name, gradient: found.update({_place_of(name): gradient.detach()}))
        return found

    kernels = half_kernels.replacement(model, tokens_of(inputs))
    drawn, sums = _drawn(results, kernels), {_place_of(name) for name in wanted}
    truth = {_place_of(name): gradient for name, gradient in exact.gradients.items()}
    spreads = {n: Spread.of([one[n] for one in drawn], truth[n], of_a_sum=n in sums) for n in truth if n in drawn[0]}
    return Reference(model, results, {name: truth[name] for name in spreads}, spreads, kernels)


def _place_of(name: str) -> str:
    """Return the place of a gradient: of a parameter its module, then its own name."""
    layer, at, own = name.removeprefix(_PREFIX).partition(".lora_")
    return f"{layer}::lora_{own}" if at else name


def _drawn(results: Callable[[], Results], kernels: RoundedProducts | None) -> list[Results]:
    found = []
    for seed in range(PASSES):
        with half_kernels.computing(kernels), cpu_error.with_noise(Products(), seed):
            found.append(results())
    return found


def _on_output(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Change what a part of a layer returns."""

    def fault(layer: Any) -> Any:
        def hook(_: Any, __: Any, found: Any) -> Any:
            first = found[0] if isinstance(found, tuple) else found
            changed = change(first.clone())
            return (changed, *found[1:]) if isinstance(found, tuple) else changed

        return _while(getattr(layer, part).register_forward_hook(hook))

    return fault


@contextmanager
def _while(handle: Any) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(handle.remove)
        yield


def _but_first(change: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Change all tokens but the first, which alone has the massive activation."""
    x[:, 1:] = change(x[:, 1:])
    return x


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(_but_first, lambda x: x * factor)


def _another_token(x: torch.Tensor) -> torch.Tensor:
    x[:, 3] = x[:, 4]
    return x


def _no_channel(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:, 7] = 0
    return x


def _one_element(x: torch.Tensor) -> torch.Tensor:
    x[1, 3, 7] *= 1.5
    return x


def _on_gradient(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Change the gradient that comes in to a part of a layer."""

    def fault(layer: Any) -> Any:
        def hook(_: Any, __: Any, found: Any) -> None:
            first = found[0] if isinstance(found, tuple) else found
            if first.requires_grad:
                first.register_hook(lambda gradient: change(gradient.clone()))

        return _while(getattr(layer, part).register_forward_hook(hook))

    return fault


def _of_kwargs(change: Callable[[Any, dict[str, Any]], None]) -> Fault:
    def fault(layer: Any) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            kwargs = dict(kwargs)
            change(module, kwargs)
            return args, kwargs

        return _while(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True))

    return fault


def _rotary_off_by_one(_: Any, kwargs: dict[str, Any]) -> None:
    kwargs["position_embeddings"] = tuple(table.roll(1, 1) for table in kwargs["position_embeddings"])


@contextmanager
def _no_mask(layer: Any) -> Iterator[None]:
    def drop(module: Any, kwargs: dict[str, Any]) -> None:
        kwargs["attention_mask"] = None
        module.is_causal = False

    with _of_kwargs(drop)(layer):
        try:
            yield
        finally:
            layer.self_attn.is_causal = True


def _scaling(part: str, factor: float) -> Fault:
    @contextmanager
    def fault(layer: Any) -> Iterator[None]:
        held = layer.get_submodule(part).scaling
        kept = dict(held)
        held.update({name: value * factor for name, value in kept.items()})
        try:
            yield
        finally:
            held.update(kept)

    return fault


@contextmanager
def _one_bit(layer: Any) -> Iterator[None]:
    """Flip a bit of the exponent of one weight: it is 256 times as large."""
    projection = layer.self_attn.o_proj
    weight = getattr(projection, "base_layer", projection).weight
    kept = weight[5, 7].clone()
    with torch.no_grad():
        weight[5, 7] *= 256
        try:
            yield
        finally:
            weight[5, 7] = kept


FAULTS: dict[str, Fault] = {
    "attention zero": _on_output("self_attn", _times(0.0)),
    "MLP zero": _on_output("mlp", _times(0.0)),
    "attention, tokens in another order": _on_output("self_attn", functools.partial(_but_first, lambda x: x.flip(1))),
    "attention × 1.1": _on_output("self_attn", _times(1.1)),
    "MLP × 1.1": _on_output("mlp", _times(1.1)),
    "attention × 1.02": _on_output("self_attn", _times(1.02)),
    "MLP × 1.02": _on_output("mlp", _times(1.02)),
    "attention of one token is another's": _on_output("self_attn", _another_token),
    "a channel of the MLP zero": _on_output("mlp", _no_channel),
    "one element × 1.5": _on_output("self_attn", _one_element),
    "rotary tables off by one": _of_kwargs(_rotary_off_by_one),
    "no mask": _no_mask,
    "LoRA of v off": _scaling("self_attn.v_proj", 0.0),
    "LoRA of v doubled": _scaling("self_attn.v_proj", 2.0),
    "LoRA of down off": _scaling("mlp.down_proj", 0.0),
    "one bit of a weight": _one_bit,
}
"""What is planted in a layer."""

BACKWARD_FAULTS: dict[str, Fault] = {
    "gradient of the attention zero": _on_gradient("self_attn", torch.zeros_like),
    "gradient of the MLP zero": _on_gradient("mlp", torch.zeros_like),
    "gradient of the attention, tokens in another order": _on_gradient("self_attn", lambda x: x.flip(1)),
    "gradient of the attention × 1.1": _on_gradient("self_attn", lambda x: x * 1.1),
    "gradient of the MLP × 1.1": _on_gradient("mlp", lambda x: x * 1.1),
    "gradient of the MLP × 1.02": _on_gradient("mlp", lambda x: x * 1.02),
    "gradient of one token is another's": _on_gradient("self_attn", _another_token),
    "a channel of the MLP's gradient zero": _on_gradient("mlp", _no_channel),
    "one element of the MLP's gradient × 1.5": _on_gradient("mlp", _one_element),
    "rotary tables off by one": FAULTS["rotary tables off by one"],
    "LoRA of v doubled": FAULTS["LoRA of v doubled"],
}
"""What is planted in the backward pass of a layer."""

_PREFIX = "base_model.model."


def layers_of(model: Any) -> Any:
    """Return the decoder layers."""
    return model.base_model.model.model.layers


def outside(figures: dict[str, ErrorFigures]) -> dict[str, float]:
    """Return the largest figure over its limit of what is outside, by module."""
    return {ResultPlace.of(name).layer: one.ratio for name, one in figures.items() if not one.ratio <= 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with base and adapter, as benchmarks.trained makes it")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--layers", default="0,15,29")
    parser.add_argument("--backward", action="store_true", help="faults in gradients, which have to be found there")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    layers = [int(number) for number in given.layers.split(",")]
    print("| dtype | fault |", *(f"layer {n} |" for n in layers), "others outside |")
    print("|---|---|", *("---|" for _ in layers), "---|")
    for dtype in given.dtypes.split(","):
        reference = reference_of(given.folder, dtype, backward=given.backward)
        healthy = reference.figures()
        print(f"| {dtype} | none |", *("|" for _ in layers), f"{len(outside(healthy))}, at most "
              f"{max(one.ratio for one in healthy.values()):.2f} of {len(healthy)} |")  # fmt: skip
        for name, fault in (BACKWARD_FAULTS if given.backward else FAULTS).items():
            cells, others = [], 0
            for number in layers:
                with fault(layers_of(reference.model)[number]):
                    figures = reference.figures()
                own = f"model.layers.{number}"
                of_layer = {n: f for n, f in figures.items() if ResultPlace.of(n).layer.startswith((f"{own}.", own))
                            and ResultPlace.of(n).layer.split(".")[2] == str(number)}  # fmt: skip
                worst = max(of_layer, key=lambda one: of_layer[one].ratio)
                cells.append(f"{of_layer[worst].ratio:.1f} {ResultPlace.of(worst).layer.removeprefix(own)}".strip())
                others += len(outside(figures).keys() - {ResultPlace.of(n).layer for n in of_layer})
            print(f"| {dtype} | {name} |", *(f"{cell} |" for cell in cells), f"{others} |", flush=True)


if __name__ == "__main__":
    main()
