"""The peak memory of one training step of an adapter: forward, backward, AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency.worker.memory.peak import meter_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Memory of one training step: its peak over what was held before, and the model's output counted in float32."""

    peak_bytes: int
    output_bytes: int

    @property
    def allowed_bytes(self) -> int:
        """Return the limit of the same step through a wrapper.

        A wrapper that computes nothing itself runs the same operations, and on the CPU their peak is the same to the
        byte. It may return the model's output in another form: one copy of it, in float32.
        """
        return self.peak_bytes + self.output_bytes


def training_step(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Step:
    """Train an adapter by one step, after a first one that is not measured.

    The first step creates what stays: the optimizer's state, workspaces, the states of quantized layers.

    Raises
    ------
    ValueError
        No parameter can be trained, the model returns nothing to make a loss of, or the backend counts no peak.
    """
    model.train()
    device = next(p for p in model.parameters() if not p.is_meta).device
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter can be trained")
    optimizer = torch.optim.AdamW(trainable)
    sizes = []

    def step() -> None:
        output = model(**moved)
        sizes.append(sum(4 * t.numel() for t in _tensors(output)))
        _loss(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    meter = meter_of(device, before_reset=lambda: None)
    if meter is None:
        raise ValueError(f"torch.{device.type} counts no peak of allocated bytes")
    return Step(peak_bytes=meter.measure(lambda _: step()).whole, output_bytes=sizes[-1])


def _loss(output: Any) -> torch.Tensor:
    """Return the loss of an output, or a scalar to train by where it has none."""
    tensors = [tensor for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise ValueError("what the model returns depends on no parameter that is trained")
    loss = next((tensor for tensor in tensors if tensor.dim() == 0), None)
    if loss is None:
        return tensors[0].float().square().mean()
    return loss


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return every tensor in a model's output, also inside mappings and sequences."""
    if isinstance(output, torch.Tensor):
        return [output]
    if not isinstance(output, (Mapping, tuple, list)):
        return []
    values = output.values() if isinstance(output, Mapping) else output
    tensors = []
    for value in values:
        tensors += _tensors(value)
    return tensors
