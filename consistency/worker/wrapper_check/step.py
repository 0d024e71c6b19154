"""The peak memory of one training step of an adapter: forward, backward, AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one training step took.

    Attributes
    ----------
    peak_bytes : int
        Over what was held before it.
    output_bytes : int
        What the model returned, counted in float32.
    """

    peak_bytes: int
    output_bytes: int

    @property
    def allowed_bytes(self) -> int:
        """Return what the same step may take through a wrapper.

        A wrapper that computes nothing of its own runs the same operations, and on the CPU their peak is the same to
        the byte. It may hand on what the model returns in another form: one copy of it, in float32.
        """
        return self.peak_bytes + self.output_bytes


def training_step(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Step:
    """Train an adapter by one step, after a first one that is not looked at.

    The first step makes the optimizer's state, and what libraries keep: workspaces, the states of quantized layers.

    Raises
    ------
    ValueError
        No parameter can be trained, or the model returns nothing that a loss could be made of.
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
        sizes.append(_bytes_of(output))
        _loss(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = _on_the_host(step) if device.type == "cpu" else _on_a_device(step, device)
    return Step(peak_bytes=peak, output_bytes=sizes[-1])


def _on_the_host(step: Any) -> int:
    """Sum what the profiler saw allocated and freed, one after the other: the same figure in every run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as seen:
        step()
    held = peak = 0
    events = seen.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _on_a_device(step: Any, device: torch.device) -> int:
    module = torch.get_device_module(device.type)
    module.synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    step()
    module.synchronize(device)
    return int(module.max_memory_allocated(device) - before)


def _loss(output: Any) -> torch.Tensor:
    """Return the loss of an output, or a number to train by where it has none."""
    tensors = [t for t in _tensors(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise ValueError("what the model returns depends on no parameter that is trained")
    scalar = next((t for t in tensors if t.dim() == 0), None)
    return tensors[0].float().square().mean() if scalar is None else scalar


def _bytes_of(output: Any) -> int:
    return sum(4 * t.numel() for t in _tensors(output))


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [t for value in output.values() for t in _tensors(value)]
    if isinstance(output, (tuple, list)):
        return [t for value in output for t in _tensors(value)]
    return []
