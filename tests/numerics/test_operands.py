"""Every tensor among operands is replaced, and nothing else."""

from __future__ import annotations

import torch

from consistency.numerics.widening import each_tensor


def test_tensors_are_replaced_at_any_depth_and_the_rest_stays() -> None:
    one = torch.ones(2)
    found = each_tensor(lambda tensor: tensor + 1, ([one, (one, 3)], {"a": [one], "b": None}, torch.Size([2])))
    assert found[0][0].tolist() == found[0][1][0].tolist() == found[1]["a"][0].tolist() == [2, 2]
    assert (type(found[0]), type(found[0][1]), found[0][1][1], found[1]["b"], found[2]) == (list, tuple, 3, None, (2,))
    assert one.tolist() == [1, 1]


def test_a_subclass_is_a_tensor() -> None:
    assert each_tensor(lambda tensor: tensor.detach() * 2, [torch.nn.Parameter(torch.ones(1))])[0].item() == 2
