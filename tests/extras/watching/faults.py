"""Faults that are planted into a training at a step, most of them on rank 1."""

from __future__ import annotations

from typing import Any

import torch

from tests.extras.watching.trainings import Training, block, flip, is_of_the_device


def lora_bit(step: int, training: Training) -> None:
    if step == 3 and training.rank == 1:
        flip(block(training).self_attn.q_proj.lora_B["default"].weight)


def base_bit(step: int, training: Training) -> None:
    if step == 3 and training.rank == 1:
        flip(block(training).mlp.up_proj.weight)


def buffer_bit(step: int, training: Training) -> None:
    training.call.broadcast_buffers = False  # on all ranks, as broadcast_buffers=False
    if step == 3 and training.rank == 1:
        flip(training.model.get_base_model().model.rotary_emb.inv_freq)


def old_state(step: int, training: Training) -> None:
    weight = block(training).self_attn.q_proj.lora_B["default"].weight
    if step == 3 and training.rank == 1:
        training.kept["old"] = training.optimizer.state[weight]["exp_avg"].clone()
    if step == 4 and training.rank == 1:
        training.optimizer.state[weight]["exp_avg"].copy_(training.kept["old"])


def scaled_attention(step: int, training: Training) -> None:
    """Multiply the attention's output of one layer by 1.02 on rank 1, as a card that computes wrongly."""
    if step == 3 and training.rank == 1:

        def scale(module: Any, args: Any, output: Any) -> Any:
            return (output[0] * 1.02, *output[1:]) if is_of_the_device() else output

        block(training).self_attn.register_forward_hook(scale)


def zero_backward(step: int, training: Training) -> None:
    """Make the gradient that leaves one MLP zero on rank 1, as a card that computes wrongly."""
    if step == 3 and training.rank == 1:

        def vanish(module: Any, incoming: Any, outgoing: Any) -> Any:
            return tuple(None if g is None else g * 0 for g in incoming) if is_of_the_device() else None

        block(training).mlp.register_full_backward_hook(vanish)


def drop_rank(step: int, training: Training) -> None:
    if step == 1:
        training.call.register_comm_hook(training, _dropping)


def _dropping(training: Training, bucket: Any) -> Any:
    tensor = bucket.buffer() * (0 if training.rank == 1 else 1) / (training.world - 1)
    return torch.distributed.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


def add_in_half(step: int, training: Training) -> None:
    if step == 1:
        training.call.register_comm_hook(training, _halving)


def _halving(training: Training, bucket: Any) -> Any:
    tensor = bucket.buffer().bfloat16() / training.world
    return torch.distributed.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0].float())


def late_sum(step: int, training: Training) -> None:
    if step == 1:
        training.call.register_comm_hook(training, _late)


def _late(training: Training, bucket: Any) -> Any:
    """Return the sum of the step before, as a reduction that nobody waits for."""
    tensor = bucket.buffer() / training.world
    before = training.kept.get("before", tensor.clone())

    def done(future: Any) -> Any:
        training.kept["before"] = future.value()[0].clone()
        return before

    return torch.distributed.all_reduce(tensor, async_op=True).get_future().then(done)


for hook in (_dropping, _halving, _late):
    hook.__annotations__.clear()  # DistributedDataParallel takes no other than its own, which here are texts


def no_fault(step: int, training: Training) -> None:
    pass
