"""Planted faults: what the tool claims to detect, put into one worker's real loading path on purpose.

A fault replaces a function that the worker is going to call with one that goes wrong as hardware or a library would;
everything after it is the real code. Nothing here is imported unless a job asks for a fault, which no option does: the
tests do, and so does whoever wants to see the tool find something.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from consistency.errors import UsageError

Tensors = dict[str, torch.Tensor]


Undo = Callable[[], None]
Install = Callable[[], Undo]


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant a fault in this process, and take it away at the end.

    Raises
    ------
    UsageError
        There is no such fault.
    """
    if name not in FAULTS:
        raise UsageError(f"no such fault: {name}", wanted=", ".join(sorted(FAULTS)))
    undo = FAULTS[name]()
    try:
        yield
    finally:
        undo()


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace a function by one that calls it."""
    kept = vars(owner)[name]
    setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: setattr(owner, name, kept)


def _in_adapter_file(change: Callable[[Tensors], None]) -> Install:
    """Change what PEFT reads from the adapter's file, on its way to the device."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Tensors]:
        def load(*args: Any, **kwargs: Any) -> Tensors:
            found: Tensors = {name: tensor.clone() for name, tensor in real(*args, **kwargs).items()}
            change(found)
            return found

        return load

    def install() -> Undo:
        from peft import peft_model

        return _replace(peft_model, "load_peft_weights", wrap)

    return install


def _in_base(change: Callable[[torch.nn.Module], None]) -> Install:
    """Change the base after transformers has loaded it."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            model, missing = real(*args, **kwargs)
            with torch.no_grad():
                change(model)
            return model, missing

        return load

    def install() -> Undo:
        from consistency.worker import loading

        return _replace(loading, "_from_folder", wrap)

    return install


def _in_adapted_model(change: Callable[[Any], None]) -> Install:
    """Change the adapted model after PEFT has loaded it."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            model = real(*args, **kwargs)
            change(model)
            return model

        return load

    def install() -> Undo:
        from peft import PeftModel

        return _replace(PeftModel, "from_pretrained", wrap)

    return install


def _in_delta(change: Callable[[torch.Tensor], torch.Tensor]) -> Install:
    """Change what PEFT computes as the delta of a linear layer."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def delta(self: Any, adapter: str) -> torch.Tensor:
            return change(real(self, adapter))

        return delta

    def install() -> Undo:
        from peft.tuners.lora.layer import Linear

        return _replace(Linear, "get_delta_weight", wrap)

    return install


def _in_activations(change: Callable[[Tensors], Tensors]) -> Install:
    """Change what the forward pass gives, and nothing before it."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Tensors]:
        def activations(*args: Any, **kwargs: Any) -> Tensors:
            return change(real(*args, **kwargs))

        return activations

    def install() -> Undo:
        from consistency.worker.stages import forward

        return _replace(forward, "activations", wrap)

    return install


def _at_merged(act: Callable[[], None]) -> Install:
    """Do something in the middle of the run."""

    def wrap(real: Callable[..., Any]) -> Callable[..., None]:
        def run(context: Any) -> None:
            act()
            real(context)

        return run

    def install() -> Undo:
        from consistency.worker.stages import merged

        return _replace(merged, "run", wrap)

    return install


def _in_later_loads(change: Callable[[Tensors], None]) -> Install:
    """Change what PEFT reads from the adapter's file, the first time apart."""
    loads = 0

    def later(tensors: Tensors) -> None:
        nonlocal loads
        loads += 1
        if loads > 1:
            change(tensors)

    return _in_adapter_file(later)


def _in_merge(change: Callable[[torch.Tensor], None]) -> Install:
    """Change what a merge has left in a linear layer's weight."""

    def wrap(real: Callable[..., Any]) -> Callable[..., None]:
        def merge(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            with torch.no_grad():
                change(self.get_base_layer().weight)

        return merge

    def install() -> Undo:
        from peft.tuners.lora.layer import Linear

        return _replace(Linear, "merge", wrap)

    return install


def _products_in_tf32() -> Undo:
    """Let the delta's product run as on a unit that cuts its operands to TF32."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def delta(self: Any, adapter: str) -> torch.Tensor:
            factors = [self.lora_A[adapter].weight, self.lora_B[adapter].weight]
            kept = [factor.data for factor in factors]
            for factor in factors:
                factor.data = _cut_to_tf32(factor.data)
            try:
                found: torch.Tensor = real(self, adapter)
                return found
            finally:
                for factor, data in zip(factors, kept, strict=True):
                    factor.data = data

        return delta

    from peft.tuners.lora.layer import Linear

    return _replace(Linear, "get_delta_weight", wrap)


def _cut_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 10 of 23 mantissa bits stay


def _zeros(tensors: Tensors) -> None:
    for name in tensors:
        if "lora_B" in name:
            tensors[name].zero_()


def _one_bit(tensors: Tensors) -> None:
    _flip(tensors, _a_tensor(tensors))


def _one_bit_of_a(tensors: Tensors) -> None:
    _flip(tensors, _a_tensor(tensors, "lora_A"))


def _flip(tensors: Tensors, name: str) -> None:
    tensors[name].reshape(-1).view(torch.int32)[5] ^= 1 << 20


def _other_tensor(tensors: Tensors) -> None:
    name = _a_tensor(tensors)
    other = next(n for n in tensors if n != name and tensors[n].shape == tensors[name].shape and "lora_B" in n)
    tensors[name].copy_(tensors[other])


def _two_layers(tensors: Tensors) -> None:
    one = _a_tensor(tensors)
    other = next(n for n in tensors if n != one and tensors[n].shape == tensors[one].shape and "lora_B" in n)
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _through(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype).to(tensors[name].dtype)

    return change


def _through_tf32(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = _cut_to_tf32(tensors[name])


def _not_a_number(tensors: Tensors) -> None:
    tensors[_a_tensor(tensors)].fill_(float("nan"))


def _half_a_page(tensors: Tensors) -> None:
    raw = tensors[_a_tensor(tensors)].reshape(-1).view(torch.uint8)
    raw[: min(2048, raw.numel() // 2)] = 0xA5


def _missing_key(tensors: Tensors) -> None:
    del tensors[_a_tensor(tensors)]


def _no_a(tensors: Tensors) -> None:
    del tensors[_a_tensor(tensors, "lora_A")]


def _a_tensor(tensors: Tensors, part: str = "lora_B") -> str:
    return sorted(name for name in tensors if part in name)[1]


def _old_bytes(model: Any) -> None:
    """Leave in a parameter what another tensor of the model left in memory, as a copy into recycled memory would."""
    parameter = next(p for name, p in model.named_parameters() if "lora_B" in name)
    held = max((p for name, p in model.named_parameters() if "lora_" not in name), key=lambda p: p.numel())
    with torch.no_grad():
        parameter.copy_(held.reshape(-1)[: parameter.numel()].reshape(parameter.shape))


def _base_through_bfloat16(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


def _one_bit_of_weight(weight: torch.Tensor) -> None:
    weight.view(torch.int32)[3, 5] ^= 1 << 27


def _base_bit(model: torch.nn.Module) -> None:
    weight = max(model.parameters(), key=lambda p: p.numel())
    weight.reshape(-1)[7:8].view(torch.uint8)[0] ^= 1


def _double_scaling(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}


def _inactive(model: Any) -> None:
    model.base_model.disable_adapter_layers()


_calls = 0


def _flaky(delta: torch.Tensor) -> torch.Tensor:
    global _calls
    _calls += 1
    return delta * (1 + 2**-23 * (_calls % 2))


def _kernel_fails(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a kernel of this device failed")


def _operator_fails(_: Tensors) -> Tensors:
    raise RuntimeError("an operator of this device failed")


def _hang() -> None:
    while True:
        time.sleep(1)


def _out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


FAULTS: dict[str, Install] = {
    "adapter-zeros": _in_adapter_file(_zeros),
    "adapter-bit-flip": _in_adapter_file(_one_bit),
    "adapter-other-tensor": _in_adapter_file(_other_tensor),
    "adapter-bit-flip-in-a": _in_adapter_file(_one_bit_of_a),
    "adapter-layers-swapped": _in_adapter_file(_two_layers),
    "adapter-through-bfloat16": _in_adapter_file(_through(torch.bfloat16)),
    "adapter-through-float16": _in_adapter_file(_through(torch.float16)),
    "adapter-through-tf32": _in_adapter_file(_through_tf32),
    "adapter-copy-dropped": _in_adapter_file(_no_a),
    "adapter-copy-dropped-later": _in_later_loads(_no_a),
    "adapter-old-bytes": _in_adapted_model(_old_bytes),
    "adapter-nan": _in_adapter_file(_not_a_number),
    "adapter-half-a-page": _in_adapter_file(_half_a_page),
    "adapter-missing-key": _in_adapter_file(_missing_key),
    "adapter-inactive": _in_adapted_model(_inactive),
    "adapter-wrong-scaling": _in_adapted_model(_double_scaling),
    "base-bit-flip": _in_base(_base_bit),
    "base-through-bfloat16": _in_base(_base_through_bfloat16),
    "merge-bit-flip": _in_merge(_one_bit_of_weight),
    "merge-in-tf32": _products_in_tf32,
    "merge-zeros": _in_delta(torch.zeros_like),
    "merge-off": _in_delta(lambda delta: delta * 1.001),
    "merge-fails": _in_delta(_kernel_fails),
    "forward-off": _in_activations(lambda found: {name: tensor * (1 + 1e-4) for name, tensor in found.items()}),
    "forward-fails": _in_activations(_operator_fails),
    "merge-not-repeatable": _in_delta(_flaky),
    "setting-flipped": _at_merged(lambda: torch.set_float32_matmul_precision("medium")),
    "killed": _at_merged(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "hung": _at_merged(_hang),
    "stopped": _at_merged(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "out-of-memory": _at_merged(_out_of_memory),
}
"""Every fault by its name."""
